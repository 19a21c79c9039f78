"""Law 2: what truncated sampling kept travels with the token, and the trainer renormalises over exactly that set."""

import asyncio
from dataclasses import replace

import pytest
import torch
from suite import short_of

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.policy import PolicyLoss
from sparring.algo.pipeline import load_credit
from sparring.batch.batches import assemble
from sparring.batch.flatten import flatten
from sparring.engine.config import BatchConfig, EngineConfig
from sparring.engine.native import NativeEngine
from sparring.generation import Constraint, GenerateRequest, Preface, Sampling
from sparring.model import head
from sparring.model.load import load
from sparring.store.codec import decode, encode
from sparring.testing.tiny_models import VOCABULARY, tiny_model
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Group, Outcome, Rollout, Score, Segment, Task, Trajectory

pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths(portable=False)]


def alternating(tokens):
    """Even ids, then odd ones, and so on."""
    return bytes([0b10101010 if len(tokens) % 2 else 0b01010101] * (VOCABULARY // 8))


LIMITS = {
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 50},
    "min-p": {"min_p": 0.05},
    "grammar": {"allowed": alternating},
    "grammar and all": {"allowed": alternating, "top_p": 0.9, "top_k": 30, "min_p": 0.05},
    "all": {"top_p": 0.9, "top_k": 50, "min_p": 0.05, "temperature": 0.8},
}
SHORT = ("top-k", "grammar", "all")
STOPS = tuple(range(0, VOCABULARY, 5))
BIAS = ((3, 2.5), (8, -1e30), (10, 4.0), (77, -1.25))
CHANGES = {
    "bias": {"logit_bias": BIAS},
    "minimum": {"min_tokens": 6, "stop": (*STOPS, VOCABULARY + 9)},
    "bias, minimum and top-p": {"logit_bias": BIAS, "min_tokens": 6, "stop": STOPS, "top_p": 0.9},
    "bias and grammar": {"logit_bias": BIAS, "allowed": alternating},
}
THOUGHT = {
    "preface": Preface(end=7, text=(4,)),
    "allowed": alternating,
    "constraint": Constraint(kind="regex", source="which `allowed` says in ids"),
    "logit_bias": ((7, 2.5),),
    "stop": STOPS,
}
TASK = Task(id="t", env="e", messages=())


@pytest.fixture(scope="module", params=["qwen3", "olmo2"])
def path(request, tmp_path_factory):
    """One of the family that is served in one call a step, and one that is not."""
    return tiny_model(request.param, tmp_path_factory.mktemp("model") / request.param, seed=6)


def group_of(answers):
    """A group whose rollouts have one sampled turn each; rewards differ. Written down and read again."""
    rollouts = []
    for number, (request, answer) in enumerate(answers):
        segments = (
            Segment(index=0, parent=None, source="prompt", tokens=request.tokens),
            Segment(
                index=1,
                parent=0,
                source="policy",
                tokens=answer.tokens,
                model="policy",
                logprobs=answer.logprobs,
                versions=answer.versions,
                kv_versions=answer.kv_versions,
                sampling=request.sampling,
                kept=answer.kept,
            ),
        )
        segments = tuple(decode(encode(segment), Segment) for segment in segments)
        done = Outcome(kind="completed", reason="answered")
        trajectory = Trajectory(id=f"r{number}", task="t", role="policy", segments=segments, outcome=done)
        rollouts.append(
            Rollout(id=f"r{number}", task=TASK, index=number, attempt=0, purpose="train", trajectories=(trajectory,))
        )
    scores = tuple(Score(reward=float(number % 3)) for number in range(len(rollouts)))
    return Group(id="g", index=0, task=TASK, rollouts=tuple(rollouts), scores=scores)


def batch_of(group, step, *, forget=False):
    rows = flatten(group, "policy")
    rows = [replace(row, kept=None, bias=None) for row in rows] if forget else rows
    [batch] = assemble([group], rows, credit=load_credit(AlgoConfig(), seed=0), model="policy", step=step)
    return batch


async def sampled(engine, limits, seed):
    limits = dict(limits)
    rules = {name: limits.pop(name, None) for name in ("allowed", "ends", "preface")}
    requests = [
        GenerateRequest(
            id=str(n),
            tokens=tuple((7 * (n // 3) + 3 * j) % VOCABULARY for j in range(4 + 9 * (n // 3))),
            sampling=Sampling(max_tokens=10 + n, seed=seed + n, **limits),
            **rules,
        )
        for n in range(9)
    ]
    return list(zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True))


def steps(path, dtype, limits):
    """Two RL steps: metrics of both, of the first one without its kept sets, and what was sampled for it."""
    config = TrainConfig(learning_rate=1e-2, token_budget=90, warmup_steps=0)

    def trainer():
        return LocalTrainer(
            load(path, dtype=dtype), config, [PolicyLoss(AlgoConfig())], name="policy", total_steps=2, threads=1
        )

    async def main():
        engine = NativeEngine(
            load(path, dtype=dtype), EngineConfig(batch=BatchConfig(max_running=4, max_tokens=24)), threads=1
        )
        ours, other = trainer(), trainer()
        answers = await sampled(engine, limits, 0)
        without = await other.forward_backward(batch_of(group_of(answers), 1, forget=True))
        found = []
        for step in (1, 2):
            found.append(
                await ours.forward_backward(batch_of(group_of(await sampled(engine, limits, 100 * (step - 1))), step))
            )
            await ours.step()
            await engine.pull(await ours.push())
        for part in (engine, ours, other):
            await part.close()
        return found, without, answers

    return asyncio.run(main())


@pytest.mark.parametrize("dtype", short_of(["float32", "bfloat16"], ["bfloat16"]))
@pytest.mark.parametrize(
    "limits",
    [pytest.param(LIMITS[name], marks=() if name in SHORT else pytest.mark.full, id=name) for name in LIMITS],
)
def test_the_importance_ratio_at_equal_weights_is_one(path, dtype, limits):
    found, without, answers = steps(path, dtype, limits)
    for metrics in found:
        assert metrics["logprob_max_abs_diff"] == 0.0
        assert metrics["ratio"] == 1.0 and metrics["approx_kl"] == 0.0
        assert metrics["logprob_stale_share"] == 0.0 and metrics["tokens_trained"] > 50
    assert without["logprob_max_abs_diff"] > 1e-3, "without what was kept it is another distribution"
    assert without["ratio"] < 1.0
    for _, answer in answers:
        assert len(answer.kept) == len(answer.tokens)
        sets = [answer.kept.ids(place) for place in range(len(answer.tokens))]
        assert all(
            token in ids and ids == tuple(sorted(set(ids))) for token, ids in zip(answer.tokens, sets, strict=True)
        )
        assert all(len(ids) < VOCABULARY for ids in sets)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("limits", CHANGES.values(), ids=CHANGES)
def test_the_ratio_is_one_where_logits_were_changed(path, dtype, limits):
    found, without, answers = steps(path, dtype, limits)
    for metrics in found:
        assert (metrics["logprob_max_abs_diff"], metrics["ratio"], metrics["logprob_stale_share"]) == (0.0, 1.0, 0.0)
        assert metrics["tokens_trained"] > 20
    assert without["logprob_max_abs_diff"] > 1e-3, "without what was added it is another distribution"
    least = limits.get("min_tokens", 0)
    assert all(not set(answer.tokens[:least]) & set(STOPS) for _, answer in answers)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_ratio_is_one_inside_a_thought_and_behind_it(path, top_p):
    """A thought has no stop tokens, whether a kept set says so or, without one, the constraint of the turn."""
    found, without, answers = steps(path, "float32", {**THOUGHT, "top_p": top_p})
    for metrics in found:
        assert (metrics["logprob_max_abs_diff"], metrics["ratio"], metrics["logprob_stale_share"]) == (0.0, 1.0, 0.0)
    assert without["logprob_max_abs_diff"] > 1e-3, "without what was left out it is another distribution"
    thoughts = [list(answer.tokens).index(7) if 7 in answer.tokens else None for _, answer in answers]
    assert len({*thoughts}) > 3 and (None in thoughts or top_p < 1)
    for (_, answer), end in zip(answers, thoughts, strict=True):
        ended = len(answer.tokens) if end is None else end + 1
        assert not {*answer.tokens[:ended]} & {*STOPS}
        assert (
            answer.kept is None
            or top_p < 1
            or [bool(row) for row in answer.kept.rows] == [place >= ended for place in range(len(answer.tokens))]
        )


def test_a_turn_that_ends_at_a_string_is_trained_up_to_there(path):
    """Tokens behind the one that completes a stop string were computed, and are no part of the turn."""

    def ends(tokens, new):
        return next((n for n in range(len(tokens) - new + 1, len(tokens) + 1) if tokens[n - 1] % 7 == 0), None)

    found, _, answers = steps(path, "float32", {"ends": ends})
    assert [(metrics["logprob_max_abs_diff"], metrics["ratio"]) for metrics in found] == [(0.0, 1.0)] * 2
    stopped = [answer for _, answer in answers if answer.finish_reason == "stop"]
    assert len(stopped) > 3 and len(stopped) < len(answers) + 1
    assert all([t % 7 == 0 for t in a.tokens] == [False] * (len(a.tokens) - 1) + [True] for a in stopped)


def test_no_kept_ids_without_truncation(path):
    async def main():
        engine = NativeEngine(load(path), EngineConfig(), threads=1)
        free, limited = [await sampled(engine, limits, 0) for limits in ({}, {"top_k": 5})]
        # beside requests that are truncated, and where a request keeps all there is
        both = await asyncio.gather(
            *(engine.generate(replace(request, id=f"both {request.id}")) for request, _ in (*free, *limited)),
            engine.generate(replace(free[0][0], sampling=replace(free[0][0].sampling, top_k=VOCABULARY))),
            engine.generate(replace(free[0][0], sampling=replace(free[0][0].sampling, temperature=0.0, top_k=2))),
        )
        await engine.close()
        return free, limited, both

    free, limited, both = asyncio.run(main())
    assert all(answer.kept is None for _, answer in free) and both[-1].kept is None
    assert [a.kept for a in both[:9]] == [None] * 9 and [a.kept for a in both[9:18]] == [a.kept for _, a in limited]
    assert [(a.tokens, a.logprobs) for a in both[:18]] == [(a.tokens, a.logprobs) for _, a in (*free, *limited)]
    assert (both[18].tokens, both[18].logprobs, both[18].kept) == (free[0][1].tokens, free[0][1].logprobs, None)


def test_chunks_and_recomputation_do_not_change_ratios(path):
    """Rows with and without a kept set, in chunks, kept or computed again for the backward pass."""
    model, count = load(path), 2 * head.CHUNK_ROWS + 5
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, 48, generator=generator)
    targets = torch.randint(VOCABULARY, (count,), generator=generator)
    sets = [sorted({int(t), 1, 40 + n % 20}) if n % 3 else [] for n, t in enumerate(targets)]
    ids = torch.tensor([i for row in sets for i in row], dtype=torch.int32)
    kept = (torch.tensor([0, *map(len, sets)]).cumsum(0), ids)
    found = []
    for limit in (count * VOCABULARY, 0):
        hidden = values.clone().requires_grad_()
        logprob = head.token_quantities(
            model, hidden, targets, torch.ones(count), {"logprob"}, kept, keep_elements=limit
        )["logprob"]
        found.append((logprob.detach(), *torch.autograd.grad(logprob.sum(), hidden)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for n in (0, 1, 1023, 1024, 1025, count - 1):
        own = (torch.tensor([0, len(sets[n])]), torch.tensor(sets[n], dtype=torch.int32))
        alone = head.token_quantities(model, values[n : n + 1], targets[n : n + 1], torch.ones(1), {"logprob"}, own)[
            "logprob"
        ]
        assert torch.equal(alone, found[0][0][n : n + 1])
