"""Runs that train through a program with sub-agents: credit by a critic, and ratios of whole trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import on_checkpoint
from delegating_client import NUM_TURNS, worth
from suite import short_of

from sparring.launch.run import opened
from sparring.observe.hooks import Overlay
from sparring.protocols import Trainer, TrainPlan
from sparring.recipe.load import load
from sparring.recipe.run_config import resolve
from sparring.stages import rl
from sparring.types import Batch, Group, Sample, Segment, Trajectory

CLIENT = Path(__file__).parent / "delegating_client.py"
SETTINGS = (
    f"env.name={CLIENT}:Letters",
    f"rollout.harness={CLIENT}:agent",
    'rollout.sampling.constraint={kind="regex", source="[a-z]{16,22}"}',
    "rollout.sampling.max_turn_tokens=24",
    "rollout.max_concurrent_rollouts=2",
    f"env.limits.max_turns={NUM_TURNS}",
    "env.limits.max_tokens=200",
    "env.demonstrations=0",
    "rl.steps=2",
    "observe.progress=off",
)
DISCOUNT, POLICY, TARGET = 0.99, 0.9, 1.0
LEAD, FIRST, SECOND, THIRD = (0, 3, 5), (1, 4), (2,), (6,)
BRANCHES = (LEAD, FIRST, SECOND, THIRD)
FOLLOWING = {0: 3, 3: 5, 1: 4, 4: 5, 2: 5, 5: None, 6: None}
"""What comes after each turn: the next one of its agent; for what a sub-agent said last, the turn that was told it."""
CLOCK = {**{number: number + 1 for number in range(NUM_TURNS - 1)}, NUM_TURNS - 1: None}
"""The order in which they were asked for."""
BESIDE = {0: (FIRST, SECOND), 5: (THIRD,)}
"""What each turn of the lead began, or what began behind it."""


@dataclass
class Watched:
    """A cluster whose trainers show what they are given.

    Attributes:
        batches: of each trainer, by its role, in order, each with the metrics of its training.
        before: the policy's log-probabilities of each batch's rows before it is trained on them.
    """

    cluster: Any
    batches: dict[str, list[tuple[Batch, Mapping[str, float]]]] = field(default_factory=dict)
    before: list[list[np.ndarray]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cluster, name)

    def trainer(self, name: str, *, path: str, plan: TrainPlan) -> Trainer:
        trainer = self.cluster.trainer(name, path=path, plan=plan)
        role = plan.name or name
        shown = self.batches.setdefault(role, [])

        async def forward_backward(batch: Batch) -> Mapping[str, float]:
            if role == "policy":
                found = await trainer.forward(batch.rows, {"logprob"})
                self.before.append([np.array(row["logprob"]) for row in found])
            metrics = await trainer.forward_backward(batch)
            shown.append((batch, metrics))
            return metrics

        return Overlay(trainer, {"forward_backward": forward_backward})  # type: ignore[return-value]


@dataclass
class Trained:
    """A run that has ended."""

    watched: Watched
    groups: list[Group]
    metrics: list[dict[str, float]]

    def groups_of(self, batch: Batch) -> list[Group]:
        return [group for group in self.groups if group.id in {row.group for row in batch.rows}]


def trained(recipe: Path, *settings: str) -> Trained:
    """The rl stage of the tiny recipe, of two steps."""
    config = resolve(load(recipe, [*SETTINGS, *settings]))

    async def scenario() -> Trained:
        async with opened(config) as context:
            watched = Watched(context.cluster)
            await rl.run(replace(context, cluster=watched))
            metrics = [values for _, values in context.store.metrics("rl")]
            return Trained(watched, list(context.store.groups(stage="rl")), metrics)

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def credited(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run whose advantages a critic gives."""
    rule = f'{{name="gae", discount={DISCOUNT}, lambda_policy={POLICY}, lambda_value={TARGET}, whiten=false}}'
    critic = ("rl.critic.train.learning_rate=0.01", "rl.critic.clip=0")
    recipe = on_checkpoint(checkpoint, tmp_path_factory.mktemp("credited"))
    return trained(recipe, f"algo.credit={rule}", "algo.zero_variance_filter=false", *critic)


def trajectories(groups: Sequence[Group]) -> Iterator[tuple[Trajectory, float]]:
    """The trajectory of each rollout, and what it earned."""
    for group in groups:
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            assert score.reward is not None and not group.failed
            yield rollout.trajectories[0], score.reward


def steps(trajectory: Trajectory, rows: Sequence[Sample]) -> dict[int, list[tuple[Sample, int]]]:
    """Row and position of every token that was trained, by the number of its turn; a token is in one row at most, and
    each row is a branch, id for id."""
    found: dict[int, list[tuple[Sample, int]]] = {number: [] for number in range(NUM_TURNS)}
    number_of = {turn.index: number for number, turn in enumerate(trajectory.turns)}
    branches = list(trajectory.branches())
    for row in rows:
        if row.trajectory == trajectory.id:
            segments: list[tuple[Segment, int]] = [(s, n) for s in branches[row.branch] for n in range(len(s.tokens))]
            assert row.tokens == tuple(segment.tokens[n] for segment, n in segments)
            for at, (segment, n) in enumerate(segments):
                if row.weights["policy"][at]:
                    assert row.logprobs is not None and segment.logprobs is not None
                    assert row.logprobs[at] == segment.logprobs[n]
                    found[number_of[segment.index]].append((row, at))
    for number, turn in enumerate(trajectory.turns):
        assert len(found[number]) == len(turn.tokens), "every sampled token once"
    return found


def earned(own: Mapping[int, Sequence[float]], rest: float, discount: float) -> dict[int, list[float]]:
    """What each token of each turn earned: its turn's reward at the last; there too what the turn's sub-agents earn
    until they are heard; the rest of the outcome where nothing follows."""
    values = {number: list(of_turn) for number, of_turn in own.items()}
    for number, chains in BESIDE.items():
        for chain in chains:
            flat = [value for turn in chain for value in own[turn]]
            values[number][-1] += sum(discount ** (n + 1) * value for n, value in enumerate(flat))
    for number, follows in FOLLOWING.items():
        if follows is None:
            values[number][-1] += rest
    return values


def along(
    values: Mapping[int, Sequence[float]], number: int, at: int, following: Mapping[int, int | None]
) -> list[float]:
    """The values of a token and of all that follow it."""
    path = list(values[number][at:])
    while (follows := following[number]) is not None:
        number = follows
        path += values[number]
    return path


def generalised(
    values: Mapping[int, Sequence[float]],
    rewards: Mapping[int, Sequence[float]],
    discount: float,
    weight: float,
    following: Mapping[int, int | None] = FOLLOWING,
) -> dict[int, list[float]]:
    """Equation 16 of arXiv 1506.02438 as it stands there: a sum over all tokens that follow."""
    advantages: dict[int, list[float]] = {}
    for number in range(NUM_TURNS):
        advantages[number] = []
        for at in range(len(values[number])):
            seen, got = (along(of, number, at, following) for of in (values, rewards))
            deltas = [r + discount * v - now for r, v, now in zip(got, [*seen[1:], 0.0], seen, strict=True)]
            advantages[number].append(sum((discount * weight) ** n * delta for n, delta in enumerate(deltas)))
    return advantages


def test_a_trajectory_is_recorded_as_its_agents_asked(credited: Trained) -> None:
    recorded = list(trajectories(credited.groups))
    assert recorded
    for trajectory, reward in recorded:
        turns = trajectory.turns
        texts = [turn.message.content for turn in turns if turn.message]
        assert len(turns) == NUM_TURNS and reward == pytest.approx(sum(map(worth, texts)) + len(texts[5]) / 10)
        assert [[turns.index(s) for s in branch if s.is_turn] for branch in trajectory.branches()] == [
            list(SECOND),
            list(FIRST),
            list(LEAD),
            list(THIRD),
        ], "in the order of their last requests"
        told = [trajectory.segments[turn.parent] for turn in turns if turn.parent is not None]
        places = [turn.index for turn in turns]
        assert [(s.fork.reason, s.fork.agent) if s.fork else None for s in told] == [
            None,
            ("agent", "first"),
            ("agent", "second"),
            None,
            None,
            None,
            ("agent", "third"),
        ]
        assert told[5].quotes == (places[2], places[4])


def test_advantages_follow_branches_and_links(credited: Trained) -> None:
    """Of every token, compared with the sum that defines it; the critic's targets likewise."""
    run, by_the_clock, seen = credited, 0.0, set()
    for (batch, _), (taught, _) in zip(run.watched.batches["policy"], run.watched.batches["critic"], strict=True):
        targets = {row.id: row.annotations["return"] for row in taught.rows}
        for trajectory, reward in trajectories(run.groups_of(batch)):
            where = steps(trajectory, batch.rows)
            values = {n: [row.annotations["value"][at] for row, at in of_turn] for n, of_turn in where.items()}
            seen |= {value for of_turn in values.values() for value in of_turn}
            per_turn = [worth(turn.message.content) for turn in trajectory.turns if turn.message]
            own = {n: [*[0.0] * (len(of_turn) - 1), per_turn[n]] for n, of_turn in values.items()}
            rewards = earned(own, reward - sum(per_turn), DISCOUNT)
            advantages = generalised(values, rewards, DISCOUNT, POLICY)
            returns = generalised(values, rewards, DISCOUNT, TARGET)
            for number, of_turn in where.items():
                given_here = [row.advantages[at] for row, at in of_turn if row.advantages]
                assert given_here == pytest.approx(advantages[number], abs=1e-9)
                expected = [a + v for a, v in zip(returns[number], values[number], strict=True)]
                assert [targets[row.id][at] for row, at in of_turn] == pytest.approx(expected, abs=1e-6)
            clock = generalised(values, own, DISCOUNT, POLICY, CLOCK)
            by_the_clock = max(by_the_clock, abs(advantages[1][-1] - clock[1][-1]))
    assert len(seen) > 100, "the critic has learned to tell tokens apart"
    assert by_the_clock > 0.01, "in the order of requests they would be others"
    assert [(m["logprob_max_abs_diff"], m["ratio"]) for m in run.metrics] == [(0.0, 1.0)] * 2
    for batch, _ in run.watched.batches["policy"]:
        assert batch.account.sampled == batch.account.trained + batch.account.zero_advantage


@pytest.mark.parametrize("token_budget", short_of([60, 8192], [60]))
def test_a_trajectory_has_one_ratio(given: Path, token_budget: int) -> None:
    """Over all its branches, however they are divided among micro-batches. Every update has two passes, of which the
    first is on policy."""
    settings = ("algo.preset=gspo", "rl.passes=2", "rl.train.learning_rate=0.01")
    run = trained(given, *settings, f"train.token_budget={token_budget}")
    assert len(run.watched.batches["policy"]) == 4
    for number, (batch, metrics) in enumerate(run.watched.batches["policy"]):
        assert (metrics["micro_batches"] > len({row.trajectory for row in batch.rows})) == (token_budget == 60)
        logs: dict[str, list[np.ndarray]] = {}
        for row, logprobs in zip(batch.rows, run.watched.before[number], strict=True):
            mask = np.array(row.weights["policy"]) != 0
            logs.setdefault(row.trajectory, []).append((logprobs - np.array(row.logprobs, np.float32))[mask])
        for trajectory, _ in trajectories(run.groups_of(batch)):
            if trajectory.id not in logs:
                continue  # it earned just what its group did
            count = sum(map(len, steps(trajectory, batch.rows).values()))
            assert count == sum(map(len, logs[trajectory.id])) and len(logs[trajectory.id]) == len(BRANCHES)
        of_trajectories = weighed([np.concatenate(parts) for parts in logs.values()])
        of_rows = weighed([part for parts in logs.values() for part in parts])
        assert metrics["ratio"] == pytest.approx(of_trajectories, rel=1e-6)
        if number % 2:
            assert batch.account.trained == metrics["tokens_trained"] > batch.account.zero_advantage
            assert batch.account.sampled == batch.account.trained + batch.account.zero_advantage
            assert abs(of_rows - of_trajectories) > 1e-4, "a ratio of each row would be another"
        else:
            assert not any(part.any() for parts in logs.values() for part in parts)
            assert metrics["logprob_max_abs_diff"] == 0.0 and metrics["ratio"] == 1.0


def weighed(sequences: Sequence[np.ndarray]) -> float:
    """The mean over all tokens of their sequences' ratios, each the exponential of a mean."""
    return sum(len(logs) * float(np.exp(logs.mean())) for logs in sequences) / sum(map(len, sequences))
