"""Conversations that are hard to render, for tests of renderers."""

from __future__ import annotations

from dataclasses import replace

from sparring.types import Message, ToolCall, ToolSpec

TOOL = ToolSpec(
    name="python",
    description='Runs "code" & <prints>.',
    parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)
TAG = "<tool_call>"
"""Special token of a chat format that these conversations contain as text."""

ODD = 'quote " backslash \\ newline\nüñí 数 🙂 <tool_call> {"a": 1} </p>'


def user(content: str) -> Message:
    """Return a user's message."""
    return Message(role="user", content=content)


def call(code: str, content: str = "", reasoning: str | None = None) -> Message:
    """Return a reply that calls the tool."""
    calls = (ToolCall(id="call_0", name="python", arguments={"code": code}),)
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)


def answer(content: str) -> Message:
    """Return a tool's answer."""
    return Message(role="tool", content=content, tool_call_id="call_0", name="python")


def say(content: str, reasoning: str | None = None) -> Message:
    """Return a reply in words."""
    return Message(role="assistant", content=content, reasoning=reasoning)


def without_tags(message: Message) -> Message:
    """Return a message of these conversations without special tokens in its text and its calls."""
    calls = tuple(
        replace(call, arguments={key: str(text).replace(TAG, "<call>") for key, text in (call.arguments or {}).items()})
        for call in message.tool_calls
    )
    return replace(message, content=message.content.replace(TAG, "<call>"), tool_calls=calls)


SYSTEM = Message(role="system", content="Be brief.")
CONVERSATIONS = (
    (user("Hi"),),
    (SYSTEM, user(ODD)),
    (user("Hi"), say("Hello."), user("Again")),
    (user("Hi"), call(ODD), answer(ODD)),
    (SYSTEM, user("Hi"), call("1", content="Let me see."), answer("1"), answer("2"), say("It is 1.")),
    (user("Hi"), call("1", reasoning="Hm."), answer("1"), say("It is 1.", reasoning="So."), user("Sure?")),
    (user("Hi"), say("A", reasoning="One\n\ntwo"), user("B"), say("C", reasoning="Three")),
    (user("Hi"), say("")),
)
