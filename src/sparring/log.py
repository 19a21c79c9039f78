"""Entries of the durable log of a run: what happened beside turns and groups, in the order in which it happened.

A resume and a replay read them; the turns and the groups themselves have tables of their own in the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

LogKind = Literal[
    "admitted",  # a group began: its task's digest, its version, how many groups its source had been shown
    "observation",  # a world answered: the digest of its answer (a rollout that is rebuilt must get the same)
    "limit",  # a time limit of a phase struck
    "reward",  # a rollout was given a reward from outside, as it came
    "program",  # the program of a harness ended: its exit status, its seconds, the end of its output
    "restarted",  # a rollout began again from nothing: its turns and entries before this no longer count
    "outcome",  # a rollout is over: its outcome and the world's score
    "score",  # a second pass gave its scores
    "trained",  # a step took these groups, in this order
    "published",  # the weights of a step: their checksum
]
"""Declared kinds of entries; `name` of `LogEntry` says which id stands with each."""

KINDS: frozenset[str] = frozenset(get_args(LogKind))


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEntry:
    """Entry of the log of one stage.

    Attributes:
        stage: of the run.
        kind: one of `LogKind`.
        name: the id that it is about: a group (`rl/12`), a rollout or an attempt (`rl/12/3`, `rl/12/3/retry-1`), or a
            step (`rl@7`, see `step_name`).
        data: plain data; what it holds is documented where it is written.

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
    """Return the name of entries about one step of a stage."""
    return f"{stage}@{step}"
