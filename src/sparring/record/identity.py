"""Identity of messages: a message that a client serialises in another form is the same message, not an edit."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sparring.types import Message, ToolCall, ToolSpec

# made once: `json.dumps` with any option makes an encoder for every call
_plain = json.JSONEncoder(default=dict)
_sorted = json.JSONEncoder(default=dict, sort_keys=True)


def message_key(message: Message) -> str:
    """Return a key that is equal for messages that differ only in form.

    Form is: None or empty, order and spacing of JSON arguments, blanks around a reply, and names and ids that only link
    a tool's answer to its call (order links them as well).
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
    return [call.name, "called", _sorted.encode(call.arguments)]
