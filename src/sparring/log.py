"""Entries of a run's durable log: events other than turns and groups, in the order in which they happened.

Resume and replay read them; turns and groups have tables of their own in the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

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


def step_name(stage: str, step: int) -> str:
    """Return the name of entries about a step of a stage."""
    return f"{stage}@{step}"
