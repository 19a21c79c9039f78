"""Identity of messages: a message that a client serialises in another form is the same message, not an edit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.types import Message, ToolCall, ToolSpec

EXACT = 1 << 53
"""Integers up to this are doubles."""

# made once: `json.dumps` with any option makes an encoder for every call
_plain = json.JSONEncoder(default=dict)
_sorted = json.JSONEncoder(default=dict, sort_keys=True)


def message_key(message: Message) -> str:
    """Return a key that is equal for messages that differ only in form.

    Form is: None or empty, order and spacing of JSON arguments, how a number is written (10000 and 10000.0 are one
    double), blanks around a reply, and names and ids that only link a tool's answer to its call (order links them as
    well).
    """
    own = message.role == "assistant"
    return json.dumps(
        [
            message.role,
            message.content.strip() if own else message.content,
            (message.reasoning or "").strip(),
            [_call_key(call) for call in message.tool_calls],
            None if message.role == "tool" else message.name,
        ],
        ensure_ascii=True,
    )


def tools_key(tools: Sequence[ToolSpec]) -> str:
    """Return a key that is equal for equal tool lists.

    The prompt prints the tools, so other tools are another conversation.
    """
    return _plain.encode([[t.name, t.description, t.parameters] for t in tools])


def _call_key(call: ToolCall) -> list[str]:
    if call.arguments is None:
        return [call.name, "malformed", call.raw]
    return [call.name, "called", _sorted.encode(_as_doubles(call.arguments))]


def _as_doubles(value: Any) -> Any:
    """Return plain data with every number as the double that a client in JavaScript makes of it, whole ones as
    integers."""
    if isinstance(value, Mapping):
        return {key: _as_doubles(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_doubles(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, int) and abs(value) <= EXACT:
        return value
    try:
        double = float(value)
    except OverflowError:
        return value
    return int(double) if math.isfinite(double) and double.is_integer() else double
