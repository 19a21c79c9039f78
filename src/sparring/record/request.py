"""Requests for a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparring.generation import Constraint
from sparring.reply import Evidence, Show
from sparring.types import Message, ToolSpec


class Rank(NamedTuple):
    """Rank of a session's requests at the engine."""

    priority: int
    admission: int


class ReplyRequest(NamedTuple):
    """Request for a reply: the arguments of `RecordedSession.reply`."""

    messages: Sequence[Message]
    tools: Sequence[ToolSpec]
    constraint: Constraint | None
    max_tokens: int | None
    stop: Sequence[str]
    evidence: Evidence
    show: Show | None


def joined_stop(of_run: tuple[str, ...], of_client: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings of a run and, behind them, those that only a client has, each once."""
    if not of_client:
        return of_run
    return of_run + tuple(dict.fromkeys(string for string in of_client if string not in of_run))
