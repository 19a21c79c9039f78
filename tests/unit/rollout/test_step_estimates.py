"""Length, success and domains of what was admitted, estimated from what is left: against simulations of which the truth
is known."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import pytest
from segments import sampled

from sparring.rollout.step_estimates import AdmittedRollouts
from sparring.types import (
    Failure,
    Group,
    Message,
    Outcome,
    Rollout,
    Score,
    Task,
    ToolCall,
    Trajectory,
    Usage,
)

ENDED = Outcome(kind="completed", reason="answered")
BROKEN = Outcome(kind="infra_failed", reason="failure", failure=Failure(error="SandboxError", where="", message="gone"))
SIZE = 8
TOLD = ("shop", "easy", "hard", "quiet")


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
) -> tuple[AdmittedRollouts, float, float]:
    """Groups of each environment, with the estimator that was shown them, the true mean length and the true bias."""
    random, lengths = Random(0), AdmittedRollouts()
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
    assert lengths.length_bias() == pytest.approx(bias, rel=0.02)


def test_environments_that_break_differently_are_told_apart() -> None:
    lengths, mean, bias = simulated({"long": 0.08, "short": 0.0}, {"long": 20, "short": 3})
    assert bias < 0.8
    assert lengths.length_bias() == pytest.approx(bias, rel=0.02) and lengths.admitted_tokens() == pytest.approx(
        mean, rel=0.02
    )


def test_nothing_lost_is_no_bias() -> None:
    lengths, mean, _ = simulated({"a": 0.0}, {"a": 9}, groups=5)
    assert lengths.length_bias() == 1.0 and lengths.admitted_tokens() == pytest.approx(mean)


def test_behind_the_last_survivor_what_was_sampled_counts() -> None:
    lengths = AdmittedRollouts()
    lengths.add(group(0, "a", [[10], [10, 10], [10] * 5, [10] * 9], [[None], [None], [4], [4]]))
    assert lengths.admitted_tokens() == (10 + 20 + 40 + 40) / 4


def test_an_environment_without_a_token_says_nothing() -> None:
    lengths = AdmittedRollouts()
    lengths.add(group(0, "dead", [[10], [10]], [[0], [0]]))
    assert lengths.admitted_tokens() is None and lengths.length_bias() is None
    lengths.add(group(1, "alive", [[10], [30]], [[None], [None]]))
    assert lengths.admitted_tokens() == 20 and lengths.length_bias() == 1.0


def test_the_longest_attempt_of_a_lost_rollout_counts() -> None:
    """It would have survived where any of its attempts did."""
    lengths = AdmittedRollouts()
    lengths.add(group(0, "a", [[5, 5, 5], [5, 5, 5]], [[2, 1], [None]]))
    assert lengths.admitted_tokens() == 15


class Played(NamedTuple):
    """A rollout as it would go if nothing broke: whether each turn calls tools, and whether it succeeds."""

    calls: tuple[bool, ...]
    success: bool


def played(draw: Random, difficulty: float) -> Played:
    """One of a task: the more difficult, the more often it looks things up, and the less it succeeds."""
    looks = draw.randint(2, 12) if draw.random() < difficulty else 0
    return Played(calls=(True,) * looks + (False,), success=draw.random() < 1.0 - difficulty)


def spoken(task: Task, place: int, calls: Sequence[bool], outcome: Outcome) -> Rollout:
    """A rollout whose turns call tools or do not."""
    call = ToolCall(id="", name="look", arguments={})
    segments = tuple(
        sampled(
            at,
            at - 1 if at else None,
            (1,),
            message=Message(role="assistant", tool_calls=(call,) if calling else ()),
            logprobs=(0.0,),
        )
        for at, calling in enumerate(calls)
    )
    usage = Usage(turns=len(calls), sampled_tokens=len(calls))
    trajectory = Trajectory(id="t", task=task.id, role="policy", segments=segments, outcome=outcome, usage=usage)
    return Rollout(id="r", task=task, index=place, attempt=0, purpose="train", trajectories=(trajectory,))


def broken_at(draw: Random, play: Played, hazard: float, tools_alone: bool) -> int | None:
    """After how many turns it breaks: any turn may, or those alone that call tools."""
    for turn, calling in enumerate(play.calls, 1):
        if (calling or not tools_alone) and draw.random() < hazard:
            return turn
    return None


@pytest.mark.parametrize("tools_alone", [False, True])
def test_success_and_domains_are_those_of_the_same_run_without_failures(tools_alone: bool) -> None:
    """The same seeds with and without failures. Difficult tasks are long, so they are lost more often; of two
    environments one breaks, and in that the tag with the difficult tasks loses more."""
    plays, breaks = Random(0), Random(1)
    account, without = AdmittedRollouts(), AdmittedRollouts()
    for index in range(1800):
        env, tag = (("shop", "easy"), ("shop", "hard"), ("quiet", ""))[index % 3]
        difficulty = {"easy": 0.1, "hard": 0.9, "": 0.5}[tag]
        task = Task(id=str(index), env=env, tag=tag, messages=())
        left, lost, whole = [], [], []
        for place in range(SIZE):
            play = played(plays, difficulty)
            end = broken_at(breaks, play, 0.12 if env == "shop" else 0.0, tools_alone)
            whole.append((spoken(task, place, play.calls, ENDED), Score(reward=1.0, success=play.success)))
            if end is None:
                left.append(whole[-1])
            else:
                lost.append(spoken(task, place, play.calls[:end], BROKEN))
        for shown, rollouts, failed in ((account, left, lost), (without, whole, [])):
            scores = tuple(score for _, score in rollouts)
            made = tuple(rollout for rollout, _ in rollouts)
            shown.add(Group(id=str(index), index=index, task=task, rollouts=made, scores=scores, failed=tuple(failed)))
    truth = without.admitted_success()
    trained = account.success_bias() * account.admitted_success()
    assert truth is not None and trained > 1.05 * truth, "what is left is easier than what was admitted"
    assert account.admitted_success() == pytest.approx(truth, rel=0.02)
    assert account.success_bias() == pytest.approx(trained / truth, rel=0.02)
    assert account.length_bias() == pytest.approx(_mean_turns(account) / _mean_turns(without), rel=0.02)
    assert without.success_bias() == 1.0 and set(without.domain_bias().values()) == {1.0}
    shares = {name: without.trained[name] / sum(without.trained[env] for env in ("shop", "quiet")) for name in TOLD}
    left_shares = {
        name: account.trained[name] / sum(account.trained[env] for env in ("shop", "quiet")) for name in TOLD
    }
    assert account.domain_bias() == pytest.approx({name: left_shares[name] / shares[name] for name in TOLD})
    assert account.domain_bias()["hard"] < 0.8 < 1.1 < account.domain_bias()["quiet"]


def _mean_turns(account: AdmittedRollouts) -> float:
    cells = [cell for cells in account.counts.values() for cell in cells.values()]
    return sum(cell.ended_tokens for cell in cells) / sum(cell.ended for cell in cells)


def test_worlds_that_know_no_success_say_nothing_of_it() -> None:
    account = AdmittedRollouts()
    account.add(group(0, "a", [[10], [20]], [[None], [0]]))
    assert account.admitted_success() is None and account.success_bias() is None and account.domain_bias() == {}
