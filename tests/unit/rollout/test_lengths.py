"""Lengths of what was admitted, estimated from what is left: against simulations of which the truth is known."""

from __future__ import annotations

from random import Random

import pytest

from sparring.rollout.lengths import AdmittedLengths
from sparring.types import Failure, Group, Outcome, Rollout, Score, Task, Trajectory, Usage

ENDED = Outcome(kind="completed", reason="answered")
BROKEN = Outcome(kind="infra_failed", reason="failure", failure=Failure(error="SandboxError", where="", message="gone"))
SIZE = 8


def rollout(task: Task, place: int, outcome: Outcome, tokens: list[int], attempt: int = 0) -> Rollout:
    usage = Usage(turns=len(tokens), sampled_tokens=sum(tokens))
    trajectory = Trajectory(id="t", task=task.id, role="policy", segments=(), outcome=outcome, usage=usage)
    return Rollout(id="r", task=task, index=place, attempt=attempt, purpose="train", trajectories=(trajectory,))


def group(index: int, env: str, lengths: list[list[int]], breaks: list[list[int | None]]) -> Group:
    """A group of rollouts with the tokens of each turn, of which attempt a breaks after `breaks[place][a]` turns; None:
    it does not break."""
    task = Task(id=str(index), env=env, messages=())
    usable, failed = [], []
    for place, (tokens, ends) in enumerate(zip(lengths, breaks, strict=True)):
        for attempt, end in enumerate(ends):
            if end is None:
                usable.append(rollout(task, place, ENDED, tokens, attempt))
            else:
                failed.append(rollout(task, place, BROKEN, tokens[:end], attempt))
    scores = tuple(Score(reward=1.0) for _ in usable)
    return Group(id=str(index), index=index, task=task, rollouts=tuple(usable), scores=scores, failed=tuple(failed))


def simulated(
    hazards: dict[str, float], most_turns: dict[str, int], groups: int = 1500, attempts: int = 1
) -> tuple[AdmittedLengths, float, float]:
    """Groups of each environment, with the estimator that was shown them, the true mean length and the true bias."""
    random, lengths = Random(0), AdmittedLengths()
    admitted: list[int] = []
    trained: list[int] = []
    for index in range(groups):
        for env, hazard in hazards.items():
            drawn, breaks = [], []
            for _ in range(SIZE):
                # long rollouts have long turns, too
                turns = random.randint(1, most_turns[env])
                tokens = [random.randint(10, 30) + 2 * turns for _ in range(turns)]
                ends: list[int | None] = []
                while len(ends) < attempts and None not in ends:
                    broke = [turn for turn in range(turns + 1) if random.random() < hazard]
                    ends.append(broke[0] if broke else None)
                drawn.append(tokens)
                breaks.append(ends)
                admitted.append(sum(tokens))
                trained += [sum(tokens)] if None in ends else []
            lengths.add(group(index, env, drawn, breaks))
    true_mean = sum(admitted) / len(admitted)
    return lengths, true_mean, sum(trained) / len(trained) / true_mean


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_hazard_per_turn_is_seen_through(attempts: int) -> None:
    lengths, mean, bias = simulated({"a": 0.06 if attempts == 1 else 0.25}, {"a": 20}, attempts=attempts)
    assert bias < 0.8  # the mean of what rollouts had sampled when they broke would say nearly 1
    assert lengths.admitted_tokens() == pytest.approx(mean, rel=0.02)
    assert lengths.bias() == pytest.approx(bias, rel=0.02)


def test_environments_that_break_differently_are_told_apart() -> None:
    lengths, mean, bias = simulated({"long": 0.08, "short": 0.0}, {"long": 20, "short": 3})
    assert bias < 0.8
    assert lengths.bias() == pytest.approx(bias, rel=0.02) and lengths.admitted_tokens() == pytest.approx(
        mean, rel=0.02
    )


def test_nothing_lost_is_no_bias() -> None:
    lengths, mean, _ = simulated({"a": 0.0}, {"a": 9}, groups=5)
    assert lengths.bias() == 1.0 and lengths.admitted_tokens() == pytest.approx(mean)


def test_behind_the_last_survivor_what_was_sampled_counts() -> None:
    lengths = AdmittedLengths()
    lengths.add(group(0, "a", [[10], [10, 10], [10] * 5, [10] * 9], [[None], [None], [4], [4]]))
    assert lengths.admitted_tokens() == (10 + 20 + 40 + 40) / 4


def test_an_environment_without_a_token_says_nothing() -> None:
    lengths = AdmittedLengths()
    lengths.add(group(0, "dead", [[10], [10]], [[0], [0]]))
    assert lengths.admitted_tokens() is None and lengths.bias() is None
    lengths.add(group(1, "alive", [[10], [30]], [[None], [None]]))
    assert lengths.admitted_tokens() == 20 and lengths.bias() == 1.0


def test_the_longest_attempt_of_a_lost_rollout_counts() -> None:
    """It would have survived where any of its attempts did."""
    lengths = AdmittedLengths()
    lengths.add(group(0, "a", [[5, 5, 5], [5, 5, 5]], [[2, 1], [None]]))
    assert lengths.admitted_tokens() == 15
