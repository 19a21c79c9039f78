"""Places without a bridge: what is told there begins a conversation anew."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.errors import BadInput
from sparring.protocols import Renderer
from sparring.render.demonstrate import reply_tokens
from sparring.types import Message, ToolCall, ToolSpec

QUESTION = "a user's message"
ANSWER = "a tool's answer"


def without_bridge(renderer: Renderer, tools: Sequence[ToolSpec]) -> list[str]:
    """Return what may follow a reply and has no bridge, in words; a bridge is tried behind each kind of reply that the
    format can write.

    Args:
        renderer: messages <-> ids.
        tools: that may be called; without any, no answers are tried.
    """
    prompt = renderer.render([Message(role="user", content="Who?")], tools).tokens
    missing = []
    for name, reply, new in _turns(tools):
        try:
            sampled = reply_tokens(renderer, reply, tools)
        except BadInput:  # no thought, or none but a thought, or no second call
            continue
        if renderer.bridge(prompt, sampled, new, tools) is None and name not in missing:
            missing.append(name)
    return missing


def said_of(missing: Sequence[str]) -> str:
    """Return what is to be known of places without a bridge, which are some: what happens there, and what to do."""
    return (
        f"no bridge over {', '.join(missing)}: a conversation begins anew there, rendered whole, and its samples say "
        "fork = 'template'; render.thoughts = 'kept', or a renderer that knows this model, may keep it one"
    )


def _turns(tools: Sequence[ToolSpec]) -> list[tuple[str, Message, list[Message]]]:
    """Return what follows which reply, with its name."""
    user = Message(role="user", content="Are you sure?")
    turns = [
        (f"{QUESTION}{behind}", Message(role="assistant", content="It is 42.", reasoning=thought), [user])
        for behind, thought in (("", None), (" behind a thought", "Well."))
    ]
    for tool in tools[:1]:
        call = ToolCall(id="call_0", name=tool.name, arguments={"code": "1"})
        answer = Message(role="tool", content="42", tool_call_id=call.id, name=call.name)
        for behind, thought in (("", None), (" behind a thought", "Well.")):
            reply = Message(role="assistant", tool_calls=(call,), reasoning=thought)
            turns += [(f"{ANSWER}{behind}", reply, [answer]), (f"{QUESTION} beside {ANSWER}", reply, [answer, user])]
    return turns
