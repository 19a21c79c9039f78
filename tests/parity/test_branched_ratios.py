"""Ratios of whole sequences in conversations that branch, against their equations on paper.

The bandits of `test_branched_bandit.py` are sampled by one policy and trained by another, so that ratios are not 1. A
sequence is all that was pulled in a rollout, in whichever branch; its rows are computed in two micro-batches that share
every trajectory between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from test_branched_bandit import BANDITS, PULLS, SUM, TASK, Bandit, Pulls, chance, policy, recorded, reward

from sparring.algo.config import AlgoConfig, named
from sparring.algo.loss.policy import PolicyLoss
from sparring.algo.pipeline import load_credit
from sparring.batch.batches import Plan, assemble
from sparring.batch.flatten import flatten
from sparring.batch.tensors import MicroBatch, micro_batch
from sparring.train.survey import needs_survey
from sparring.types import Group, Rollout, Sample, Score

BASELINE = 0.4
Tables = Mapping[str, torch.Tensor]
Paper = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""What a path adds to the objective: of its tokens' log-probabilities now [T], when sampled [T], and its advantage."""


def gspo(now: torch.Tensor, then: torch.Tensor, advantage: float) -> torch.Tensor:
    """Equation 5 of arXiv 2507.18071, without its clip."""
    return (now - then).mean().exp() * advantage


def clipped_gspo(now: torch.Tensor, then: torch.Tensor, advantage: float) -> torch.Tensor:
    ratio = (now - then).mean().exp()
    return torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)


def gmpo(now: torch.Tensor, then: torch.Tensor, advantage: float) -> torch.Tensor:
    """Equation 4 of arXiv 2507.20673."""
    logs = now - then
    within = logs.clamp(max=math.log(1.2)) if advantage > 0 else logs.clamp(min=math.log(0.8))
    return within.mean().exp() * advantage


def topr(now: torch.Tensor, then: torch.Tensor, advantage: float) -> torch.Tensor:
    """Equations 7 and 8 of arXiv 2503.14286."""
    weight = 1.0 if advantage >= 0 else (now - then).sum().exp().clamp(max=1.0).item()
    return weight * advantage * now.sum()


def truncated(now: torch.Tensor, then: torch.Tensor, advantage: float) -> torch.Tensor:
    """An importance weight of the whole rollout, of at most 1.1, its ratio to what stood before the update 1."""
    return (now - then).sum().exp().clamp(max=1.1).item() * advantage * (now - now.detach()).exp().sum()


def masked(now: torch.Tensor, then: torch.Tensor, advantage: float) -> torch.Tensor:
    """The geometric mean of the rollout's ratios as its weight, and nothing of it where that is out of bounds."""
    weight = (now - then).mean().exp().item()
    return weight * float(0.8 <= weight <= 1.2) * advantage * (now - now.detach()).exp().sum()


PLAIN = {"gate": "none", "anchor": "proximal"}
RULES: Mapping[str, tuple[Mapping[str, Any], Paper]] = {
    "gspo": ({"ratio": "sequence", "aggregation": "sequence_mean"}, gspo),
    "clipped": (
        {"ratio": "sequence", "gate": {"name": "clip", "low": 0.1, "high": 0.1}, "aggregation": "sequence_mean"},
        clipped_gspo,
    ),
    "gmpo": (
        {"gate": {"name": "geometric", "low": 0.8, "high": 1.2}, "aggregation": "sequence_mean"},
        gmpo,
    ),
    "topr": ({"ratio": "product", "gate": "topr"}, topr),
    "truncated": ({**PLAIN, "correction": {"weight": "sequence", "high": 1.1}}, truncated),
    "masked": (
        {**PLAIN, "correction": {"weight": "geometric", "bound": "mask", "low": 0.8, "high": 1.2}},
        masked,
    ),
}


def logs(tables: Tables, pulls: Pulls) -> torch.Tensor:
    return torch.stack([tables[name].log_softmax(-1)[told, arm] for name, told, arm in pulls])


def group_of(bandit: Bandit, pulls: Pulls, number: int) -> Group:
    trajectory = recorded(bandit, pulls, f"g{number}/0", True)
    rollout = Rollout(id=trajectory.id, task=TASK, index=0, attempt=0, purpose="train", trajectories=(trajectory,))
    return Group(id=f"g{number}", index=number, task=TASK, rollouts=(rollout,), scores=(Score(reward=reward(pulls)),))


def doubled(micro: MicroBatch, rows: Sequence[Sample], then: Tables) -> MicroBatch:
    """The micro-batch in float64, as it was sampled by `then`."""

    def column(of: Callable[[Sample], Sequence[float]]) -> torch.Tensor:
        return torch.tensor(
            [x for row in rows for x, weight in zip(of(row), row.weights["policy"], strict=True) if weight],
            dtype=torch.double,
        )

    return replace(
        micro,
        weights={"policy": column(lambda row: row.weights["policy"])},
        advantages=column(lambda row: row.advantages or ()),
        behaviour_logprobs=logs(then, [PULLS[target] for target in micro.targets.tolist()]).detach(),
    )


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bandit", BANDITS)
def test_the_gradient_is_that_of_all_branches_as_one_sequence(bandit: str, name: str) -> None:
    algo, paper = RULES[name]
    config = msgspec.convert(named({**SUM, "credit": {"name": "reinforce", "baseline": BASELINE}, **algo}), AlgoConfig)
    loss, now = PolicyLoss(config), policy()
    then = {key: (table + 0.35 * torch.cos(3.0 * table)).detach() for key, table in now.items()}
    paths = list(BANDITS[bandit].paths())
    likely = {f"g{number}": chance(then, pulls).item() for number, pulls in enumerate(paths)}
    groups = [group_of(BANDITS[bandit], pulls, number) for number, pulls in enumerate(paths)]
    samples = [row for group in groups for row in flatten(group, "policy")]
    credit, plan = load_credit(config, seed=0), Plan(whole_trajectories=config.unit == "sequence")
    [batch] = assemble(groups, samples, credit=credit, model="policy", step=1, plan=plan)
    rows = [
        replace(row, weights={"policy": tuple(weight * likely[row.group] for weight in row.weights["policy"])})
        for row in batch.rows
    ]
    assert len(rows) > len({row.trajectory for row in rows}) == len(paths) and needs_survey(loss, rows)

    def tensors(part: Sequence[Sample]) -> tuple[MicroBatch, dict[str, torch.Tensor]]:
        micro = doubled(micro_batch(part, {"policy": 1.0}, idle_tokens=True), part, then)
        logprob = logs(now, [PULLS[target] for target in micro.targets.tolist()])
        return micro, {"logprob": logprob, "entropy": torch.zeros_like(logprob)}

    whole, quantities = tensors(rows)
    surveyed = loss.survey(quantities, whole)
    total = torch.zeros((), dtype=torch.double)
    for part in (0, 1):
        micro, quantities = tensors(rows[part::2])
        mask = whole.rows % 2 == part
        micro = replace(micro, annotations={key: column[mask] for key, column in surveyed.items()})
        total = total - loss(quantities, micro).loss
    expected = torch.stack(
        [
            likely[f"g{number}"] * paper(logs(now, pulls), logs(then, pulls), reward(pulls) - BASELINE)
            for number, pulls in enumerate(paths)
        ]
    ).sum()
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-9)
    ours, on_paper = (torch.autograd.grad(value, list(now.values()), allow_unused=True) for value in (total, expected))
    assert max(float(found.abs().max()) for found in on_paper if found is not None) > 1e-2
    for found, wanted in zip(ours, on_paper, strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or torch.allclose(found, wanted, rtol=1e-7, atol=1e-9)
