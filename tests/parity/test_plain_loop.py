"""The whole trainer against the loop that one writes by hand: groups with rewards in, losses, gradient norms and
weights out; of a whole model and of an adapter on all its linear layers.

Ours: flatten, credit, assemble, micro-batches, `LocalTrainer`. The other: a plain `transformers` model, one forward for
each rollout, the papers' losses, `clip_grad_norm_`, `torch.optim.AdamW`. Conversations of several turns at temperature
0.7, recorded under other probabilities than the policy's, each update trained twice.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from common.tiny_adapters import tiny_adapter
from safetensors.torch import load_file
from suite import short_of
from torch import nn
from transformers import AutoModelForCausalLM

from sparring.algo.annotate.trainer_quantity import TrainerQuantity
from sparring.algo.config import AlgoConfig, named
from sparring.algo.loss.policy import PolicyLoss
from sparring.algo.pipeline import load_credit
from sparring.batch.batches import Plan, assemble
from sparring.batch.flatten import flatten
from sparring.generation import Runs, Sampling
from sparring.model.causal import CausalModel
from sparring.model.config import InitConfig
from sparring.model.create import create
from sparring.model.load import load
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Group, Outcome, Rollout, Score, Segment, Task, Trajectory

VOCABULARY, TEMPERATURE, LONGEST = 96, 0.7, 11
UPDATES, PASSES = 3, 2
TRAIN = TrainConfig(learning_rate=2e-3, weight_decay=0.1, schedule="cosine", warmup_steps=2, min_ratio=0.1, beta2=0.99)
REWARDS = ((1.0, 0.0, 0.5), (0.0, 0.0, 1.0), (1.0, 1.0, 1.0))
"""Of the groups of an update; the last tells nothing."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What is compared: `[algo]`, and its loss in the terms of `hand_loss`."""

    algo: Mapping[str, Any]
    low: float
    high: float
    aggregation: str
    divide: bool = True
    flat_groups_count: bool = True
    sequence: bool = False
    anchored: bool = False
    kl: float = 0.0
    entropy: float = 0.0
    clip: float = 2.0


ALGORITHMS = {
    "grpo": Algorithm(
        algo={"preset": "grpo", "zero_variance_filter": False}, low=0.2, high=0.2, aggregation="of sequences"
    ),
    "dapo": Algorithm(
        algo={"preset": "dapo", "zero_variance_filter": True},
        low=0.2,
        high=0.28,
        aggregation="of tokens",
        flat_groups_count=False,
    ),
    "dr_grpo": Algorithm(
        algo={"preset": "dr_grpo", "zero_variance_filter": False, "max_tokens": LONGEST},
        low=0.2,
        high=0.2,
        aggregation="over a constant",
        divide=False,
        clip=0.5,
    ),
    "gspo": Algorithm(
        algo={"preset": "gspo", "zero_variance_filter": False, "gate": {"low": 0.1, "high": 0.12}},
        low=0.1,
        high=0.12,
        aggregation="of sequences",
        sequence=True,
    ),
    "anchored": Algorithm(
        algo={
            "anchor": "proximal",
            "correction": "tis",
            "gate": {"name": "clip", "low": 0.2, "high": 0.28},
            "kl": {"coefficient": 0.05, "estimator": "k3"},
            "entropy_bonus": 0.01,
            "zero_variance_filter": False,
        },
        low=0.2,
        high=0.28,
        aggregation="of tokens",
        anchored=True,
        kl=0.05,
        entropy=0.01,
    ),
}


# What both are given.


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy and the reference that it is kept near."""
    shape: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    init = InitConfig(**shape, intermediate_size=48, max_positions=64, initializer_range=0.3)
    policy, reference = (tmp_path_factory.mktemp("model") / name for name in ("policy", "reference"))
    create(init, VOCABULARY, policy, 0, eos_token_id=1, pad_token_id=0)
    model, draw = plain(policy), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=draw)
    model.save_pretrained(reference)
    return policy, reference


@pytest.fixture(scope="module")
def adapted(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An adapter of the policy, both factors of which are away from zero, and the same reference."""
    return tiny_adapter(folders[0], tmp_path_factory.mktemp("adapter") / "policy", seed=2), folders[1]


@pytest.fixture(scope="module")
def updates(folders: tuple[Path, Path]) -> list[list[Group]]:
    """Per update its groups, recorded under probabilities near the first weights'."""
    draw, model = np.random.default_rng(7), plain(folders[0])
    return [[group(draw, model, 10 * update + g, REWARDS[g]) for g in range(len(REWARDS))] for update in range(UPDATES)]


def group(draw: np.random.Generator, model: Any, number: int, rewards: Sequence[float]) -> Group:
    """Rollouts of one prompt: a reply, a tool's answer, and so on, one to three replies."""
    task = Task(id=f"t{number}", env="e", messages=())
    prompt, rollouts = words(draw, 4), []
    for index in range(len(rewards)):
        parts = [prompt]
        for turn in range(int(draw.integers(1, 4))):
            parts += [words(draw, int(draw.integers(1, 4)))] * bool(turn) + [words(draw, int(draw.integers(1, 6)))]
        with torch.no_grad():
            logprobs, _ = judged(model, [token for part in parts for token in part])
        # good rollouts have become rarer and bad ones likelier: advantages alone would add up to a loss of nearly
        # nothing
        noise, segments, start = draw.normal(0.6 * (rewards[index] - 0.5), 0.35, size=len(logprobs)), [], 0
        for at, tokens in enumerate(parts):
            own, stop = at % 2 == 1, start + len(tokens)
            recorded = (
                tuple(min(0.0, float(logprobs[t - 1] + noise[t - 1])) for t in range(start, stop)) if own else None
            )
            sampled = {"model": "policy", "logprobs": recorded, "versions": Runs.of(0, len(tokens))} if own else {}
            segments.append(
                Segment(
                    index=at,
                    parent=at - 1 if at else None,
                    source="policy" if own else "tool" if at else "prompt",
                    tokens=tokens,
                    sampling=Sampling(temperature=TEMPERATURE) if own else None,
                    **sampled,
                )
            )
            start = stop
        name = f"{number}/{index}"
        done = Outcome(kind="completed", reason="answered")
        trajectory = Trajectory(id=name, task=task.id, role="policy", segments=tuple(segments), outcome=done)
        rollouts.append(
            Rollout(id=name, task=task, index=index, attempt=0, purpose="train", trajectories=(trajectory,))
        )
    scores = tuple(Score(reward=reward) for reward in rewards)
    return Group(id=str(number), index=number, task=task, rollouts=tuple(rollouts), scores=scores)


def words(draw: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(draw.integers(2, VOCABULARY, count).tolist())


# The loop by hand.


class Adapted(nn.Module):
    """W x + scale B A x (arXiv 2106.09685, equation 3), of which A [R, K] and B [M, R] are trained."""

    def __init__(self, base: nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.lora_A, self.lora_B = (nn.Linear(*reversed(factor.shape), bias=False) for factor in (a, b))
        self.lora_A.weight.data, self.lora_B.weight.data = a, b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * self.lora_B(self.lora_A(x))


def plain(folder: Path) -> Any:
    """The library's model; of a folder with an adapter its base, whose linear layers have terms beside them."""
    if (folder / "config.json").exists():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    about = json.loads((folder / "adapter_config.json").read_text())
    model = plain(Path(about["base_model_name_or_path"])).requires_grad_(False)
    factors = load_file(folder / "adapter_model.safetensors")
    for name in sorted({name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in factors}):
        a, b = (factors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
        model.set_submodule(name, Adapted(model.get_submodule(name), a, b, about["lora_alpha"] / about["r"]))
    return model


def judged(model: Any, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of all tokens but the first, and entropies, of what is sampled from at the temperature."""
    logits = model(torch.tensor([list(tokens)])).logits[0, :-1].double() / TEMPERATURE
    of_all = torch.log_softmax(logits, dim=-1)
    entropies = -(of_all.exp() * of_all).sum(-1)
    return of_all.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], entropies


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A rollout as the loop by hand knows it: its tokens, which of them are the policy's, how likely these were."""

    tokens: list[int]
    places: torch.Tensor
    recorded: torch.Tensor
    advantage: float
    flat: bool


def conversations(groups: Sequence[Group], algorithm: Algorithm) -> list[Conversation]:
    found = []
    for of in groups:
        rewards = np.array([score.reward for score in of.scores], float)
        deviation = math.sqrt(((rewards - rewards.mean()) ** 2).sum() / (len(rewards) - 1)) + 1e-6
        for rollout, reward in zip(of.rollouts, rewards, strict=True):
            tokens, places, recorded = [], [], []
            for segment in rollout.trajectories[0].segments:
                if segment.logprobs is not None:
                    places += range(len(tokens) - 1, len(tokens) - 1 + len(segment.tokens))
                    recorded += segment.logprobs
                tokens += segment.tokens
            found.append(
                Conversation(
                    tokens=tokens,
                    places=torch.tensor(places),
                    recorded=torch.tensor(recorded, dtype=torch.float64),
                    advantage=float(reward - rewards.mean()) / (deviation if algorithm.divide else 1.0),
                    flat=bool(rewards.min() == rewards.max()),
                )
            )
    return [one for one in found if algorithm.flat_groups_count or not one.flat]


def hand_loss(
    model: Any, rows: Sequence[tuple[Conversation, torch.Tensor, torch.Tensor]], algorithm: Algorithm
) -> torch.Tensor:
    """Of conversations, each with the log-probabilities of its replies before the update and under the reference."""
    every = sum(len(one.places) for one, _, _ in rows)
    total = torch.zeros((), dtype=torch.float64)
    for one, before, reference in rows:
        now, entropy = (values[one.places] for values in judged(model, one.tokens))
        moved = now - (before if algorithm.anchored else one.recorded)
        ratio = (moved.mean() if algorithm.sequence else moved).exp()
        bound = ratio.clamp(1 - algorithm.low, 1 + algorithm.high)
        gain = torch.minimum(ratio * one.advantage, bound * one.advantage)
        if algorithm.anchored:
            gain = gain * (before - one.recorded).exp().clamp(max=2.0)
        apart = reference - now
        gain = gain - algorithm.kl * (apart.exp() - 1 - apart) + algorithm.entropy * entropy
        of_tokens = gain.expand(len(one.places))
        if algorithm.aggregation == "of sequences":
            total = total - of_tokens.mean() / len(rows)
        elif algorithm.aggregation == "of tokens":
            total = total - of_tokens.sum() / every
        else:
            total = total - of_tokens.sum() / (len(rows) * LONGEST)
    return total


def hand_rate(step: int) -> float:
    """Up in two steps, then down along a cosine to a tenth in the last of six."""
    if step < 2:
        return (0.5, 1.0)[step] * 2e-3
    return 2e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 2) / 3)) / 2)


def by_hand(
    folders: tuple[Path, Path],
    updates: Sequence[Sequence[Group]],
    algorithm: Algorithm,
    given: Sequence[Mapping[str, torch.Tensor]] = (),
) -> tuple[list[Any], Any]:
    """(loss, gradient norm, learning rate, weights after it) of each optimiser step, and the model, in float64.

    Each step starts from the weights `given` for it. Without them it starts from those of the step before.
    """
    model, reference = (plain(folder).double() for folder in folders)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) == wide] for wide in (True, False))
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.99),
        eps=1e-8,
    )
    steps: list[Any] = []
    for groups in updates:
        of = conversations(groups, algorithm)
        if given:
            model.load_state_dict(given[len(steps)], strict=False)
        with torch.no_grad():
            rows = [(one, *(judged(m, one.tokens)[0][one.places] for m in (model, reference))) for one in of]
        for _ in range(PASSES):
            if given:
                model.load_state_dict(given[len(steps)], strict=False)
            rate = hand_rate(len(steps))
            for settings in optimiser.param_groups:
                settings["lr"] = rate
            loss = hand_loss(model, rows, algorithm)
            optimiser.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, algorithm.clip)
            optimiser.step()
            steps.append((loss.item(), norm.item(), rate, weights_of(model)))
    return steps, model


def weights_of(module: Any) -> dict[str, torch.Tensor]:
    """What is trained, by name."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name: weight.detach().clone() for name, weight in module.state_dict().items() if name in trained}


# Ours.


def ours(
    folders: tuple[Path, Path], updates: Sequence[Sequence[Group]], algorithm: Algorithm, budget: int
) -> tuple[list[Any], Any, float]:
    """The same of our trainer in float32, and how many of its tokens a gate stopped."""
    config = msgspec.convert(named(algorithm.algo), AlgoConfig)
    train = msgspec.structs.replace(TRAIN, token_budget=budget, gradient_clip=algorithm.clip)
    model, credit = load(folders[0]), load_credit(config, seed=0)
    plan = Plan(passes=PASSES, idle_rows=config.needs_idle_rows)
    steps: list[Any] = []
    stopped = 0.0

    async def run() -> None:
        nonlocal stopped
        trainer = LocalTrainer(model, train, [PolicyLoss(config)], name="policy", total_steps=UPDATES * PASSES)
        other = LocalTrainer(load(folders[1]), train, [], name="reference", total_steps=1)
        annotators = [TrainerQuantity(trainer.forward, "proximal")] if config.needs_proximal else []
        annotators += [TrainerQuantity(other.forward, "reference")] if config.needs_reference else []
        try:
            for number, groups in enumerate(updates, 1):
                rows = [row for of in groups for row in flatten(of, "policy")]
                for annotator in annotators:
                    rows = list(await annotator.annotate(rows))
                for batch in assemble(groups, rows, credit=credit, model="policy", step=number, plan=plan):
                    found = await trainer.forward_backward(batch)
                    done = await trainer.step(ends_update=batch.ends_update)
                    step = found["loss_policy"], done.metrics["grad_norm"], done.metrics["learning_rate"]
                    steps.append((*step, trained(model)))
                    stopped += found["clip_fraction"]
                    assert (found["micro_batches"] > 2) == (budget < 100)  # what fits is computed in two halves
        finally:
            await trainer.close()
            await other.close()

    asyncio.run(run())
    return steps, trained(model), stopped


def trained(model: CausalModel) -> dict[str, torch.Tensor]:
    """What is trained of ours, by the names of the plain model."""
    parameters = (model.adapters.everywhere or model).parameters()
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


@pytest.mark.parametrize(
    ("name", "budget"),
    short_of([(name, budget) for name in ALGORITHMS for budget in (16, 10_000)], [("anchored", 10_000), ("grpo", 16)]),
)
def test_losses_gradient_norms_and_weights_are_those_of_a_loop_by_hand(
    name: str, budget: int, folders: tuple[Path, Path], updates: list[list[Group]]
) -> None:
    compare(ALGORITHMS[name], budget, folders, updates)


@pytest.mark.parametrize("budget", [16, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["anchored", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "dapo"))]
)
def test_adapter_losses_norms_and_weights_match_a_loop_by_hand(
    name: str, budget: int, adapted: tuple[Path, Path], updates: list[list[Group]]
) -> None:
    """Of products that are computed jointly, too: queries, keys and values, and gate and up."""
    compare(ALGORITHMS[name], budget, adapted, updates)


def compare(algorithm: Algorithm, budget: int, folders: tuple[Path, Path], updates: list[list[Group]]) -> None:
    found, mine, stopped = ours(folders, updates, algorithm, budget)
    first = weights_of(plain(folders[0]))
    starts = [first, *(weights for _, _, _, weights in found[:-1])]
    # step by step, each from our weights: what one step computes, and no weights that drift apart
    expected, _ = by_hand(folders, updates, algorithm, starts)
    losses, norms, rates, ends = (list(column) for column in zip(*expected, strict=True))
    assert [loss for loss, _, _, _ in found] == pytest.approx(losses, rel=1e-5)
    assert [norm for _, norm, _, _ in found] == pytest.approx(norms, rel=1e-5)
    assert [rate for _, _, rate, _ in found] == pytest.approx(rates, rel=1e-12)
    for start, end, (_, _, _, weights) in zip(starts, ends, found, strict=True):
        assert apart(weights, end) < 2e-2 * apart(start, end)
    assert stopped > 0, "no ratio reached a bound"
    assert max(norms) > algorithm.clip
    # and each loop by itself, from the first step to the last
    expected, theirs = by_hand(folders, updates, algorithm)
    assert [norm for _, norm, _, _ in found] == pytest.approx([norm for _, norm, _, _ in expected], rel=1e-4)
    moved = apart(first, weights_of(theirs))
    assert moved > 1e-3 and apart(mine, weights_of(theirs)) < 1e-2 * moved


def apart(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between two models' weights."""
    return max(float((weight - other[name]).abs().max()) for name, weight in one.items())
