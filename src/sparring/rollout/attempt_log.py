"""The durable log of attempts: what a process that goes on after this one rebuilds unfinished rollouts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sparring.envs.roles import BROKEN, RETRY
from sparring.log import LogEntry
from sparring.protocols import Store
from sparring.record.order import settled
from sparring.record.session import trajectory_id
from sparring.rollout.phases import Recorded, unrecorded
from sparring.rollout.rebuild import AttemptRecord, RecordedAnswer
from sparring.types import POLICY, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedAttempt:
    """An attempt whose rollout started over: its id, its number, the reason, and its segments by role."""

    id: str
    number: int
    reason: str
    segments: Mapping[str, tuple[Segment, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedRollout:
    """Record of a rollout that an earlier process did not finish.

    Attributes:
        id: of the attempt that was under way.
        number: of that attempt.
        record: of it.
        ended: attempts before it that hold tokens.
    """

    id: str
    number: int
    record: AttemptRecord
    ended: tuple[EndedAttempt, ...] = ()


class AttemptLog:
    """Log of attempts, beside their turns.

    Entries, by kind: `observation`, under the attempt's id, holds role, number among the role's answers, digest and
    policy's seconds of an answer of the world; `reward`, under the attempt's id, a reward from outside; `limit`, under
    the attempt's id, the number of answers after which a limit of time struck; `restarted`, under the rollout's id,
    holds the id and the number of the attempt that begins from nothing, and the reason.

    Args:
        store: holds log and turns; None: nothing is recorded, and no rollout goes on in another process.
        recorded: takes note of events of attempts too.
        begins: whether the rollouts are new ones until `expect` names others; else each is looked for in the store.
    """

    def __init__(self, store: Store | None = None, recorded: Recorded = unrecorded, *, begins: bool = False) -> None:
        self._store = store
        self._recorded = recorded
        self._begins = begins
        self._expected: set[str] = set()

    @property
    def durable(self) -> bool:
        """True where unfinished rollouts can go on in another process."""
        return self._store is not None

    def entries_of(self, attempt: str) -> Callable[[str, int, RecordedAnswer], LogEntry] | None:
        """Return the maker of entries about the answers of the world in an attempt; None where none are recorded."""
        return None if self._store is None else partial(self.observation, attempt)

    def observation(self, attempt: str, role: str, number: int, answer: RecordedAnswer) -> LogEntry:
        """Return the entry about an answer of the world. It is written with the next turn."""
        data = {"role": role, "number": number, "digest": answer.digest, "took_s": answer.took_s}
        return LogEntry(stage=_stage(attempt), kind="observation", name=attempt, data=data)

    def note(self, kind: str, attempt: str, data: Mapping[str, Any]) -> None:
        """Take note of an event of an attempt. A limit of time that struck and a program that ended are
        recorded.

        Raises:
            StoreError: it cannot be written.
        """
        self._recorded(kind, attempt, data)
        if (kind == "limit" or kind == "program") and self._store is not None:
            self._store.record(LogEntry(stage=_stage(attempt), kind=kind, name=attempt, data=data))

    def reward(self, attempt: str, data: Mapping[str, Any]) -> None:
        """Record a reward from outside.

        Raises:
            StoreError: it cannot be written.
        """
        if self._store is not None:
            self._store.record(LogEntry(stage=_stage(attempt), kind="reward", name=attempt, data=data))

    def rewards(self, attempt: str) -> list[Mapping[str, Any]]:
        """Return the recorded rewards of an attempt from outside, in order.

        Raises:
            StoreError: the file cannot be read or is damaged.
        """
        if self._store is None:
            return []
        return [entry.data for _, entry in self._store.entries(_stage(attempt), name=attempt, kinds=("reward",))]

    def start_over(self, rollout: str, attempt: str, number: int, reason: str) -> None:
        """Record that a rollout starts over as another attempt.

        Raises:
            StoreError: it cannot be written.
        """
        if self._store is None:
            return
        data = {"id": attempt, "number": number, "reason": reason}
        self._store.record(LogEntry(stage=_stage(rollout), kind="restarted", name=rollout, data=data))

    def expect(self, rollout: str) -> None:
        """Take note that a rollout may have begun in an earlier process."""
        self._expected.add(rollout)

    def unfinished(self, rollout: str) -> UnfinishedRollout | None:
        """Return what is recorded of a rollout; None where nothing is, or where it begins now.

        Raises:
            StoreError: the file cannot be read or is damaged.
        """
        store = self._store
        if store is None or self._begins and rollout not in self._expected:
            return None
        self._expected.discard(rollout)
        begun = [(rollout, 0, "")]
        for _, entry in store.entries(_stage(rollout), name=rollout, kinds=("restarted",)):
            if "id" in entry.data:
                begun.append((entry.data["id"], entry.data["number"], entry.data["reason"]))
        *ended, (attempt, number, _) = [(name, number, _segments(store, name)) for name, number, _ in begun]
        segments = _segments(store, attempt)
        if not segments and not ended:
            return None
        return UnfinishedRollout(
            id=attempt,
            number=number,
            record=AttemptRecord(
                segments=segments,
                observations=_observations(store, attempt),
                timed_out_at=_timed_out_at(store, attempt),
            ),
            ended=tuple(
                EndedAttempt(id=name, number=number, reason=reason, segments=segments)
                for (name, number, segments), (_, _, reason) in zip(ended, begun[1:], strict=True)
            ),
        )


def _segments(store: Store, attempt: str) -> dict[str, tuple[Segment, ...]]:
    """Return the recorded segments of an attempt by role."""
    roles = [POLICY if name == attempt else name[len(attempt) + 1 :] for name in store.trajectories(attempt)]
    own = [role for role in roles if not role.startswith((RETRY, BROKEN))]
    return {role: settled(store.turns(trajectory_id(attempt, role))) for role in own}


def _observations(store: Store, attempt: str) -> dict[str, tuple[RecordedAnswer | None, ...]]:
    """Return the world's recorded answers by role; None for one that is not recorded."""
    answers: dict[str, dict[int, RecordedAnswer]] = {}
    for _, entry in store.entries(_stage(attempt), name=attempt, kinds=("observation",)):
        answer = RecordedAnswer(digest=entry.data["digest"], took_s=entry.data["took_s"])
        answers.setdefault(entry.data["role"], {})[entry.data["number"]] = answer
    return {role: tuple(by_number.get(n) for n in range(max(by_number) + 1)) for role, by_number in answers.items()}


def _timed_out_at(store: Store, attempt: str) -> int | None:
    """Return the number of answers after which the policy's time was over; None where it was not."""
    for _, entry in store.entries(_stage(attempt), name=attempt, kinds=("limit",)):
        if entry.data["phase"] == "policy":
            return int(entry.data["answers"])
    return None


def _stage(rollout: str) -> str:
    """Return the stage of a rollout or an attempt: what its id begins with."""
    return rollout.partition("/")[0]
