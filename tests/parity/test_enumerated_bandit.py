"""Rules that no installable framework has, against the exact expectation of their gradient: a bandit of two turns is
small enough to go through all that can be sampled.

First one of three arms is pulled, which leads to one of two rooms; then one of two arms in that room. Ours is the whole
path from scored groups to a gradient, for every group that may come, weighted with its probability. What it must be is
worked out on paper from the rule's equation, and where that is a derivative of probabilities it is written so, without
the logarithm's trick.

Shapes: first [3], second [2, 2] (room, arm); log-probabilities or probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import exp, prod, sqrt
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from sparring.algo.config import AlgoConfig, named
from sparring.algo.loss.policy import PolicyLoss
from sparring.algo.pipeline import load_credit
from sparring.batch.batches import Plan, assemble
from sparring.batch.plain_groups import Plain, nouns
from sparring.batch.tensors import micro_batch
from sparring.train.survey import surveyed

ROOMS = (0, 1, 1)
"""Where each first arm leads."""
EARLY = (0.3, 1.0, 0.55)
"""What each first arm earns."""
LATE = ((0.9, 0.1), (0.25, 0.8))
"""What each arm of a room earns."""
Gradient = tuple[torch.Tensor, ...]


class Tables(NamedTuple):
    """A policy: logits of the first arm and of the second in each room."""

    first: torch.Tensor
    second: torch.Tensor

    def logs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first.log_softmax(-1), self.second.log_softmax(-1)

    def chances(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first.softmax(-1), self.second.softmax(-1)


class Path(NamedTuple):
    """What may happen in one rollout."""

    arm: int
    room: int
    last: int

    @property
    def early(self) -> float:
        return EARLY[self.arm]

    @property
    def late(self) -> float:
        return LATE[self.room][self.last]

    @property
    def reward(self) -> float:
        return self.early + self.late

    def log(self, tables: Tables) -> torch.Tensor:
        """The log-probability of each of its two arms [2]."""
        first, second = tables.logs()
        return torch.stack([first[self.arm], second[self.room, self.last]])

    def chance(self, tables: Tables) -> torch.Tensor:
        """Its probability, differentiable."""
        first, second = tables.chances()
        return first[self.arm] * second[self.room, self.last]


PATHS = [Path(arm, ROOMS[arm], last) for arm in range(3) for last in range(2)]


def policy() -> Tables:
    first, second = torch.tensor([0.3, -0.4, 0.5]), torch.tensor([[0.4, -0.6], [-0.2, 0.7]])
    return Tables(first.double().requires_grad_(), second.double().requires_grad_())


def other() -> Tables:
    """A policy that sampled long ago."""
    return Tables(torch.tensor([-0.5, 0.6, 0.2]).double(), torch.tensor([[-0.3, 0.5], [0.9, -0.4]]).double())


class Outcome(NamedTuple):
    """A group that may come: its probability, its members, and the log-probabilities of each one's tokens now."""

    chance: float
    members: list[Plain]
    logs: list[torch.Tensor]


def member(rollout: int, reward: float, recorded: torch.Tensor, role: str = "policy", **fields: Any) -> Plain:
    """A conversation with a turn of one token for each recorded log-probability."""
    tokens, follows = {"logprob": recorded.detach().tolist()}, list(range(-1, len(recorded) - 1))
    base = {"rollout": rollout, "role": role, "reward": reward, "turns": [1] * len(recorded), "follows": follows}
    return {**base, "said": rollout, "tokens": tokens, **fields}


def groups_of(
    size: int, now: Tables, sampling: Tables | None = None, **fields: Callable[[Path], Any]
) -> Iterator[Outcome]:
    """Every group of this size that `sampling` may give; the policy itself where none is said."""
    sampling = sampling or now
    for paths in product(PATHS, repeat=size):
        told = [{name: of(path) for name, of in fields.items()} for path in paths]
        members = [
            member(at, path.reward, path.log(sampling), **more)
            for at, (path, more) in enumerate(zip(paths, told, strict=True))
        ]
        chance = prod(path.chance(sampling).item() for path in paths)
        yield Outcome(chance, members, [path.log(now) for path in paths])


def ours(
    algo: Mapping[str, Any], outcomes: Iterator[Outcome], tables: Tables, state: Mapping[str, Any] | None = None
) -> Gradient:
    """The mean gradient of what the update raises, before it is divided by anything."""
    config, total = (
        msgspec.convert(named({"zero_variance_filter": False, **algo}), AlgoConfig),
        torch.zeros(()).double(),
    )
    loss = PolicyLoss(config)
    for chance, members, logs in outcomes:
        made, samples = nouns([{"members": members, "failed": [], "baselines": []}])
        now = {f"group-0/{m['rollout']}/{m['role']}": of for m, of in zip(members, logs, strict=True)}

        def forward(rows: Sequence[Any], needs: Any, now: Mapping[str, torch.Tensor] = now) -> list[dict[str, Any]]:
            found = []
            for row in rows:
                column = iter(now[row.trajectory].tolist())
                values = tuple(next(column) if weight else 0.0 for weight in row.weights["policy"])
                found.append({"logprob": values, "entropy": (0.0,) * len(values)})
            return found

        credit = load_credit(config, seed=0)
        if state:
            credit.restore(state)
        plan = Plan(idle_rows=True)
        [batch] = assemble(made, samples[0], credit=credit, model="policy", step=1, plan=plan)
        if batch.rows:
            rows = surveyed(batch.rows, batch.denominators, [loss], forward)
            logprob = torch.cat([now[row.trajectory] for row in rows])
            quantities = {"logprob": logprob, "entropy": torch.zeros_like(logprob)}
            found = loss(quantities, micro_batch(rows, batch.denominators, idle_tokens=True)).loss
            total = total - chance * batch.denominators["policy"] * found
    return torch.autograd.grad(total, tables)


def equal(found: Gradient, expected: Sequence[torch.Tensor | None]) -> bool:
    """Whether two gradients are, and say something; None is a gradient of zeros."""
    wanted = [torch.zeros_like(f) if e is None else e for f, e in zip(found, expected, strict=True)]
    assert max(float(e.abs().max()) for e in wanted) > 1e-2
    return all(torch.allclose(f, e, rtol=1e-5, atol=1e-6) for f, e in zip(found, wanted, strict=True))


def slope(value: torch.Tensor, tables: Tables) -> Gradient:
    found = torch.autograd.grad(value, tables, allow_unused=True, retain_graph=True)
    return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(found, tables, strict=True))


def mean_of(tables: Tables, value: Callable[[Path], float]) -> torch.Tensor:
    """The expectation of something a path has."""
    return sum((path.chance(tables) * value(path) for path in PATHS), torch.zeros(()))


def duel(tables: Tables, value: Callable[[Path], float]) -> torch.Tensor:
    """The chance to have more than a sibling less the chance to have less; of the sibling it is no function."""
    pairs = product(PATHS, PATHS)
    sign = {True: 1.0, False: -1.0}
    won = (
        a.chance(tables) * b.chance(tables).detach() * sign[value(a) > value(b)]
        for a, b in pairs
        if value(a) != value(b)
    )
    return sum(won, torch.zeros(()))


SUM = {"gate": "none", "aggregation": "sequence_sum"}


def test_turn_level_raises_the_chances_to_beat_a_sibling_by_turn_and_by_outcome() -> None:
    """MT-GRPO (arXiv 2505.11821, version 1, section 4.2). Of two values (x - mean) / std is the sign of their
    difference over sqrt(2). The first turn is moved by its own reward and by what came after, the last by what came
    after alone."""
    tables = policy()
    rule = {"name": "turn_level", "outcome_weight": 0.3, "epsilon": 1e-12}
    outcomes = groups_of(2, tables, per_turn=lambda path: [path.early, path.late])
    early, late = duel(tables, lambda path: path.early), duel(tables, lambda path: path.late)
    first = sqrt(2) * (slope(early, tables)[0] + 0.3 * slope(late, tables)[0])
    assert equal(ours({**SUM, "credit": rule}, outcomes, tables), (first, sqrt(2) * slope(late, tables)[1]))


def test_turn_level_without_rewards_of_turns_before_the_last_is_grpo_at_the_last() -> None:
    """Whether the world says what was earned at the end with the last turn or with the rollout is one and the same."""
    tables, found = policy(), []
    for last in (lambda path: path.late, lambda path: 0.0):
        outcomes = groups_of(2, tables, per_turn=lambda path, last=last: [path.early, last(path)])
        found.append(ours({**SUM, "credit": "turn_level"}, outcomes, tables))
    assert equal(*found)


def test_gigpo_is_the_gradient_of_the_episode_and_of_each_room_entered_together() -> None:
    """GiGPO (arXiv 2505.10978) without deviations. Less the mean of n equals is n - 1 times a gradient; all start in
    one state, and of the G members n_s enter room s: E[max(n_s - 1, 0)] = G d_s - 1 + (1 - d_s)^G with d_s the chance
    to enter."""
    tables, size, discount, weight = policy(), 3, 0.8, 0.5
    rule = {"name": "gigpo", "divide": False, "discount": discount, "step_weight": weight}
    fields = {"per_turn": lambda path: [path.early, path.late], "states": lambda path: ["start", f"room {path.room}"]}
    episode = slope(mean_of(tables, lambda path: path.reward), tables)
    to_go = slope(mean_of(tables, lambda path: path.early + discount * path.late), tables)
    second = torch.zeros_like(tables.second)
    for room in range(2):
        enter = mean_of(tables, lambda path, room=room: float(path.room == room)).item()
        worth = (tables.chances()[1][room] * torch.tensor(LATE[room]).double()).sum()
        second += (size * enter - 1 + (1 - enter) ** size) * slope(worth, tables)[1]
    expected = ((size - 1) * (episode[0] + weight * to_go[0]), (size - 1) * episode[1] + weight * second)
    assert equal(ours({**SUM, "credit": rule}, groups_of(size, tables, **fields), tables), expected)


def test_process_supervision_of_one_rollout_moves_its_last_step_alone() -> None:
    """DeepSeekMath (arXiv 2402.03300, section 4.1.3). Of two steps the normalised rewards are the sign of their
    difference over sqrt(2), and its negative: the first step has both to go, which is 0."""
    tables = policy()
    rule = {"name": "process", "epsilon": 1e-12}
    outcomes = groups_of(1, tables, per_turn=lambda path: [path.early, path.late])
    higher = mean_of(tables, lambda path: (1.0 if path.late > path.early else -1.0) / sqrt(2))
    assert equal(ours({**SUM, "credit": rule}, outcomes, tables), (None, slope(higher, tables)[1]))


def test_process_supervision_of_a_group_is_its_equation() -> None:
    """The same for three rollouts, whose six steps are normalised together. The deviation is the group's own, so no
    expectation has a form of its own: the advantages are the equation's, and their expectation is taken."""
    tables, total = policy(), torch.zeros(())
    for paths in product(PATHS, repeat=3):
        steps = torch.tensor([[path.early, path.late] for path in paths]).double()
        normal = (steps - steps.mean()) / (steps.std() + 1e-6)
        to_go = torch.stack([normal.sum(1), normal[:, 1]], dim=1)
        chance = prod(path.chance(tables).item() for path in paths)
        total = total + chance * (to_go * torch.stack([path.log(tables) for path in paths])).sum()
    outcomes = groups_of(3, tables, per_turn=lambda path: [path.early, path.late])
    assert equal(ours({**SUM, "credit": "process"}, outcomes, tables), slope(total, tables))


def posed_and_solved(tables: Tables) -> Iterator[Outcome]:
    """Two rollouts, in each a proposer that pulls the first arm and two solvers in the room it leads to."""
    first, second = tables.logs()
    for arms in product(range(3), repeat=2):
        for lasts in product(range(2), repeat=4):
            members, logs = [], []
            for rollout, arm in enumerate(arms):
                own, room = lasts[2 * rollout : 2 * rollout + 2], ROOMS[arm]
                members.append(member(rollout, float(own[0] != own[1]), first[arm : arm + 1], "proposer"))
                logs.append(first[arm : arm + 1])
                for number, last in enumerate(own):
                    at = second[room, last : last + 1]
                    members.append(member(rollout, LATE[room][last], at, f"solver/{number}"))
                    logs.append(at)
            yield Outcome(exp(sum(float(log.detach()) for log in logs)), members, logs)


def test_hierarchical_compares_solvers_of_one_problem_and_proposers_of_all() -> None:
    """prime-rl's hierarchical GRPO. Less the mean of n equals is n - 1 times a gradient: of a proposer's reward over
    the two rollouts, and of a solver's over the two attempts in each. The proposer earns 1 where its solvers
    disagree."""
    tables = policy()
    first, second = tables.chances()
    disagree = 2 * second.detach().prod(1)[list(ROOMS)]
    proposers = slope((first * disagree).sum(), tables)[0]
    worth = (second * torch.tensor(LATE).double()).sum(1)
    solvers = slope((first.detach() * worth[list(ROOMS)]).sum(), tables)[1]
    found = ours({**SUM, "credit": "hierarchical"}, posed_and_solved(tables), tables)
    assert equal(found, (proposers, 2 * solvers))


def played(tables: Tables, games: int) -> Iterator[Outcome]:
    """Zero-sum games in which white pulls the first arm and black the second."""
    for paths in product(PATHS, repeat=games):
        members, logs = [], []
        for rollout, path in enumerate(paths):
            of_white, of_black = path.log(tables).split(1)
            members += [
                member(rollout, path.reward, of_white, "white"),
                member(rollout, -path.reward, of_black, "black"),
            ]
            logs += [of_white, of_black]
        yield Outcome(prod(path.chance(tables).item() for path in paths), members, logs)


@pytest.mark.parametrize("averages", [{}, {"golden/white": 0.7, "golden/black": -0.2}])
def test_rae_is_each_players_own_gradient_times_its_decay(averages: Mapping[str, float]) -> None:
    """SPIRAL (arXiv 2506.24119, algorithm 1). r - b after = decay * (r - b before), and b before is no function of what
    this player did: whatever stands in the averages, the mean of the gradients is that of each player's own reward."""
    tables, games, decay = policy(), 2, 0.9
    worth = slope(mean_of(tables, lambda path: path.reward), tables)
    expected = (games * decay * worth[0], -games * decay * worth[1])
    rule = {"name": "rae", "decay": decay}
    assert equal(ours({**SUM, "credit": rule}, played(tables, games), tables, {"averages": averages}), expected)


def test_topr_is_likelihood_of_the_good_and_a_bounded_gradient_of_the_bad() -> None:
    """TOPR (arXiv 2503.14286, equations 7 and 8), sampled by another policy mu. Good paths: sum mu A log pi. Bad ones:
    A pi where pi is below mu, for min(pi / mu, 1) mu grad log pi is then grad pi, and mu A log pi where it is above."""
    tables, sampling, baseline = policy(), other(), 1.22
    total, kinds = torch.zeros(()), set()
    for path in PATHS:
        a, pi, mu = path.reward - baseline, path.chance(tables), path.chance(sampling)
        tapered = a < 0 and pi < mu
        kinds.add((a > 0, bool(pi < mu)))
        total = total + a * (pi if tapered else mu * pi.log())
    assert len(kinds) == 4, "good and bad paths on both sides of the bound"
    algo = {"credit": {"name": "topr", "baseline": baseline}, "ratio": "product", "gate": "topr"}
    found = ours({**algo, "aggregation": "sequence_sum"}, groups_of(1, tables, sampling), tables)
    assert equal(found, slope(total, tables))


def test_topr_on_policy_is_the_gradient_of_the_reward() -> None:
    tables = policy()
    algo = {
        "credit": {"name": "topr", "baseline": 1.05},
        "ratio": "product",
        "gate": "topr",
        "aggregation": "sequence_sum",
    }
    assert equal(ours(algo, groups_of(1, tables), tables), slope(mean_of(tables, lambda path: path.reward), tables))


def reshaped(ratio: torch.Tensor, good: bool) -> torch.Tensor:
    """The integral of w^(k - 1) exp(lambda (1 - w)) over the ratio w, with VESPO's k 2 and lambda 3 for good sequences
    and 3 and 2 for bad ones; integrated by parts."""
    if good:
        return -(3 * (1 - ratio)).exp() * (ratio / 3 + 1 / 9)
    return -(2 * (1 - ratio)).exp() * (ratio**2 / 2 + ratio / 2 + 1 / 4)


def test_vespo_is_the_gradient_of_its_reshaped_ratios() -> None:
    """VESPO (arXiv 2602.10693, equation 20), two rollouts sampled by another policy mu. With w = pi / mu the weight
    w^k exp(lambda (1 - w)) grad log pi is w^(k - 1) exp(lambda (1 - w)) grad w, the derivative of an integral."""
    tables, sampling, total = policy(), other(), torch.zeros(())
    for path, sibling in product(PATHS, PATHS):
        a = (path.reward - sibling.reward) / 2
        ratio = path.chance(tables) / path.chance(sampling)
        total = total + path.chance(sampling) * sibling.chance(sampling) * a * reshaped(ratio, a > 0)
    algo = {"credit": {"name": "grpo", "normalise": False}, "ratio": "product", "aggregation": "sequence_sum"}
    gate = {"name": "vespo", "k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}
    found = ours({**algo, "gate": gate}, groups_of(2, tables, sampling), tables)
    assert equal(found, [2 * g for g in slope(total, tables)])


M2PO = {"credit": {"name": "grpo", "normalise": False}, "aggregation": "token_mean"}


def test_m2po_without_a_bound_is_the_gradient_of_one_turn_at_a_time() -> None:
    """Token ratios: each turn is the policy's, the other one the sampling policy's. Less the mean of two is one
    gradient."""
    tables, sampling = policy(), other()
    (first, second), (then, late) = tables.chances(), sampling.chances()
    worth = sum(
        ((first[p.arm] * late[p.room, p.last] + then[p.arm] * second[p.room, p.last]) * p.reward for p in PATHS),
        torch.zeros(()),
    )
    found = ours({**M2PO, "gate": {"name": "m2po", "bound": 1e9}}, groups_of(2, tables, sampling), tables)
    assert equal(found, slope(worth, tables))


def test_m2po_masks_what_its_algorithm_says() -> None:
    """M2PO (arXiv 2510.01161, algorithm 1): of the tokens that move further away the largest (log r)^2 leave one by one
    until the mean of the others is at most the bound. What is left is summed with its ratios; the masks have no form of
    their own."""
    tables, sampling, bound, total, masked = policy(), other(), 0.3, torch.zeros(()), set()
    for paths in product(PATHS, repeat=2):
        logs = torch.cat([path.log(tables) - path.log(sampling) for path in paths])
        a = [
            x for sign, path, peer in ((1, *paths), (-1, *paths)) for x in [sign * (path.reward - peer.reward) / 2] * 2
        ]
        squares = [log**2 for log in logs.tolist()]
        away = sorted((at for at in range(4) if logs[at] * a[at] > 0), key=squares.__getitem__)
        gone = []
        while away and sum(squares[at] for at in away) / len(away) > bound:
            gone.append(away.pop())
        masked.add(len(gone))
        chance = prod(path.chance(sampling).item() for path in paths)
        total = total + chance * sum(logs[at].exp() * a[at] for at in range(4) if at not in gone)
    assert {0, 1} <= masked
    found = ours({**M2PO, "gate": {"name": "m2po", "bound": bound}}, groups_of(2, tables, sampling), tables)
    assert equal(found, slope(total, tables))
