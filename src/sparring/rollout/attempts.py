"""Attempts at one rollout: what each left behind, and from which journal the next one goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sparring.envs.roles import BROKEN
from sparring.errors import EngineError, InfraError, JudgeError, NotRebuildable
from sparring.record.branches import Transcript
from sparring.record.session import trajectory_id
from sparring.rollout.admitted import sampled_tokens
from sparring.rollout.blame import Call, Place, WorldCalls
from sparring.rollout.journal import Journal, Journals
from sparring.rollout.outcomes import broken_by, failure_of
from sparring.types import Rollout, Score, Segment, Trajectory, Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Result of one attempt, in tokens and in messages, with the infrastructure's error if that ended it.

    Attributes:
        rollout: outcome and trajectories.
        score: score; None if there is none.
        error: error that broke the attempt; None if it came to an outcome.
        transcripts: conversations of each role, one for each branch.
        again: whether the attempt played recorded events again.
        caught_up: whether all replies that were recorded before the attempt came again.
        rebuildable: whether another attempt may play the same journal.
        broken: call of the world that broke; None if none did.
        unjudged: whether the conversation is whole and only its judge failed, so that nothing is run again.
        broken_call: kind of the call that broke. Without a box the environment could not even be opened.
    """

    rollout: Rollout
    score: Score | None
    error: InfraError | None
    transcripts: Mapping[str, tuple[Transcript, ...]]
    again: bool = False
    caught_up: bool = True
    rebuildable: bool = False
    broken: Place | None = None
    unjudged: bool = False
    broken_call: Call | None = None


class Attempts:
    """Account of the attempts at one rollout. Every sampled token has one owner: an attempt that is rebuilt hands its
    tokens on to the next one and leaves its failure alone; one that starts over leaves tokens and failure.

    Args:
        rollout_id: id of the first attempt, and of those that are rebuilt from it. One that starts over as number n has
            `<rollout_id>/retry-<n>`; the failure of number n is recorded as `<rollout_id>/broken-<n>`.
        retries: number of attempts one after the other that may break without getting further than those before.
        calls: calls of this rollout's worlds.
        journals: where journals come from.

    Attributes:
        journal: journal that the next attempt plays.
        number: number of the next attempt.
        idle: number of attempts since one got further.
        failures: number of attempts that broke in this process.
        rebuilt: number of attempts that got as far as the one before.
        started_over: reasons why attempts started over.
        calls: calls of this rollout's worlds.
    """

    def __init__(self, rollout_id: str, retries: int, calls: WorldCalls, journals: Journals) -> None:
        self.journal = journals.new(rollout_id)
        self.number = 0
        self.idle = 0
        self.failures = 0
        self.rebuilt = 0
        self.started_over: list[str] = []
        self.calls = calls
        self._first_id = rollout_id
        self._retries = retries
        self._journals = journals
        self._last: Rollout | None = None
        self._broken: list[Rollout] = []
        self._furthest = 0
        self._refused = ""
        self._resumed = False

    def resume(self, made: Callable[..., Rollout]) -> None:
        """Go on from what an earlier process recorded, if it recorded anything.

        Args:
            made: makes a rollout of an id, the number of an attempt, and trajectories.
        """
        unfinished = self._journals.unfinished(self._first_id)
        if not unfinished:
            return
        self.journal = unfinished[-1][0]
        self.number, self._furthest = self.journal.number, self.journal.size
        *self._broken, self._last = [_rollout_of(journal, reason, made) for journal, reason in unfinished]
        self._resumed = True

    def failed(self, attempt: Attempt, *, excused: bool = False) -> bool:
        """Count an attempt that the infrastructure broke, and prepare the next one. One that is `excused` costs no
        retry.

        Returns:
            Whether there may be another one.
        """
        self._count(attempt)
        self.number += 1
        differs, resumed = isinstance(attempt.error, NotRebuildable), self._resumed
        if differs:
            self._refused = str(attempt.error)
        self._go_on(attempt)
        size = self.journal.size if attempt.rebuildable and attempt.caught_up and not differs else 0
        self.idle = 0 if size > self._furthest or not self.failures else self.idle + (not excused)
        self.failures += not (differs and resumed)
        self._furthest = max(self._furthest, size)
        if self.idle >= self._retries and not (differs and resumed):
            return False
        if self._refused:
            self._start_over()
        return True

    def is_the_policys(self, attempt: Attempt) -> bool:
        """Return whether an attempt broke by the policy's doing (law 6). Engine and judge are no part of the world, and
        before its first token the policy has done nothing."""
        if (
            attempt.broken is None
            or not attempt.caught_up
            or isinstance(attempt.error, (EngineError, JudgeError, NotRebuildable))
        ):
            return False
        if attempt.error is None or attempt.error.limit_s is not None:  # a limit of time says nothing of the call
            return False
        return bool(sampled_tokens(attempt.rollout)) and self.calls.broke(attempt.broken, failure_of(attempt.error))

    def finished(self, attempt: Attempt) -> tuple[Rollout, ...]:
        """Count an attempt that came to an outcome.

        Returns:
            The attempts that the infrastructure broke before it.
        """
        self._count(attempt)
        self._hand_on()
        return self._in_order()

    def given_up(self) -> tuple[Rollout, tuple[Rollout, ...]]:
        """Return the last attempt, with all tokens of those that it was rebuilt from, and those that broke before."""
        assert self._last is not None
        return self._last, self._in_order()

    def _go_on(self, attempt: Attempt) -> None:
        """Let an attempt hold the tokens of its journal. One that did not catch up holds those of the one before."""
        rollout, before = attempt.rollout, self._last
        behind = attempt.again and (not attempt.caught_up or isinstance(attempt.error, NotRebuildable))
        self._hand_on()
        if before is not None and behind:
            ended = rollout.trajectories[0].outcome
            rollout = replace(rollout, trajectories=tuple(replace(t, outcome=ended) for t in before.trajectories))
        self._last = rollout
        if not attempt.rebuildable:
            self._refused = self._refused or "the world says that it cannot be rebuilt"

    def _hand_on(self) -> None:
        """Leave the failure of the attempt that holds the tokens, if it failed: another one holds them now."""
        if self._last is not None and not self._resumed:
            self._broken.append(self._without_tokens(self._last))
        self._last, self._resumed = None, False

    def _start_over(self) -> None:
        """Begin the next attempt with an empty journal. Tokens that were sampled stay with the attempt that has
        them."""
        id = self.journal.attempt
        if self._last is not None and sampled_tokens(self._last):
            self._broken.append(self._last)
            self._last = None
            self.started_over.append(self._refused)
            id = f"{self._first_id}/retry-{self.number}"
            self.calls.forget()
        self.journal = self._journals.new(id, self.number)

    def _count(self, attempt: Attempt) -> None:
        """Count an attempt that was brought back."""
        self.rebuilt += attempt.again and attempt.caught_up and not isinstance(attempt.error, NotRebuildable)

    def _without_tokens(self, rollout: Rollout) -> Rollout:
        """Return the failure of an attempt whose tokens another one has."""
        first, name = rollout.trajectories[0], f"{self._first_id}/{BROKEN}{rollout.attempt}"
        alone = replace(first, id=trajectory_id(name, first.role), segments=(), usage=Usage())
        return replace(rollout, id=name, trajectories=(alone,))

    def _in_order(self) -> tuple[Rollout, ...]:
        return tuple(sorted(self._broken, key=lambda rollout: rollout.attempt))


def _rollout_of(journal: Journal, reason: str, made: Callable[..., Rollout]) -> Rollout:
    """Return an attempt of an earlier process, with its tokens."""
    outcome = broken_by(NotRebuildable(reason))
    rollout = made(id=journal.attempt, attempt=journal.number, trajectories=())
    trajectories = [
        Trajectory(
            id=trajectory_id(journal.attempt, role),
            task=rollout.task.id,
            role=role,
            segments=segments,
            outcome=outcome,
            usage=_usage(segments),
        )
        for role, segments in journal.segments().items()
    ]
    return replace(rollout, trajectories=tuple(trajectories))


def _usage(segments: Sequence[Segment]) -> Usage:
    """Return the counts of recorded segments, as far as they tell them."""
    sampled = [segment for segment in segments if segment.model is not None]
    return Usage(
        sampled_tokens=sum(len(segment.tokens) for segment in sampled),
        turns=len(sampled),
        tool_calls=sum(len(segment.message.tool_calls) for segment in sampled if segment.message is not None),
    )
