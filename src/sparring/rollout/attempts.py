"""Attempts at one rollout: what each left behind, and from what the next one goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sparring.envs.roles import BROKEN
from sparring.errors import EngineError, InfraError, JudgeError, NotRebuildable
from sparring.record.branches import Transcript
from sparring.record.session import trajectory_id
from sparring.rollout.admitted import sampled_tokens
from sparring.rollout.attempt_log import EndedAttempt, UnfinishedRollout
from sparring.rollout.blame import Call, Place, WorldCalls
from sparring.rollout.outcomes import broken_by, failure_of
from sparring.rollout.rebuild import AttemptRecord
from sparring.types import Rollout, Score, Segment, Trajectory, Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One try: what it left, in tokens and in messages, and the infrastructure's error if that ended it.

    Attributes:
        rollout: its outcome and trajectories.
        score: None where it has none.
        error: what broke it.
        transcripts: the conversations of its roles, one for each branch.
        record: from which it can be rebuilt; None where it cannot.
        rebuilt: whether everything that was recorded before it came again.
        broken: the call of the world that broke.
        unjudged: the conversation is whole and only its judge failed, so that nothing is run again.
        broken_call: the kind of the call that broke; without a box the environment could not even be opened.
    """

    rollout: Rollout
    score: Score | None
    error: InfraError | None
    transcripts: Mapping[str, tuple[Transcript, ...]]
    record: AttemptRecord | None = None
    rebuilt: bool = True
    broken: Place | None = None
    unjudged: bool = False
    broken_call: Call | None = None


class Attempts:
    """Account of the attempts at one rollout. Every sampled token has one owner: an attempt that is rebuilt hands its
    tokens on to the next one and leaves its failure alone; one that starts over leaves tokens and failure.

    Args:
        rollout_id: of the first attempt, and of those that are rebuilt from it. One that starts over as number n has
            `<rollout_id>/retry-<n>`; the failure of number n is recorded as `<rollout_id>/broken-<n>`.
        retries: how many attempts one after the other may break without getting further than those before.
        calls: of this rollout's worlds.

    Attributes:
        id: of the next attempt.
        number: of the next attempt.
        record: from which the next attempt is rebuilt; None where it begins from nothing.
        idle: attempts since one got further.
        failures: attempts that broke in this process.
        rebuilt: how many attempts were brought back as far as the one before.
        started_over: why attempts started over.
        calls: of this rollout's worlds.
    """

    def __init__(self, rollout_id: str, retries: int, calls: WorldCalls) -> None:
        self.id = rollout_id
        self.number = 0
        self.record: AttemptRecord | None = None
        self.idle = 0
        self.failures = 0
        self.rebuilt = 0
        self.started_over: list[str] = []
        self.calls = calls
        self._first_id = rollout_id
        self._retries = retries
        self._last: Rollout | None = None
        self._broken: list[Rollout] = []
        self._furthest = 0
        self._refused = ""
        self._resumed = False

    def resume(self, unfinished: UnfinishedRollout, made: Callable[..., Rollout]) -> None:
        """Go on from what an earlier process recorded.

        Args:
            unfinished: the record.
            made: makes a rollout of an id, the number of an attempt, and trajectories.
        """
        self.id, self.number, self.record = unfinished.id, unfinished.number, unfinished.record
        self._furthest = unfinished.record.size
        stopped = EndedAttempt(
            id=self.id, number=self.number, reason="the process that ran it was stopped", segments=self.record.segments
        )
        *self._broken, self._last = [_left(attempt, made) for attempt in (*unfinished.ended, stopped)]
        self._resumed = True

    def failed(self, attempt: Attempt, *, excused: bool = False) -> bool:
        """Take note of an attempt that the infrastructure broke, and prepare the next one. One that is `excused` costs
        no retry.

        Returns:
            Whether there may be another one.
        """
        self._count(attempt)
        self.number += 1
        differs, resumed = isinstance(attempt.error, NotRebuildable), self._resumed
        if differs:
            self._refused = str(attempt.error)
            attempt = replace(attempt, record=None, rebuilt=self.record is None)
        size = self._go_on(attempt)
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
            or not attempt.rebuilt
            or isinstance(attempt.error, (EngineError, JudgeError, NotRebuildable))
        ):
            return False
        if attempt.error is None or attempt.error.limit_s is not None:  # a limit of time says nothing of the call
            return False
        return bool(sampled_tokens(attempt.rollout)) and self.calls.broke(attempt.broken, failure_of(attempt.error))

    def finished(self, attempt: Attempt) -> tuple[Rollout, ...]:
        """Take note of an attempt that came to an outcome.

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

    def _go_on(self, attempt: Attempt) -> int:
        """Rebuild the next attempt from this one, if it got as far as the one before; return how far that was."""
        rollout, before = attempt.rollout, self._last
        self._hand_on()
        if before is not None and not attempt.rebuilt:
            ended = rollout.trajectories[0].outcome
            rollout = replace(rollout, trajectories=tuple(replace(t, outcome=ended) for t in before.trajectories))
        self._last = rollout
        if attempt.record is None:
            self._refused = self._refused or "the world says that it cannot be rebuilt"
            return 0
        if not attempt.rebuilt:
            return 0
        self.record = attempt.record if attempt.record.size else None
        return attempt.record.size

    def _hand_on(self) -> None:
        """Leave the failure of the attempt that holds the tokens, if it failed: another one holds them now."""
        if self._last is not None and not self._resumed:
            self._broken.append(self._without_tokens(self._last))
        self._last, self._resumed = None, False

    def _start_over(self) -> None:
        """Begin the next attempt from nothing. Tokens that were sampled stay with the attempt that has them."""
        self.record = None
        if self._last is None or not sampled_tokens(self._last):
            return
        self._broken.append(self._last)
        self._last = None
        self.started_over.append(self._refused)
        self.id = f"{self._first_id}/retry-{self.number}"
        self.calls.forget()

    def _count(self, attempt: Attempt) -> None:
        """Count an attempt that was brought back."""
        self.rebuilt += self.record is not None and attempt.rebuilt and not isinstance(attempt.error, NotRebuildable)

    def _without_tokens(self, rollout: Rollout) -> Rollout:
        """Return the failure of an attempt whose tokens another one has."""
        first, name = rollout.trajectories[0], f"{self._first_id}/{BROKEN}{rollout.attempt}"
        alone = replace(first, id=trajectory_id(name, first.role), segments=(), usage=Usage())
        return replace(rollout, id=name, trajectories=(alone,))

    def _in_order(self) -> tuple[Rollout, ...]:
        return tuple(sorted(self._broken, key=lambda rollout: rollout.attempt))


def _left(attempt: EndedAttempt, made: Callable[..., Rollout]) -> Rollout:
    """Return an attempt of an earlier process, with its tokens."""
    outcome = broken_by(NotRebuildable(attempt.reason))
    rollout = made(id=attempt.id, attempt=attempt.number, trajectories=())
    trajectories = [
        Trajectory(
            id=trajectory_id(attempt.id, role),
            task=rollout.task.id,
            role=role,
            segments=tuple(segments),
            outcome=outcome,
            usage=_usage(segments),
        )
        for role, segments in attempt.segments.items()
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
