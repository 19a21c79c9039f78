"""The durable log of attempts: what a process that goes on after this one rebuilds unfinished rollouts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparring.envs.roles import BROKEN, RETRY
from sparring.log import LogEntry
from sparring.protocols import Store
from sparring.record.recorder import trajectory_id
from sparring.rollout.rebuild import AttemptRecord
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

    Entries, by kind: `observation`, under the attempt's id, holds role, number among the role's answers, and digest of
    an answer of the world; `restarted`, under the rollout's id, holds the id and the number of the attempt that begins
    from nothing, and the reason.

    Args:
        store: holds log and turns.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def observation(self, attempt: str, role: str, number: int, digest: int) -> LogEntry:
        """Return the entry about an answer of the world. It is written with the next turn."""
        data = {"role": role, "number": number, "digest": digest}
        return LogEntry(stage=_stage(attempt), kind="observation", name=attempt, data=data)

    def start_over(self, rollout: str, attempt: str, number: int, reason: str) -> None:
        """Record that a rollout starts over as another attempt, as an entry of the log and as an event of the run.

        Raises:
            StoreError: it cannot be written.
        """
        data = {"id": attempt, "number": number, "reason": reason}
        self._store.record(LogEntry(stage=_stage(rollout), kind="restarted", name=rollout, data=data))
        self._store.event(_stage(rollout), f"{rollout} starts over as {attempt}: {reason}")

    def unfinished(self, rollout: str) -> UnfinishedRollout | None:
        """Return what is recorded of a rollout; None where nothing is.

        Raises:
            StoreError: the file cannot be read or is damaged.
        """
        begun = [(rollout, 0, "")]
        for _, entry in self._store.entries(_stage(rollout), name=rollout, kinds=("restarted",)):
            if "id" in entry.data:
                begun.append((entry.data["id"], entry.data["number"], entry.data["reason"]))
        *ended, (attempt, number, _) = [(name, number, self._segments(name)) for name, number, _ in begun]
        segments = self._segments(attempt)
        if not segments and not ended:
            return None
        return UnfinishedRollout(
            id=attempt,
            number=number,
            record=AttemptRecord(segments=segments, observations=self._observations(attempt)),
            ended=tuple(
                EndedAttempt(id=name, number=number, reason=reason, segments=segments)
                for (name, number, segments), (_, _, reason) in zip(ended, begun[1:], strict=True)
            ),
        )

    def _segments(self, attempt: str) -> dict[str, tuple[Segment, ...]]:
        """Return the recorded segments of an attempt by role."""
        roles = [POLICY if name == attempt else name[len(attempt) + 1 :] for name in self._store.trajectories(attempt)]
        own = [role for role in roles if not role.startswith((RETRY, BROKEN))]
        return {role: tuple(self._store.turns(trajectory_id(attempt, role))) for role in own}

    def _observations(self, attempt: str) -> dict[str, tuple[int | None, ...]]:
        """Return the digests of the world's recorded answers by role; None for one that is not recorded."""
        answers: dict[str, dict[int, int]] = {}
        for _, entry in self._store.entries(_stage(attempt), name=attempt, kinds=("observation",)):
            answers.setdefault(entry.data["role"], {})[entry.data["number"]] = entry.data["digest"]
        return {
            role: tuple(digests.get(number) for number in range(max(digests) + 1)) for role, digests in answers.items()
        }


def _stage(rollout: str) -> str:
    """Return the stage of a rollout or an attempt: what its id begins with."""
    return rollout.partition("/")[0]
