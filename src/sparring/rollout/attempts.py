"""Attempts at one rollout: the tokens that each attempt owns, and the journal that the next attempt replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sparring.envs.roles import BROKEN
from sparring.errors import EngineError, InfraError, JudgeError, NotRebuildable
from sparring.protocols import Snapshot
from sparring.record.branches import Transcript
from sparring.record.session import trajectory_id
from sparring.rollout.blame import Call, Place, WorldCalls
from sparring.rollout.journal import Journal, Journals
from sparring.rollout.outcomes import broken_by, failure_of
from sparring.rollout.step_estimates import sampled_tokens
from sparring.types import Rollout, Score, Segment, Trajectory, Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Result of one attempt.

    Attributes:
        error: infrastructure error that broke the attempt; None if the attempt came to an outcome.
        transcripts: conversations of each role in messages, one for each branch.
        is_rebuild: whether the attempt began with recorded events.
        caught_up: whether the attempt played the whole journal without a difference.
        rebuildable: whether the journal can be played again.
        broken: place of the world's call that failed; None if no call failed.
        unjudged: whether only the judge failed, so that the conversation is complete.
        broken_call: kind of the call that broke. If no box could be opened, it is the call that opens the environment.
        is_fork: whether the attempt's box was forked from a snapshot of the box that the attempt before had prepared.
        prepared: snapshot of the box as the attempt's world had prepared it; None without one.
    """

    rollout: Rollout
    score: Score | None
    error: InfraError | None
    transcripts: Mapping[str, tuple[Transcript, ...]]
    is_rebuild: bool = False
    caught_up: bool = True
    rebuildable: bool = False
    broken: Place | None = None
    unjudged: bool = False
    broken_call: Call | None = None
    is_fork: bool = False
    prepared: Snapshot | None = None


class Attempts:
    """Account of the attempts at one rollout. Every sampled token has one owner. An attempt that is rebuilt passes its
    tokens on to the next attempt and keeps only its failure. An attempt before a fresh start keeps both.

    Args:
        rollout_id: id of the first attempt, which rebuilt attempts share. If the rollout starts over, attempt n has the
            id `<rollout_id>/retry-<n>`; the failure of attempt n is recorded as `<rollout_id>/broken-<n>`.
        make_rollout: makes a rollout from an id, the number of an attempt, and trajectories.
        retries: maximum number of consecutive attempts that break without getting further than earlier attempts.
        journals: source of journals. An attempt that an earlier process began is resumed.

    Attributes:
        idle: number of attempts since the last attempt that got further than those before it.
        failures: number of attempts that broke in this process.
        refused: reason why the rollout cannot be rebuilt, or empty.
        prepared: snapshot that the next attempt's box is forked from; None: the world prepares the box. Only the first
            retry of a failed call gets a snapshot, and only of a box that was prepared by its own world.
    """

    def __init__(
        self, rollout_id: str, make_rollout: Callable[..., Rollout], retries: int, calls: WorldCalls, journals: Journals
    ) -> None:
        unfinished = journals.unfinished(rollout_id)
        earlier = [_rollout_of(journal, reason, make_rollout) for journal, reason in unfinished]
        self.journal = unfinished[-1][0] if unfinished else journals.new(rollout_id)
        self.number = self.journal.number
        self.idle = self.failures = 0
        self.calls = calls
        self.refused = ""
        self.prepared: Snapshot | None = None
        self._first_id, self._retries, self._journals = rollout_id, retries, journals
        self._broken: list[Rollout] = earlier[:-1]
        self._last: Rollout | None = earlier[-1] if earlier else None
        self._resumed = bool(earlier)
        self._furthest = self.journal.size

    def add_failure(self, attempt: Attempt, *, excused: bool = False) -> bool:
        """Count an attempt that the infrastructure broke, and prepare the next one. An `excused` attempt costs no
        retry, nor does an attempt in a forked box, which may have broken by what both boxes share. Return whether
        another attempt may follow."""
        self.number += 1
        stale = self._resumed and isinstance(attempt.error, NotRebuildable)
        if isinstance(attempt.error, NotRebuildable):
            self.refused = str(attempt.error)
        self._own_tokens(attempt)
        self.prepared = None
        size = self.journal.size if attempt.rebuildable and attempt.caught_up else 0
        costs = not excused and not attempt.is_fork
        self.idle = 0 if size > self._furthest or not self.failures else self.idle + costs
        self.failures += not stale
        self._furthest = max(self._furthest, size)
        if self.idle >= self._retries and not stale:
            return False
        if self.refused:
            self._start_over()
        elif not self.idle:
            self.prepared = attempt.prepared
        return True

    def is_the_policys(self, attempt: Attempt) -> bool:
        """Return whether the policy broke the attempt (law 6). A failure of the engine or of a judge is never the
        policy's, nor is a failure before the policy's first token."""
        error, broken = attempt.error, attempt.broken
        if error is None or isinstance(error, (EngineError, JudgeError)) or broken is None or not attempt.caught_up:
            return False
        if error.limit_s is not None:  # a time limit says nothing about the call
            return False
        if not sampled_tokens(attempt.rollout):
            return False
        return self.calls.broke(broken, failure_of(error), is_fork=attempt.is_fork)

    def finish(self) -> tuple[Rollout, ...]:
        """Return the broken attempts before the attempt that came to an outcome."""
        self._pass_tokens_on()
        return self._broken_in_order()

    def give_up(self) -> tuple[Rollout, tuple[Rollout, ...]]:
        """Return the last attempt, with all tokens that were passed on to it, and the broken attempts before it."""
        assert self._last is not None
        return self._last, self._broken_in_order()

    def _own_tokens(self, attempt: Attempt) -> None:
        """Make an attempt the owner of its journal's tokens. If it did not play the whole journal, it takes over the
        tokens of the attempt before."""
        rollout, before = attempt.rollout, self._last
        self._pass_tokens_on()
        if before is not None and attempt.is_rebuild and not attempt.caught_up:
            ended = rollout.trajectories[0].outcome
            rollout = replace(rollout, trajectories=tuple(replace(t, outcome=ended) for t in before.trajectories))
        self._last = rollout
        if not attempt.rebuildable:
            self.refused = self.refused or "the world says that it cannot be rebuilt"

    def _pass_tokens_on(self) -> None:
        """Keep the failure of the current owner, without its tokens, because another attempt takes them over."""
        if self._last is not None and not self._resumed:
            self._broken.append(self._without_tokens(self._last))
        self._last, self._resumed = None, False

    def _start_over(self) -> None:
        """Give the next attempt an empty journal. The current owner keeps its tokens."""
        id = self.journal.attempt
        if self._last is not None and sampled_tokens(self._last):
            self._broken.append(self._last)
            self._last = None
            id = f"{self._first_id}/retry-{self.number}"
            self.calls.forget()
        self.journal = self._journals.new(id, self.number)

    def _without_tokens(self, rollout: Rollout) -> Rollout:
        first, name = rollout.trajectories[0], f"{self._first_id}/{BROKEN}{rollout.attempt}"
        alone = replace(first, id=trajectory_id(name, first.role), segments=(), usage=Usage())
        return replace(rollout, id=name, trajectories=(alone,))

    def _broken_in_order(self) -> tuple[Rollout, ...]:
        return tuple(sorted(self._broken, key=lambda rollout: rollout.attempt))


def _rollout_of(journal: Journal, reason: str, make_rollout: Callable[..., Rollout]) -> Rollout:
    outcome = broken_by(NotRebuildable(reason))
    rollout = make_rollout(id=journal.attempt, attempt=journal.number, trajectories=())
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
    """Return the counts that recorded segments give: sampled tokens, turns and tool calls."""
    sampled = [segment for segment in segments if segment.model is not None]
    return Usage(
        sampled_tokens=sum(len(segment.tokens) for segment in sampled),
        turns=len(sampled),
        tool_calls=sum(len(segment.message.tool_calls) for segment in sampled if segment.message is not None),
    )
