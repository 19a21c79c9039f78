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
        caught_up: whether all replies that were recorded before the attempt came again, and nothing differed.
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
        made: makes a rollout of an id, the number of an attempt, and trajectories.
        retries: number of attempts one after the other that may break without getting further than those before.
        calls: calls of this rollout's worlds.
        journals: where journals come from: the rollout goes on from what an earlier process recorded of it.

    Attributes:
        journal: journal that the next attempt plays.
        number: number of the next attempt.
        idle: number of attempts since one got further.
        failures: number of attempts that broke in this process.
        refused: reason why a rollout cannot be rebuilt; empty if it can.
        calls: calls of this rollout's worlds.
    """

    def __init__(
        self, rollout_id: str, made: Callable[..., Rollout], retries: int, calls: WorldCalls, journals: Journals
    ) -> None:
        unfinished = journals.unfinished(rollout_id)
        earlier = [_rollout_of(journal, reason, made) for journal, reason in unfinished]
        self.journal = unfinished[-1][0] if unfinished else journals.new(rollout_id)
        self.number = self.journal.number
        self.idle = self.failures = 0
        self.calls = calls
        self.refused = ""
        self._first_id, self._retries, self._journals = rollout_id, retries, journals
        self._broken: list[Rollout] = earlier[:-1]
        self._last: Rollout | None = earlier[-1] if earlier else None
        self._resumed = bool(earlier)
        self._furthest = self.journal.size

    def failed(self, attempt: Attempt, *, excused: bool = False) -> bool:
        """Count an attempt that the infrastructure broke, and prepare the next one. One that is `excused` costs no
        retry.

        Returns:
            Whether there may be another one.
        """
        self.number += 1
        stale = self._resumed and isinstance(attempt.error, NotRebuildable)
        if isinstance(attempt.error, NotRebuildable):
            self.refused = str(attempt.error)
        self._go_on(attempt)
        size = self.journal.size if attempt.rebuildable and attempt.caught_up else 0
        self.idle = 0 if size > self._furthest or not self.failures else self.idle + (not excused)
        self.failures += not stale
        self._furthest = max(self._furthest, size)
        if self.idle >= self._retries and not stale:
            return False
        if self.refused:
            self._start_over()
        return True

    def is_the_policys(self, attempt: Attempt) -> bool:
        """Return whether an attempt broke by the policy's doing (law 6). Engine and judge are no part of the world, and
        before its first token the policy has done nothing."""
        error, broken = attempt.error, attempt.broken
        if error is None or isinstance(error, (EngineError, JudgeError)) or broken is None or not attempt.caught_up:
            return False
        if error.limit_s is not None:  # a limit of time says nothing of the call
            return False
        return bool(sampled_tokens(attempt.rollout)) and self.calls.broke(broken, failure_of(error))

    def finished(self) -> tuple[Rollout, ...]:
        """Return the attempts that the infrastructure broke before one that came to an outcome."""
        self._hand_on()
        return self._in_order()

    def given_up(self) -> tuple[Rollout, tuple[Rollout, ...]]:
        """Return the last attempt, with all tokens of those that it was rebuilt from, and those that broke before."""
        assert self._last is not None
        return self._last, self._in_order()

    def _go_on(self, attempt: Attempt) -> None:
        """Let an attempt hold the tokens of its journal. One that did not catch up holds those of the one before."""
        rollout, before = attempt.rollout, self._last
        self._hand_on()
        if before is not None and attempt.again and not attempt.caught_up:
            ended = rollout.trajectories[0].outcome
            rollout = replace(rollout, trajectories=tuple(replace(t, outcome=ended) for t in before.trajectories))
        self._last = rollout
        if not attempt.rebuildable:
            self.refused = self.refused or "the world says that it cannot be rebuilt"

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
            id = f"{self._first_id}/retry-{self.number}"
            self.calls.forget()
        self.journal = self._journals.new(id, self.number)

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
