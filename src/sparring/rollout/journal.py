"""Journal of a rollout: what its models sampled and its world answered, kept as it happens and played again.

Resume, retry and rebuild are one thing: the harness runs again on a fresh world, and the journal comes first. Its
replies answer the requests that they answered before, so nothing is sampled a second time. The world's answers are
compared with those in the journal. After the last event of the journal the engine answers, and the journal grows.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
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
from sparring.record.identity import DIGEST_BYTES
from sparring.record.journal import RecordedReply
from sparring.record.order import settled
from sparring.record.session import trajectory_id
from sparring.rollout.phases import Recorded, unrecorded
from sparring.types import POLICY, Observation, Segment, Trajectory

PATIENCE_S = 60.0
"""Seconds that a request which is not in the journal waits for others of its rollout that are."""

_NOTED: Mapping[str, LogKind] = {"limit": "limit", "program": "program"}
_encoder = msgspec.msgpack.Encoder(order="deterministic", enc_hook=dict)


class Journal:
    """Append-only list of the events of one attempt at a rollout.

    Args:
        attempt: id of the attempt.
        number: number of the attempt at which the journal began.
        events: events that an earlier process recorded.
        store: store that keeps the events; None: they are kept in memory alone.
    """

    def __init__(
        self, attempt: str, number: int = 0, events: Iterable[Event] = (), *, store: Store | None = None
    ) -> None:
        self.attempt, self.number = attempt, number
        self.events: list[Event] = list(events)
        self._store = store
        self._unwritten: list[LogEntry] = []

    @property
    def size(self) -> int:
        """Number of replies of models and answers of the world."""
        sampled = sum(segment.model is not None for segments in self.segments().values() for segment in segments)
        return sampled + sum(map(len, self.answers().values()))

    def segments(self) -> dict[str, tuple[Segment, ...]]:
        """Return the segments of each role, as those of a trajectory."""
        by_role: dict[str, list[Segment]] = {}
        for event in self.events:
            if isinstance(event, (Asked, Sampled)):
                by_role.setdefault(event.role, []).append(event.segment)
        return {role: settled(segments) for role, segments in by_role.items()}

    def answers(self) -> dict[str, dict[int, Answered]]:
        """Return the world's answers to each role by their numbers; the opening's role is ""."""
        by_role: dict[str, dict[int, Answered]] = {}
        for event in self.events:
            if isinstance(event, Answered):
                by_role.setdefault(event.role, {})[event.number] = event
        return by_role

    @property
    def timed_out_at(self) -> int | None:
        """Number of answers after which the policy's own time was over; None if it was not."""
        policy = (event for event in self.events if isinstance(event, LimitHit) and event.phase == "policy")
        return next((event.answers for event in policy), None)

    def holds(self, trajectories: Iterable[Trajectory]) -> bool:
        """Return whether the journal has the replies of all trajectories. It has none of roles that reply in text."""
        roles = {event.role for event in self.events if isinstance(event, Sampled)}
        return all(trajectory.role in roles for trajectory in trajectories if trajectory.segments)

    @property
    def rewards(self) -> list[Mapping[str, Any]]:
        """Rewards from outside, in order."""
        return [event.reward for event in self.events if isinstance(event, Rewarded)]

    def sampled(self, role: str, segments: Sequence[Segment]) -> None:
        """Append the segments of a turn. The store gets them from the session's recorder."""
        self.events += [(Asked if segment.sampling is None else Sampled)(role, segment) for segment in segments]

    def answered(self, answer: Answered) -> None:
        """Append an answer of the world. The store gets it with the next turn."""
        self.events.append(answer)
        if self._store is not None:
            self._unwritten.append(entry_of(answer, self.attempt))

    def rewarded(self, reward: Mapping[str, Any]) -> None:
        """Append a reward from outside once it is durable.

        Raises:
            StoreError: it cannot be written.
        """
        event = Rewarded(reward)
        if self._store is not None:
            self._store.record(entry_of(event, self.attempt))
        self.events.append(event)

    def unwritten(self) -> list[LogEntry]:
        """Return the entries of answers that the store has not got yet. Each is returned once."""
        entries, self._unwritten = self._unwritten, []
        return entries


class Journals:
    """Journals of the rollouts of one runner, and the log that keeps them.

    Args:
        store: holds turns and log; None: journals are kept in memory, and no rollout goes on in another process.
        recorded: called with each event that `note` is given.
        begins: whether rollouts are new unless `expect` names them; if not, each is looked for in the store.
    """

    def __init__(self, store: Store | None = None, recorded: Recorded = unrecorded, *, begins: bool = False) -> None:
        self._store, self._recorded, self._begins = store, recorded, begins
        self._expected: set[str] = set()

    @property
    def durable(self) -> bool:
        """True if unfinished rollouts can go on in another process."""
        return self._store is not None

    def new(self, attempt: str, number: int = 0) -> Journal:
        """Return an empty journal."""
        return Journal(attempt, number, store=self._store)

    def note(self, kind: str, attempt: str, data: Mapping[str, Any]) -> None:
        """Report an event of an attempt. The store keeps a limit of time that struck and a program that ended.

        Raises:
            StoreError: it cannot be written.
        """
        self._recorded(kind, attempt, data)
        kept = _NOTED.get(kind)
        if self._store is not None and kept is not None:
            self._store.record(LogEntry(stage=stage_of(attempt), kind=kept, name=attempt, data=data))

    def start_over(self, rollout: str, next_: Journal, reason: str) -> None:
        """Record that a rollout starts over with another journal.

        Raises:
            StoreError: it cannot be written.
        """
        if self._store is not None:
            event = StartedOver(id=next_.attempt, number=next_.number, reason=reason)
            self._store.record(entry_of(event, rollout))

    def expect(self, rollout: str) -> None:
        """Mark a rollout that an earlier process may have begun."""
        self._expected.add(rollout)

    def unfinished(self, rollout: str) -> list[tuple[Journal, str]]:
        """Return the journals of a rollout that an earlier process began, each with the reason why its attempt ended.
        The last one is to go on. The list is empty if the rollout is new.

        Raises:
            StoreError: the file cannot be read or is damaged.
        """
        if self._store is None or self._begins and rollout not in self._expected:
            return []
        self._expected.discard(rollout)
        restarts = [event for event in self._entered(rollout, "restarted") if isinstance(event, StartedOver)]
        names = [(rollout, 0), *((event.id, event.number) for event in restarts)]
        reasons = [*(event.reason for event in restarts), "the process that ran it was stopped"]
        journals = [self._read(name, number) for name, number in names]
        begun = len(journals) > 1 or any(isinstance(event, Sampled) for event in journals[0].events)
        return list(zip(journals, reasons, strict=True)) if begun else []

    def _read(self, attempt: str, number: int) -> Journal:
        """Return a stored journal: its turns, then the entries of its log."""
        assert self._store is not None
        journal = Journal(attempt, number, store=self._store)
        for name in self._store.trajectories(attempt):
            role = POLICY if name == attempt else name[len(attempt) + 1 :]
            if not role.startswith((RETRY, BROKEN)):
                journal.sampled(role, self._store.turns(trajectory_id(attempt, role)))
        journal.events += self._entered(attempt, "observation", "limit", "reward")
        return journal

    def _entered(self, name: str, *kinds: LogKind) -> Iterable[Entered]:
        """Yield the events that the log has of a rollout or attempt."""
        assert self._store is not None
        for _, entry in self._store.entries(stage_of(name), name=name, kinds=kinds):
            event = event_of(entry)
            if event is not None:
                yield event


class RecordedRole:
    """Recorded turns of one role, and those of its replies that were not given again yet. Implements
    `record.journal.RecordedTurns`."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        places = [segment.index if segment.place is None else segment.place for segment in segments]
        replies = list(_replies(segments))
        self.places = frozenset(places)
        self.inputs = [
            (None if segment.parent is None else places[segment.parent], tuple(segment.tokens), place)
            for segment, place in zip(segments, places, strict=True)
            if segment.sampling is None
        ]
        self.left = deque(replies)
        self._by_prompt = {(reply.prompt, reply.sampling.seed): places[reply.segment.index] for reply in replies}
        self.is_line = all(s.place is None and s.parent == (i - 1 if i else None) for i, s in enumerate(segments))
        """True if each segment follows the one before: such a conversation never had two requests at once."""

    def place_of(self, prompt: bytes, seed: int) -> int | None:
        return self._by_prompt.get((prompt, seed))


class Playback:
    """One play of a journal: what is recorded comes first, and what happens after it is appended.

    Implements `record.journal.SessionJournal`. A request is the recorded one if its prompt has the same ids and its
    sampling is the same; the seed tells requests with the same prompt apart. Each role's replies are given in the order
    in which they were recorded, so the record that is made from them is the same, with several requests at once too. A
    request that is not in the journal is answered by the engine, once every recorded reply was given.

    Args:
        journal: journal of the attempt.

    Attributes:
        again: whether anything is recorded.
        difference: what the rollout did otherwise than its journal; None if it did the same.
        answers: number of the world's answers to each role in this play.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = Journal("") if journal is None else journal
        self.again = self._journal.size > 0
        self._turns = {role: RecordedRole(segments) for role, segments in self._journal.segments().items()}
        self._answers = self._journal.answers()
        self._timed_out_at = self._journal.timed_out_at
        self._in_line = len(self._turns) < 2 and all(turns.is_line for turns in self._turns.values())
        self._progress: asyncio.Event | None = None  # of the requests that wait
        self._closed = False
        self.difference: str | None = None
        self.answers: Counter[str] = Counter()

    @property
    def attempt(self) -> str:
        """Id of the attempt."""
        return self._journal.attempt

    @property
    def num_left(self) -> int:
        """Number of recorded replies that were not given again yet."""
        return sum(len(turns.left) for turns in self._turns.values())

    @property
    def caught_up(self) -> bool:
        """True once all recorded replies were given: this play has every token of the journal."""
        return self.num_left == 0

    def close(self) -> None:
        """End the play. A request that outlives it is not appended."""
        self._closed = True

    def turns(self, role: str) -> RecordedRole:
        return self._turns.get(role) or RecordedRole(())

    async def reply(self, role: str, prompt: bytes, sampling: Sampling) -> RecordedReply | None:
        if self.num_left and not self._in_line:
            await asyncio.sleep(0)  # requests that were made at once are made at once again, before any is answered
        while self.num_left:
            self.check()
            left = self.turns(role).left
            if left and (left[0].prompt, left[0].sampling.seed) == (prompt, sampling.seed):
                return self._given(role, left, sampling)
            if self._in_line:
                self.differ(f"{role}: a request is not the recorded one, {_left(left)}")
            await self._wait(role, left)
        self.check()
        return None

    def sampled(self, role: str, segments: Sequence[Segment]) -> None:
        if not self._closed:
            self._journal.sampled(role, segments)

    def unwritten(self) -> list[LogEntry]:
        return self._journal.unwritten()

    def has_answer(self, role: str) -> bool:
        """Return whether the journal has the world's next answer to a role."""
        return self.answers[role] <= max(self._answers.get(role, {}), default=-1)

    def answered(self, role: str, observation: Observation, took_s: float = 0.0) -> float:
        """Append an answer of the world, or compare it with the recorded one.

        Args:
            role: role that was answered; "" for the opening.
            observation: the answer.
            took_s: seconds of the policy's own time that the answer took.

        Returns:
            The seconds that the recorded answer took; `took_s` if it is not recorded.

        Raises:
            NotRebuildable: the answer is not the recorded one.
        """
        number, recorded = self.answers[role], self._answers.get(role, {})
        answer = Answered(role=role, number=number, digest=observation_digest(observation), took_s=took_s)
        again = self.has_answer(role)
        self.answers[role] += 1
        if not again:
            if not self._closed:
                self._journal.answered(answer)
            return took_s
        before = recorded.get(number, answer)
        self.progress()
        if before.digest != answer.digest:
            place = f"answer {number + 1} to {role}" if role else "opening"
            self.differ(f"the world's {place} is not the recorded one")
        return before.took_s

    def timed_out(self, exceeded: bool, turn: int, seconds: float) -> bool:
        """Return whether the policy's own time is over: at the recorded answer, or if it is not recorded, when
        `exceeded`.

        Args:
            exceeded: whether the policy has taken longer than its limit.
            turn: number of replies that were requested.
            seconds: seconds that the policy has taken.
        """
        answers = self.answers.total()
        if self._timed_out_at is not None:
            return answers >= self._timed_out_at
        if exceeded:
            self._timed_out_at = answers
            self._journal.events.append(LimitHit(phase="policy", turn=turn, seconds=seconds, answers=answers))
        return exceeded

    def refuse(self, reason: str) -> None:
        """Raise NotRebuildable if there is anything to play again."""
        if self.again:
            self.differ(reason)

    def end(self) -> None:
        """Check that everything was played again.

        Raises:
            NotRebuildable: the attempt differs from its journal, or ended before it.
        """
        self.check()
        if not self.again:
            return
        if self.num_left:
            self.differ(f"the rollout ended with {self.num_left} recorded replies left")
        if any(self.answers[role] <= max(recorded) for role, recorded in self._answers.items()):
            self.differ("the rollout ended with recorded answers left")

    def differ(self, difference: str) -> None:
        """Remember what the rollout did otherwise than its journal, and end every request that waits.

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
        """Let waiting requests look again."""
        if self._progress is not None:
            self._progress.set()
            self._progress = None

    def _given(self, role: str, left: deque[RecordedReply], sampling: Sampling) -> RecordedReply:
        """Give the next reply of a role. How many tokens it may have hangs on what else was under way, so the journal
        decides it."""
        recorded = left[0].sampling
        if replace(sampling, max_tokens=recorded.max_tokens, min_tokens=recorded.min_tokens) != recorded:
            self.differ(f"{role}: a request has other settings of sampling than the recorded one, {_left(left)}")
        self.progress()
        return left.popleft()

    async def _wait(self, role: str, left: Sequence[RecordedReply]) -> None:
        """Wait for progress of other requests, or note that there is none."""
        try:
            self._progress = self._progress or asyncio.Event()
            await asyncio.wait_for(self._progress.wait(), PATIENCE_S)
        except TimeoutError:
            waited = f"nothing else went on for {PATIENCE_S:.0f} s"
            self.differ(f"{role}: a request is not in the record, {waited}, {_left(left)}")


def _left(replies: Sequence[RecordedReply]) -> str:
    return f"with {len(replies)} recorded replies left"


def _replies(segments: Sequence[Segment]) -> Iterable[RecordedReply]:
    """Yield the sampled segments with the digests of their prompts."""
    hashes: list[hashlib.blake2b] = []
    for segment in segments:
        parent = None if segment.parent is None else hashes[segment.parent]
        if segment.sampling is not None and parent is not None:
            yield RecordedReply(prompt=parent.digest(), segment=segment)
        ids = hashlib.blake2b(digest_size=DIGEST_BYTES) if parent is None else parent.copy()
        ids.update(array("q", segment.tokens).tobytes())
        hashes.append(ids)


def observation_digest(observation: Observation) -> int:
    """Return a digest of all that an observation says: 64 bits of xxh3."""
    try:
        data = _encoder.encode(observation)
    except (OverflowError, TypeError, ValueError):  # arguments of a call that are no plain data
        data = repr(observation).encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(data)
