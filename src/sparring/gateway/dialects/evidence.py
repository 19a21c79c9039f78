"""Evidence that agent programs give of a request in its headers: which agent asks, whose child it is, and what for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparring.gateway.dialects.dialect import ClientCall
from sparring.types import Evidence, Label

AGENTS = ("x-claude-code-agent-id", "thread-id", "x-session-id")
"""Headers with the id of an agent or of its thread: claude-code's, codex's, opencode's."""

PARENTS = ("x-claude-code-parent-agent-id", "x-codex-parent-thread-id", "x-parent-session-id")
"""Headers with the id of the agent that started this one, of the same programs."""

CLASS = "x-claude-code-request-class"
"""Header by which claude-code says what a request is for, where its preset asks for hints."""

KINDS: Mapping[str, Label] = {
    "compaction": "compaction",
    "compact": "compaction",
    "auxiliary": "auxiliary",
    "side_reply": "auxiliary",
}
"""Labels, by the kind of request that codex names, and by claude-code's class; all others are agents' turns."""

READ = frozenset((*AGENTS, *PARENTS, CLASS, "x-codex-turn-metadata", "x-openai-subagent"))
"""Headers that are read as evidence."""

LONGEST_ID = 200


def evidence_of(call: ClientCall, noted: tuple[str, ...], handle: str = "") -> Evidence:
    """Return the evidence of a request.

    Args:
        call: with its headers.
        noted: fields of its body that have no effect; what it wants by them is recorded.
        handle: id of the reply that the request continues, where it names one.
    """
    headers = call.headers
    metadata = _metadata(headers.get("x-codex-turn-metadata", ""))
    kind = metadata.get("request_kind")
    named = (kind if isinstance(kind, str) else "", headers.get("x-openai-subagent", ""), headers.get(CLASS, ""))
    return Evidence(
        agent=_first(headers, AGENTS),
        parent=_first(headers, PARENTS),
        label=next((KINDS[word] for word in named if word in KINDS), None),
        handle=handle,
        wishes={name: wish for name in noted if (wish := _wish(call.body, name)) is not None},
    )


def _wish(body: Mapping[str, Any], name: str) -> Any:
    """Return what a field of a request has, by its name behind those of what it stands in; None for a header."""
    value: Any = body
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the first of these headers that is there; empty where none is."""
    return next((headers[name][:LONGEST_ID] for name in names if headers.get(name)), "")


def _metadata(text: str) -> dict[str, Any]:
    try:
        metadata = json.loads(text) if text else {}
    except (ValueError, RecursionError):  # of another program, or of one that would break this one
        return {}
    return metadata if isinstance(metadata, dict) else {}
