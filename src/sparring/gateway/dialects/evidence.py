"""Evidence in the headers of agent programs: the agent that sends a request, its parent agent, and the request's
purpose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparring.gateway.dialects.dialect import ClientCall
from sparring.types import Evidence, Label

AGENTS = ("x-claude-code-agent-id", "thread-id", "x-session-id")
"""Headers with the id of an agent or of its thread, of claude-code, codex and opencode."""

PARENTS = ("x-claude-code-parent-agent-id", "x-codex-parent-thread-id", "x-parent-session-id")
"""Headers with the id of the parent agent, of the same programs."""

CLASS = "x-claude-code-request-class"
"""Header with the purpose of a claude-code request; the preset of claude-code switches it on."""

KINDS: Mapping[str, Label] = {
    "compaction": "compaction",
    "compact": "compaction",
    "auxiliary": "auxiliary",
    "side_reply": "auxiliary",
}
"""Labels by codex's request kind and claude-code's request class; other requests are turns of agents."""

READ = frozenset((*AGENTS, *PARENTS, CLASS, "x-codex-turn-metadata", "x-openai-subagent"))
"""Headers that are read as evidence."""

LONGEST_ID = 200


def evidence_of(call: ClientCall, noted: tuple[str, ...], handle: str = "") -> Evidence:
    """Return the evidence of a request.

    Args:
        noted: names of body fields that have no effect; their values are recorded.
        handle: id of the reply that the request continues; empty if the request names no reply.
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
    """Return the value of a field by its dotted name, or None for a header."""
    value: Any = body
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((headers[name][:LONGEST_ID] for name in names if headers.get(name)), "")


def _metadata(text: str) -> dict[str, Any]:
    try:
        metadata = json.loads(text) if text else {}
    except (ValueError, RecursionError):  # another program's header, or an attack
        return {}
    return metadata if isinstance(metadata, dict) else {}
