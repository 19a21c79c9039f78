"""The run's durable log: events of rollouts, and entries about groups and steps, in the order in which they happened.

The events of one rollout are its journal (`rollout/journal.py`). The store keeps `Asked` and `Sampled` in its table of
turns, and all other events as entries of its log. Resume, retry, rebuild and replay read them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, get_args

from sparring.types import Segment

LogKind = Literal[
    "admitted",  # a group began: its task's digest, its version, the number of groups its source had observed
    "observation",  # a world answered: the digest of its answer, which a rebuilt rollout must get again
    "limit",  # the time limit of a phase was hit
    "reward",  # an external reward arrived for a rollout
    "program",  # the program of a harness ended: its exit status, its seconds, the end of its output
    "restarted",  # a rollout started over: its earlier turns and entries no longer count
    "outcome",  # a rollout ended: its outcome and the world's score
    "score",  # a second pass scored a group
    "trained",  # a step trained these groups, in this order
    "published",  # a step published weights: their checksum
]
"""Kinds of entries. `LogEntry.name` has the id that an entry is about."""

Report = Callable[[str, Mapping[str, Any]], None]
"""Function that receives an event from a part of the run, in any thread: a sentence and its facts. Possible facts are
`kind` (such as "engine lost"), the numbers `engine` and `rank`, `moved` (number of requests that go on elsewhere),
`at_step` (version of the weights), and the texts `node` and `reason`."""

KINDS: frozenset[str] = frozenset(get_args(LogKind))


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEntry:
    """Entry in the log of one stage.

    Attributes:
        name: id that it is about: a group (`rl/12`), a rollout or attempt (`rl/12/3`, `rl/12/3/retry-1`), or a step
            (`rl@7`, see `step_name`).
        data: plain data, documented at its writer.

    Raises:
        ValueError: the kind is not declared.
    """

    stage: str
    kind: LogKind
    name: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"log entry {self.name}: expected a kind of sparring/log.py, got {self.kind!r}")


@dataclass(frozen=True, slots=True)
class Asked:
    """A role's prompt grew by ids that no model sampled."""

    role: str
    segment: Segment


@dataclass(frozen=True, slots=True)
class Sampled:
    """A model replied in a role."""

    role: str
    segment: Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """The world answered.

    Attributes:
        role: role that was answered; "" for the opening.
        number: number of answers that the role got before.
        digest: digest of the answer, which a rebuilt rollout must get again.
        took_s: seconds of the policy's own time that the answer took.
    """

    kind: ClassVar[LogKind] = "observation"
    role: str
    number: int
    digest: int
    took_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitHit:
    """A limit of time struck.

    Attributes:
        phase: phase of the attempt that took too long; `policy` for the time of the policy's own commands.
        turn: number of replies that had been requested.
        seconds: the limit; for phase `policy`, the seconds that were taken.
        detail: what the phase waited for.
        answers: number of earlier answers of the world; given only for phase `policy`.
    """

    kind: ClassVar[LogKind] = "limit"
    phase: str
    turn: int
    seconds: float
    detail: str = ""
    answers: int | None = None


@dataclass(frozen=True, slots=True)
class Rewarded:
    """A reward arrived from outside; `reward` is a `record.rewards.OutsideReward` as plain data."""

    kind: ClassVar[LogKind] = "reward"
    reward: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedOver:
    """An attempt ended, and its rollout started over with an empty journal.

    Attributes:
        id: id of the next attempt.
        number: number of the next attempt.
    """

    kind: ClassVar[LogKind] = "restarted"
    id: str
    number: int
    reason: str


Event = Asked | Sampled | Answered | LimitHit | Rewarded | StartedOver
Entered = Answered | LimitHit | Rewarded | StartedOver
"""Events that the store keeps as entries of its log."""


def entry_of(event: Entered, name: str) -> LogEntry:
    """Return the log entry for an event; `name` is the id of its rollout or attempt."""
    data = dict(event.reward) if isinstance(event, Rewarded) else asdict(event)
    return LogEntry(stage=stage_of(name), kind=event.kind, name=name, data=data)


def event_of(entry: LogEntry) -> Entered | None:
    """Return the event that an entry of the log keeps; None if the entry is no event of a journal."""
    match entry.kind:
        case "observation":
            return Answered(**entry.data)
        case "limit":
            return LimitHit(**entry.data)
        case "reward":
            return Rewarded(entry.data)
        case "restarted" if "id" in entry.data:  # else no attempt follows: all that was recorded is dropped
            return StartedOver(**entry.data)
    return None


def stage_of(name: str) -> str:
    """Return the stage of a rollout or an attempt, which is the first part of its id."""
    return name.partition("/")[0]


def step_name(stage: str, step: int) -> str:
    """Return the name of entries about a step of a stage."""
    return f"{stage}@{step}"


def log_event(text: str, facts: Mapping[str, Any]) -> None:
    """Write an event to Python's log, for parts outside of a run."""
    logging.getLogger("sparring").warning("%s", text)
