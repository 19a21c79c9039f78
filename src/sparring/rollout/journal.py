"""Journal of a rollout: a record of each reply of its models and each answer of its world, and its playback.

Resume, retry and rebuild work in the same way: the harness runs again on a fresh world, and the journal answers its
first requests. Recorded replies are not sampled again. The world's answers are compared with the recorded ones. After
the last recorded event, the engine answers, and new events are appended.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import xxhash

from sparring.envs.roles import BROKEN, RETRY
from sparring.errors import NotRebuildable
from sparring.generation import Sampling
from sparring.log import (
    Answered,
    Asked,
    Entered,
    Event,
    LimitHit,
    LogEntry,
    LogKind,
    Rewarded,
    Sampled,
    StartedOver,
    entry_of,
    event_of,
    stage_of,
)
from sparring.protocols import Store
from sparring.record.journal import RecordedReply, RecordedTurns
from sparring.record.order import settled
from sparring.record.session import trajectory_id
from sparring.rollout.phases import EventRecorder, ignore_event
from sparring.types import POLICY, Observation, Segment, Trajectory

PATIENCE_S = 60.0
"""Seconds that a request which is not recorded waits for recorded requests of the same rollout, if no call of the world
runs meanwhile."""

_STORED_EVENTS: Mapping[str, LogKind] = {"limit": "limit", "program": "program"}
_encoder = msgspec.msgpack.Encoder(order="deterministic", enc_hook=dict)


class Journal:
    """Append-only list of the events of one attempt at a rollout.

    Args:
        number: number of the attempt that began the journal.
        store: store of the events; None keeps them in memory.
    """

    def __init__(self, attempt: str, number: int = 0, *, store: Store | None = None) -> None:
        self.attempt, self.number = attempt, number
        self.events: list[Event] = []
        self._store = store
        self._unwritten: list[LogEntry] = []

    @property
    def size(self) -> int:
        """Number of recorded replies and answers."""
        sampled = sum(segment.model is not None for segments in self.segments().values() for segment in segments)
        return sampled + sum(map(len, self.answers().values()))

    def segments(self) -> dict[str, tuple[Segment, ...]]:
        """Return the segments of each role, in the form of a trajectory."""
        by_role: dict[str, list[Segment]] = {}
        for event in self.events:
            if isinstance(event, (Asked, Sampled)):
                by_role.setdefault(event.role, []).append(event.segment)
        return {role: settled(segments) for role, segments in by_role.items()}

    def answers(self) -> dict[str, dict[int, Answered]]:
        """Return the world's answers by role and number. The opening has the role ""."""
        by_role: dict[str, dict[int, Answered]] = {}
        for event in self.events:
            if isinstance(event, Answered):
                by_role.setdefault(event.role, {})[event.number] = event
        return by_role

    def holds(self, trajectories: Iterable[Trajectory]) -> bool:
        """Return whether the journal has the replies of all trajectories. Roles whose model replies in text are not
        recorded."""
        roles = {event.role for event in self.events if isinstance(event, Sampled)}
        return all(trajectory.role in roles for trajectory in trajectories if trajectory.segments)

    @property
    def rewards(self) -> list[Mapping[str, Any]]:
        """Rewards from outside, in order of arrival."""
        return [event.reward for event in self.events if isinstance(event, Rewarded)]

    def sampled(self, role: str, segments: Sequence[Segment]) -> None:
        """Append the segments of a turn. The session's recorder writes them to the store."""
        self.events += [(Asked if segment.sampling is None else Sampled)(role, segment) for segment in segments]

    def answered(self, answer: Answered) -> None:
        """Append an answer of the world. It is written to the store with the next turn."""
        self.events.append(answer)
        if self._store is not None:
            self._unwritten.append(entry_of(answer, self.attempt))

    def rewarded(self, reward: Mapping[str, Any]) -> None:
        """Write a reward from outside to the store and append it."""
        event = Rewarded(reward)
        if self._store is not None:
            self._store.record(entry_of(event, self.attempt))
        self.events.append(event)

    def unwritten(self) -> list[LogEntry]:
        """Return the log entries of new answers, each once, for the store."""
        entries, self._unwritten = self._unwritten, []
        return entries


class Journals:
    """Journals of the rollouts of one runner.

    Args:
        store: store of turns and log; None keeps journals in memory, so that no rollout can be resumed.
        recorded: called with each event that `note` is given.
        begins: true looks up only the rollouts named by `expect` in the store; false looks up every rollout.
    """

    def __init__(
        self, store: Store | None = None, recorded: EventRecorder = ignore_event, *, begins: bool = False
    ) -> None:
        self._store, self._recorded, self._begins = store, recorded, begins
        self._expected: set[str] = set()

    @property
    def durable(self) -> bool:
        """True if another process can resume unfinished rollouts."""
        return self._store is not None

    def new(self, attempt: str, number: int = 0) -> Journal:
        """Return an empty journal."""
        return Journal(attempt, number, store=self._store)

    def note(self, kind: str, attempt: str, data: Mapping[str, Any]) -> None:
        """Report an event of an attempt, and store it if it is a time limit that was hit or the end of a program."""
        self._recorded(kind, attempt, data)
        kept = _STORED_EVENTS.get(kind)
        if self._store is not None and kept is not None:
            self._store.record(LogEntry(stage=stage_of(attempt), kind=kept, name=attempt, data=data))

    def start_over(self, rollout: str, next_: Journal, reason: str) -> None:
        """Record that a rollout starts over with another journal."""
        if self._store is not None:
            event = StartedOver(id=next_.attempt, number=next_.number, reason=reason)
            self._store.record(entry_of(event, rollout))

    def expect(self, rollout: str) -> None:
        """Name a rollout that an earlier process may have begun."""
        self._expected.add(rollout)

    def unfinished(self, rollout: str) -> list[tuple[Journal, str]]:
        """Return the journals of a rollout that an earlier process began, each with the reason why its attempt ended.
        The last journal is to be resumed. The list is empty for a new rollout."""
        if self._store is None or self._begins and rollout not in self._expected:
            return []
        self._expected.discard(rollout)
        restarts = [event for event in self._log_events(rollout, "restarted") if isinstance(event, StartedOver)]
        names = [(rollout, 0), *((event.id, event.number) for event in restarts)]
        reasons = [*(event.reason for event in restarts), "the process that ran it was stopped"]
        journals = [self._read_journal(name, number) for name, number in names]
        begun = len(journals) > 1 or any(isinstance(event, (Sampled, Rewarded)) for event in journals[0].events)
        return list(zip(journals, reasons, strict=True)) if begun else []

    def _read_journal(self, attempt: str, number: int) -> Journal:
        assert self._store is not None
        journal = Journal(attempt, number, store=self._store)
        for name in self._store.trajectories(attempt):
            role = POLICY if name == attempt else name[len(attempt) + 1 :]
            if not role.startswith((RETRY, BROKEN)):
                journal.sampled(role, self._store.turns(trajectory_id(attempt, role)))
        journal.events += self._log_events(attempt, "observation", "limit", "reward")
        return journal

    def _log_events(self, name: str, *kinds: LogKind) -> Iterable[Entered]:
        assert self._store is not None
        for _, entry in self._store.entries(stage_of(name), name=name, kinds=kinds):
            event = event_of(entry)
            if event is not None:
                yield event


class Playback:
    """Playback of a journal in one attempt: recorded events come first, and later events are appended. Implements
    `record.journal.SessionJournal`.

    A request matches a recorded request with the same prompt ids and the same seed. If other sampling settings differ,
    apart from limits on tokens, the rollout differs from its journal. Each role gets its replies in their recorded
    order, even with several requests at once, so the new record equals the old one. A request that is not recorded goes
    to the engine, after all recorded replies were given.

    Args:
        journal: journal of the attempt; None is an empty one.

    Attributes:
        difference: first difference of the rollout from its journal, or None.
        answers: number of the world's answers to each role so far.
        calls: number of the world's calls that run now.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = Journal("") if journal is None else journal
        self.is_rebuild = self._journal.size > 0
        self._turns = {role: RecordedTurns(segments) for role, segments in self._journal.segments().items()}
        self._answers = self._journal.answers()
        limits = (event for event in self._journal.events if isinstance(event, LimitHit) and event.phase == "policy")
        self._timed_out_at = next((limit.answers for limit in limits), None)
        self._in_line = len(self._turns) < 2 and all(turns.is_line for turns in self._turns.values())
        self._progress: asyncio.Event | None = None  # set when a waiting request may go on
        self.closed = False
        self.calls = 0
        self.difference: str | None = None
        self.answers: Counter[str] = Counter()

    @property
    def num_left(self) -> int:
        """Number of recorded replies that were not given yet."""
        return sum(len(turns.replies) for turns in self._turns.values())

    def close(self) -> None:
        """Stop appending, because a task of the harness may outlive its attempt."""
        self.closed = True

    def turns(self, role: str) -> RecordedTurns:
        return self._turns.get(role) or RecordedTurns(())

    async def reply(self, role: str, prompt: bytes, sampling: Sampling) -> RecordedReply | None:
        if self.num_left and not self._in_line:
            await asyncio.sleep(0)  # concurrent requests must all arrive before one is answered
        while self.num_left:
            self.check()
            replies = self.turns(role).replies
            if replies and (replies[0].prompt, replies[0].sampling.seed) == (prompt, sampling.seed):
                return self._next_reply(role, replies, sampling)
            if self._in_line and role in self._turns:  # another role may have asked before, and was not answered yet
                self.differ(f"{role}: a request is not the recorded one, {_count_left(replies)}")
            await self._wait(role, replies)
        self.check()
        return None

    def sampled(self, role: str, segments: Sequence[Segment]) -> None:
        if not self.closed:
            self._journal.sampled(role, segments)

    def unwritten(self) -> list[LogEntry]:
        return self._journal.unwritten()

    def begin_call(self) -> None:
        """Count a call of the world that begins."""
        self.calls += 1

    def end_call(self) -> None:
        """Count a call of the world that ended. Waiting requests wait anew for what the harness makes of it."""
        self.calls -= 1
        self.progress()

    def has_answer(self, role: str) -> bool:
        """Return whether the world's next answer to a role is recorded."""
        return self.answers[role] <= max(self._answers.get(role, {}), default=-1)

    def answered(self, role: str, observation: Observation, took_s: float = 0.0) -> float:
        """Compare an answer of the world with the recorded one, or append it.

        Args:
            role: role that was answered; "" for the opening.
            took_s: seconds of the policy's own time that the answer took.

        Returns:
            The seconds that the recorded answer took; `took_s` if it is not recorded.

        Raises:
            NotRebuildable: the answer differs from the recorded answer.
        """
        number, recorded = self.answers[role], self._answers.get(role, {})
        answer = Answered(role=role, number=number, digest=observation_digest(observation), took_s=took_s)
        is_recorded = self.has_answer(role)
        self.answers[role] += 1
        if not is_recorded:
            if not self.closed:
                self._journal.answered(answer)
            return took_s
        before = recorded.get(number, answer)
        self.progress()
        if before.digest != answer.digest:
            place = f"answer {number + 1} to {role}" if role else "opening"
            self.differ(f"the world's {place} is not the recorded one")
        return before.took_s

    def timed_out(self, exceeded: bool, turn: int, seconds: float) -> bool:
        """Return whether the policy's time limit was hit. If the journal has recorded the limit, it is hit again after
        the same answer; otherwise it is hit if `exceeded`.

        Args:
            exceeded: whether the policy's time exceeds its limit.
            turn: number of replies that were requested.
            seconds: seconds of the policy's own time.
        """
        answers = self.answers.total()
        if self._timed_out_at is not None:
            return answers >= self._timed_out_at
        if exceeded and not self.closed:
            self._timed_out_at = answers
            self._journal.events.append(LimitHit(phase="policy", turn=turn, seconds=seconds, answers=answers))
        return exceeded

    def end(self) -> None:
        """Check that the whole journal was played. Raises NotRebuildable if the attempt differs from its journal, or
        ended before the journal's end."""
        self.check()
        if not self.is_rebuild:
            return
        if self.num_left:
            self.differ(f"the rollout ended with {self.num_left} recorded replies left")
        if any(self.answers[role] <= max(recorded) for role, recorded in self._answers.items()):
            self.differ("the rollout ended with recorded answers left")

    def differ(self, difference: str) -> None:
        """Record a difference from the journal, and wake all waiting requests.

        Raises:
            NotRebuildable: always.
        """
        self.difference = self.difference or difference
        self.progress()
        self.check()

    def check(self) -> None:
        """Raise NotRebuildable if the rollout differs from its journal."""
        if self.difference is not None:
            raise NotRebuildable(f"rebuild: {self.difference}")

    def progress(self) -> None:
        """Wake all waiting requests."""
        if self._progress is not None:
            self._progress.set()
            self._progress = None

    def _next_reply(self, role: str, left: deque[RecordedReply], sampling: Sampling) -> RecordedReply:
        """Return the next reply of a role. The reply keeps its recorded token limits, because the budget that was left
        for it depended on concurrent requests."""
        recorded = left[0].sampling
        if replace(sampling, max_tokens=recorded.max_tokens, min_tokens=recorded.min_tokens) != recorded:
            self.differ(f"{role}: a request has other settings of sampling than the recorded one, {_count_left(left)}")
        self.progress()
        return left.popleft()

    async def _wait(self, role: str, left: Sequence[RecordedReply]) -> None:
        """Wait until another request makes progress. If none does, the waiting request is a difference from the
        journal."""
        progress = self._progress = self._progress or asyncio.Event()
        while not progress.is_set():
            try:
                await asyncio.wait_for(progress.wait(), PATIENCE_S)
            except TimeoutError:
                if not self.calls:
                    waited = f"nothing else went on for {PATIENCE_S:.0f} s"
                    self.differ(f"{role}: a request is not in the record, {waited}, {_count_left(left)}")


def _count_left(replies: Sequence[RecordedReply]) -> str:
    return f"with {len(replies)} recorded replies left"


def observation_digest(observation: Observation) -> int:
    """Return a 64-bit digest (xxh3) of an observation."""
    try:
        data = _encoder.encode(observation)
    except (OverflowError, TypeError, ValueError):  # a call's arguments are not plain data
        data = repr(observation).encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(data)
