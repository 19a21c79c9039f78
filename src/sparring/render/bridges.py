"""Turns after which `Renderer.bridge` cannot append messages: the next prompt is then a new branch, rendered whole."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.errors import BadInput
from sparring.protocols import Renderer
from sparring.render.demonstrate import reply_tokens
from sparring.types import Message, ToolCall, ToolSpec

QUESTION = "a user's message"
ANSWER = "a tool's answer"


def without_bridge(renderer: Renderer, tools: Sequence[ToolSpec]) -> list[str]:
    """Return descriptions of the kinds of turn after which the renderer has no bridge. A bridge is tried after every
    kind of reply that the format can write.

    Args:
        tools: tools that a reply may call; without any, bridges over a tool's answer are not tried.
    """
    prompt = renderer.render([Message(role="user", content="Who?")], tools).tokens
    missing = []
    for name, reply, new in _turns(tools):
        try:
            sampled = reply_tokens(renderer, reply, tools)
        except BadInput:  # the format cannot write this reply
            continue
        if renderer.bridge(prompt, sampled, new, tools) is None and name not in missing:
            missing.append(name)
    return missing


def said_of(missing: Sequence[str]) -> str:
    """Describe the turns without a bridge in one sentence: the effect on a conversation, and the setting that avoids
    it."""
    return (
        f"no bridge over {', '.join(missing)}: a conversation begins anew there, rendered whole, and its samples say "
        "fork = 'template'; render.thoughts = 'kept', or a renderer that knows this model, may keep it one"
    )


def _turns(tools: Sequence[ToolSpec]) -> list[tuple[str, Message, list[Message]]]:
    """Return pairs of a reply and the messages that follow it, each with a name."""
    user = Message(role="user", content="Are you sure?")
    turns = [
        (f"{QUESTION}{suffix}", Message(role="assistant", content="It is 42.", reasoning=thought), [user])
        for suffix, thought in (("", None), (" behind a thought", "Well."))
    ]
    for tool in tools[:1]:
        call = ToolCall(id="call_0", name=tool.name, arguments={"code": "1"})
        answer = Message(role="tool", content="42", tool_call_id=call.id, name=call.name)
        for suffix, thought in (("", None), (" behind a thought", "Well.")):
            reply = Message(role="assistant", tool_calls=(call,), reasoning=thought)
            turns += [(f"{ANSWER}{suffix}", reply, [answer]), (f"{QUESTION} beside {ANSWER}", reply, [answer, user])]
    return turns
