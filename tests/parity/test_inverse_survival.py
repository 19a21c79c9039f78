"""`survival = "inverse"`: the exact expectation of an update of which the infrastructure loses rollouts, over all that
can be sampled and all that can be lost, against the gradient of the reward where nothing is.

A bandit of one or two turns. First one of three arms is pulled: the first ends the rollout, the others call a tool and
lead to a room with two arms. Rollouts break at a turn with a probability that hangs on the turn and on whether it calls
the tool, so those that look around are lost more often.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from sparring.algo.config import AlgoConfig, named
from sparring.algo.loss.policy import PolicyLoss
from sparring.algo.pipeline import load_credit
from sparring.batch.batches import assemble
from sparring.batch.flatten import flatten
from sparring.batch.tensors import micro_batch
from sparring.generation import Runs
from sparring.types import Failure, Group, Message, Outcome, Rollout, Score, Segment, Task, ToolCall, Trajectory, Usage

Gradient = tuple[torch.Tensor, ...]
SUM = {"gate": "none", "aggregation": "sequence_sum"}
REWARDS = {(0,): 0.7, (1, 0): 1.0, (1, 1): 0.4, (2, 0): 0.3, (2, 1): 1.2}
"""By path: the first arm, and the second where there is one."""
PATHS = tuple(REWARDS)
HAZARDS = {(0, False): 0.05, (1, False): 0.1, (1, True): 0.5, (2, False): 0.2}
"""By stage: the turns that a rollout has had, and whether the last called the tool."""
ENDED = Outcome(kind="completed", reason="answered")
BROKEN = Outcome(kind="infra_failed", reason="failure", failure=Failure(error="ToolHostError", where="", message="503"))
TASK = Task(id="task", env="bandit", messages=())


class Tables(NamedTuple):
    """A policy: logits of the first arm [3], and of the second in each room [2, 2] (room, arm)."""

    first: torch.Tensor
    second: torch.Tensor

    def log(self, path: tuple[int, ...]) -> torch.Tensor:
        """The log-probability of each arm of a path [turns]."""
        logs = [self.first.log_softmax(-1)[path[0]]]
        return torch.stack([*logs, *(self.second.log_softmax(-1)[path[0] - 1, last] for last in path[1:])])


def policy() -> Tables:
    first, second = torch.tensor([0.3, -0.4, 0.5]), torch.tensor([[0.4, -0.6], [-0.2, 0.7]])
    return Tables(first.double().requires_grad_(), second.double().requires_grad_())


class Fate(NamedTuple):
    """What may happen to one member: its path, after how many turns it breaks (None: it ends), and the probability of
    both."""

    path: tuple[int, ...]
    broke: int | None
    chance: float


def fates(tables: Tables) -> Iterator[Fate]:
    for path in PATHS:
        chance = tables.log(path).sum().exp().item()
        for turn in range(len(path) + 1):
            hazard = HAZARDS[turn, turn == 1 and len(path) == 2]
            yield Fate(path, turn, chance * hazard)
            chance *= 1 - hazard
        yield Fate(path, None, chance)


def rollout(place: int, path: tuple[int, ...], tables: Tables, outcome: Outcome, turns: int) -> Rollout:
    logs = tables.log(path).detach().tolist()
    call = ToolCall(id="", name="look", arguments={})
    prompt = Segment(index=0, parent=None, source="prompt", tokens=(99,), message=Message(role="user"))
    replies = tuple(
        Segment(
            index=turn + 1,
            parent=turn,
            source="policy",
            tokens=(10 * turn + path[turn],),
            message=Message(role="assistant", tool_calls=(call,) if turn + 1 < len(path) else ()),
            model="policy",
            logprobs=(logs[turn],),
            versions=Runs.of(0, 1),
        )
        for turn in range(turns)
    )
    usage = Usage(turns=turns, sampled_tokens=turns)
    trajectory = Trajectory(
        id=f"g/{place}", task=TASK.id, role="policy", segments=(prompt, *replies), outcome=outcome, usage=usage
    )
    return Rollout(id=f"g/{place}", task=TASK, index=place, attempt=0, purpose="train", trajectories=(trajectory,))


def group_of(members: tuple[Fate, ...], tables: Tables) -> Group:
    left = [(place, of) for place, of in enumerate(members) if of.broke is None]
    lost = [(place, of) for place, of in enumerate(members) if of.broke is not None]
    return Group(
        id="g",
        index=0,
        task=TASK,
        rollouts=tuple(rollout(place, of.path, tables, ENDED, len(of.path)) for place, of in left),
        scores=tuple(Score(reward=REWARDS[of.path]) for _, of in left),
        failed=tuple(rollout(place, of.path, tables, BROKEN, of.broke or 0) for place, of in lost),
    )


def mean_update(algo: Mapping[str, Any], size: int, tables: Tables) -> Gradient:
    """The mean gradient of what an update of one group raises. The credit has seen a million rollouts reach each stage
    before, so that it knows what breaks how often."""
    config = msgspec.convert(named({"zero_variance_filter": False, **SUM, **algo}), AlgoConfig)
    loss, total = PolicyLoss(config), torch.zeros(()).double()
    before = [[turn, calls, 1e12, 1e12 * hazard] for (turn, calls), hazard in HAZARDS.items()]
    for members in product(list(fates(tables)), repeat=size):
        group = group_of(members, tables)
        credit = load_credit(config, seed=0)
        credit.restore({"survival": {"bandit": before}})
        [batch] = assemble([group], flatten(group, "policy"), credit=credit, model="policy", step=1)
        if not batch.rows:
            continue
        logprob = torch.cat([tables.log(members[int(row.trajectory[2:])].path) for row in batch.rows])
        quantities = {"logprob": logprob, "entropy": torch.zeros_like(logprob)}
        made = loss(quantities, micro_batch(batch.rows, batch.denominators))
        total = total - prod(of.chance for of in members) * made.loss
    return torch.autograd.grad(total, tables)


def slope(tables: Tables) -> Gradient:
    """The gradient of the mean reward, nothing lost."""
    mean = sum((tables.log(path).sum().exp() * reward for path, reward in REWARDS.items()), torch.zeros(()))
    return torch.autograd.grad(mean, tables)


def equal(ours: Gradient, expected: Gradient, scale: float = 1.0) -> bool:
    return all(torch.allclose(a, scale * b, rtol=1e-5, atol=1e-7) for a, b in zip(ours, expected, strict=True))


def cosine(a: Gradient, b: Gradient) -> float:
    flat_a, flat_b = (torch.cat([x.flatten() for x in of]) for of in (a, b))
    return torch.nn.functional.cosine_similarity(flat_a, flat_b, dim=0).item()


@pytest.mark.parametrize("size", [1, 2])
def test_weighted_by_the_inverse_of_survival_an_update_is_that_of_a_run_without_losses(size: int) -> None:
    tables, rule = policy(), {"name": "reinforce", "baseline": 0.4}
    assert equal(mean_update({"credit": rule, "survival": "inverse"}, size, tables), slope(tables))
    assert cosine(mean_update({"credit": rule}, size, tables), slope(tables)) < 0.99


@pytest.mark.parametrize(("credit", "shrinks"), [("rloo", False), ({"name": "grpo", "normalise": False}, True)])
def test_inverse_survival_with_comparison_among_survivors(credit: Any, shrinks: bool) -> None:
    """A member is compared if another one is left; which one does not move the mean. Less the mean of two equals is
    half a comparison."""
    tables = policy()
    alone = sum(fate.chance for fate in fates(tables) if fate.broke is not None)
    scale = (1 - alone) * (0.5 if shrinks else 1.0)
    assert equal(mean_update({"credit": credit, "survival": "inverse"}, 2, tables), slope(tables), scale)
    assert cosine(mean_update({"credit": credit}, 2, tables), slope(tables)) < 0.99


def test_without_losses_weights_do_not_change() -> None:
    tables = policy()
    members = tuple(Fate(path, None, 1.0) for path in PATHS)
    group = group_of(members, tables)
    config = msgspec.convert(named({**SUM, "credit": "rloo", "survival": "inverse"}), AlgoConfig)
    [batch] = assemble([group], flatten(group, "policy"), credit=load_credit(config, seed=0), model="policy", step=1)
    plain = load_credit(msgspec.structs.replace(config, survival="none"), seed=0)
    [without] = assemble([group], flatten(group, "policy"), credit=plain, model="policy", step=1)
    assert batch == without


def test_environments_keep_their_shares_and_updates_their_size() -> None:
    """Of two environments one loses half its rollouts: each still weighs as much as what is left of it."""
    tables = policy()
    lossy = group_of((Fate((0,), None, 1.0), Fate((1, 0), 1, 1.0), Fate((1, 1), None, 1.0)), tables)
    other = replace(lossy, id="h", index=1, task=replace(TASK, env="other"), failed=())
    config = msgspec.convert(named({**SUM, "credit": "reinforce", "survival": "inverse"}), AlgoConfig)
    credit = load_credit(config, seed=0)
    rows = [flatten(group, "policy") for group in (lossy, other)]
    weighted, untouched = credit.credit([lossy, other], rows)
    assert [row.weights for row in untouched] == [row.weights for row in rows[1]]
    assert sum(max(row.weights["policy"]) for row in weighted) == pytest.approx(2.0)
    assert max(weighted[1].weights["policy"]) == pytest.approx(2 * max(weighted[0].weights["policy"]))
    again = load_credit(config, seed=0)
    again.restore(msgspec.json.decode(msgspec.json.encode(credit.state())))
    assert again.credit([lossy, other], rows) == credit.credit([lossy, other], rows)
