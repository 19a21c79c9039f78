"""Rebuilding: a half-done rollout is brought back by running its harness again on a fresh world, while its sessions
answer from their record.

Nothing is sampled a second time. The world runs again, so each of its answers is compared with the recorded one; where
one differs, or a request of the harness does, the rollout starts over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from sparring.errors import PolicyFailure
from sparring.log import LogEntry
from sparring.record.replies import RecordedReplies
from sparring.rollout.blame import Place, WorldCalls
from sparring.types import Message, Observation, Segment, Trajectory

_encoder = msgspec.msgpack.Encoder(order="deterministic", enc_hook=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedAnswer:
    """Recorded answer of a world: the digest of what it said, and the seconds of the policy's own time that
    it took."""

    digest: int
    took_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """Record of an attempt: what the models said in it, and what the world answered.

    Attributes:
        segments: the recorded segments of each role that spoke.
        observations: the world's answers to each role, in order; its opening under "". None stands for an answer that
            is not recorded.
        timed_out_at: number of answers after which the policy's own time was over; None where it was not.
    """

    segments: Mapping[str, Sequence[Segment]] = field(default_factory=dict)
    observations: Mapping[str, Sequence[RecordedAnswer | None]] = field(default_factory=dict)
    timed_out_at: int | None = None

    @property
    def size(self) -> int:
        """Replies of models and answers of the world."""
        sampled = sum(segment.model is not None for segments in self.segments.values() for segment in segments)
        return sampled + sum(map(len, self.observations.values()))


class Watch:
    """Watch over the world of one attempt: what it answers, whether that is what the record says, and which of its
    calls breaks.

    Args:
        record: of the attempt that is rebuilt; None for one that begins from nothing.
        calls: of this rollout's attempts.
        entry: makes the entry of the log about an answer of the world, of role and number; None: no log.

    Attributes:
        replies: the recorded replies that are given again.
        observations: this attempt's answers of the world, as in `AttemptRecord`.
        broken: the call of the world that raised last, where the record has no answer to it; None where none did.
    """

    def __init__(
        self,
        record: AttemptRecord | None = None,
        calls: WorldCalls | None = None,
        entry: Callable[[str, int, RecordedAnswer], LogEntry] | None = None,
    ) -> None:
        self._record = record or AttemptRecord()
        self._rebuilds = record is not None
        self._calls = calls
        self._entry = entry
        self.replies = RecordedReplies(self._record.segments)
        self.observations: dict[str, list[RecordedAnswer]] = {}
        self._timed_out_at: int | None = None
        self.broken: Place | None = None

    @property
    def rebuilt(self) -> bool:
        """True once all recorded replies were given, so that this attempt has every token of the record."""
        return self.replies.num_left == 0

    @property
    def complete(self) -> bool:
        """True once everything that is recorded has come again."""
        return self.rebuilt and all(
            len(self.observations.get(role, ())) >= len(recorded)
            for role, recorded in self._record.observations.items()
        )

    def call(self, phase: str, role: str = "", reply: Message | None = None) -> WatchedCall:
        """Watch one call of the world, which is the body of `with`.

        Args:
            phase: `open`, `step` or `score`.
            role: who replied.
            reply: what the call is about.
        """
        tools = tuple(sorted({call.name for call in reply.tool_calls})) if reply and reply.tool_calls else ()
        return WatchedCall(self, Place(call=(phase, role, *tools), number=len(self.observations.get(role, ()))))

    def ended(self, place: Place, error: BaseException | None) -> None:
        """Take note of how a call of the world ended."""
        if error is None:
            if self._calls is not None:
                self._calls.succeeded(place)
        elif isinstance(error, Exception) and not isinstance(error, PolicyFailure):
            phase, role, *_ = place.call
            answered = phase != "score" and place.number < len(self._record.observations.get(role, ()))
            self.broken = None if answered else place

    def observe(self, role: str, observation: Observation, took_s: float = 0.0) -> float:
        """Compare an answer of the world with the recorded one.

        Args:
            role: whose reply was answered; "" for the opening.
            observation: the world's answer.
            took_s: seconds of the policy's own time that it took.

        Returns:
            The seconds that it took when it was recorded; `took_s` where it was not.

        Raises:
            NotRebuildable: it is another one.
        """
        answer = RecordedAnswer(digest=observation_digest(observation), took_s=took_s)
        observations = self.observations.setdefault(role, [])
        recorded, number = self._record.observations.get(role, ()), len(observations)
        if number >= len(recorded):
            observations.append(answer)
            if self._entry is not None:
                self.replies.entries.append(self._entry(role, number, answer))
            return took_s
        before = recorded[number] or answer
        observations.append(before)
        self.replies.progress()
        if before.digest != answer.digest:
            place = f"answer {number + 1} to {role}" if role else "opening"
            self.replies.differ(f"the world's {place} is not the recorded one")
        return before.took_s

    @property
    def num_answers(self) -> int:
        """Answers of the world so far, its opening included."""
        return sum(map(len, self.observations.values()))

    def timed_out(self, exceeded: bool) -> bool:
        """Return whether the policy's own time is over: where it was when this was recorded, else where `exceeded`
        says so."""
        recorded = self._record.timed_out_at
        over = exceeded if recorded is None else self.num_answers >= recorded
        if over and self._timed_out_at is None:
            self._timed_out_at = self.num_answers
        return over

    def refuse(self, reason: str) -> None:
        """Raise NotRebuildable if the attempt is rebuilt."""
        if self._rebuilds:
            self.replies.differ(reason)

    def check(self) -> None:
        """Raise NotRebuildable if the attempt did something else than its record, or ended before it."""
        self.replies.check()
        if self._rebuilds and not self.complete:
            left = (
                f"{self.replies.num_left} recorded replies left" if self.replies.num_left else "recorded answers left"
            )
            self.replies.differ(f"the rollout ended with {left}")

    def record(self, trajectories: Sequence[Trajectory]) -> AttemptRecord | None:
        """Return the record of this attempt; None where replies have no tokens, so that none could be given again."""
        segments = {trajectory.role: trajectory.segments for trajectory in trajectories if trajectory.segments}
        if not all(any(segment.model is not None for segment in conversation) for conversation in segments.values()):
            return None
        observations: dict[str, Sequence[RecordedAnswer | None]] = {**self._record.observations}
        for role, observed in self.observations.items():
            if len(observed) >= len(observations.get(role, ())):
                observations[role] = tuple(observed)
        timed_out_at = self._record.timed_out_at if self._timed_out_at is None else self._timed_out_at
        return AttemptRecord(segments=segments, observations=observations, timed_out_at=timed_out_at)


class WatchedCall:
    """Call of the world, whose end is noted."""

    __slots__ = ("_place", "_watch")

    def __init__(self, watch: Watch, place: Place) -> None:
        self._watch, self._place = watch, place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        self._watch.ended(self._place, cause)


def observation_digest(observation: Observation) -> int:
    """Return a digest of all that an observation says: 64 bits of xxh3."""
    try:
        data = _encoder.encode(observation)
    except (OverflowError, TypeError, ValueError):  # arguments of a call that are no plain data
        data = repr(observation).encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(data)
