"""Round trips through a renderer at start: proof that template, tool calls and bridging work for this checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from sparring.errors import BadInput, refusal
from sparring.protocols import Renderer
from sparring.render.bridges import ANSWER, QUESTION, said_of, without_bridge
from sparring.render.demonstrate import demonstration_tokens, reply_tokens
from sparring.render.unforgeable import unforgeable
from sparring.types import Message, ToolCall, ToolSpec

_TRICKY = 'Say "no"\n\tor {"x": [1, 2]} \\ <tool_call> 数 é 🙂 it\'s  two   spaces'
_ARGUMENTS = {
    "code": 'print("a\\n", \'b\')\nif 1 < 2 and 3 > 2:\n    print("数 é 🙂 \\\\ {x} </p>")',
    "number": -1.5,
    "nested": {"list": [1, None, True], "empty": ""},
}
_CLOSING = 3  # ids that may close a cut reply: the end of a thought, the end of the turn
_ANSWER = Message(role="assistant", content="It is 42.")


def check_round_trip(
    renderer: Renderer, tools: Sequence[ToolSpec] = (), control_tokens: Sequence[str] = ()
) -> list[str]:
    """Round-trip texts, tool calls and bridges through a renderer, and try to forge turns.

    Args:
        renderer: the one a run will use.
        tools: the tools a run will offer; without any, tool calls are not tried.
        control_tokens: roles that may write control tokens before the first reply.

    Returns:
        What was found true, one sentence each.

    Raises:
        BadInput: something does not round-trip, or text of a message becomes a control token; the message shows it.
    """
    facts = [_turn_ends(renderer), _texts(renderer, tools), unforgeable(renderer, tools, control_tokens)]
    reply = _ANSWER
    if tools:
        call = ToolCall(id="call_0", name=tools[0].name, arguments=_ARGUMENTS)
        reply = Message(role="assistant", tool_calls=(call,))
        facts.append(_tool_calls(renderer, reply, tools))
        facts.append(_several_answers(renderer, call, tools))
    missing = without_bridge(renderer, tools)
    if missing:
        facts.append(said_of(missing))
    if (ANSWER if tools else QUESTION) in missing:
        return facts
    facts.append(_bridges(renderer, reply, tools))
    facts.append(_truncated(renderer, reply, tools))
    facts.append(_whole(renderer, reply, tools))
    return facts


def _turn_ends(renderer: Renderer) -> str:
    reply = reply_tokens(renderer, _ANSWER)
    if not renderer.stop_ids or reply[-1] not in renderer.stop_ids or set(reply[:-1]) & set(renderer.stop_ids):
        raise _failed("a reply that ends with one stop token", renderer.decode(reply))
    parsed = renderer.parse(reply, (), prompt=renderer.render([Message(role="user", content="Who?")], ()).tokens)
    if parsed != _ANSWER:
        raise _failed(f"a reply that parses to {_ANSWER.content!r}", repr(parsed))
    return f"a reply ends with {renderer.decode(reply[-1:])!r} and parses to the message"


def _texts(renderer: Renderer, tools: Sequence[ToolSpec]) -> str:
    text = renderer.decode(renderer.render([Message(role="user", content=_TRICKY)], tools).tokens)
    for part in (_TRICKY, *(tool.name for tool in tools)):
        if part not in text:
            raise _failed(f"a prompt that contains {part!r}", repr(text[-400:]))
    return f"a prompt carries its text unchanged{' and names every tool' if tools else ''}"


def _tool_calls(renderer: Renderer, reply: Message, tools: Sequence[ToolSpec]) -> str:
    prompt = renderer.render([Message(role="user", content=_TRICKY)], tools).tokens
    parsed = renderer.parse(reply_tokens(renderer, reply, tools), tools, prompt=prompt)
    calls = [(call.name, call.arguments) for call in parsed.tool_calls]
    if calls != [(reply.tool_calls[0].name, _ARGUMENTS)] or parsed.content != reply.content:
        raise _failed("a tool call that parses to the same name and arguments", repr(parsed))
    return "a tool call with quotes, newlines and Unicode parses to the same name and arguments"


def _bridges(renderer: Renderer, reply: Message, tools: Sequence[ToolSpec]) -> str:
    question = Message(role="user", content=_TRICKY)
    new = _next(reply)
    prompt = renderer.render([question], tools).tokens
    reply_ids = reply_tokens(renderer, reply, tools)
    bridged = renderer.bridge(prompt, reply_ids, new, tools)
    if bridged is None or bridged[: len(prompt) + len(reply_ids)] != (*prompt, *reply_ids):
        raise _failed("a next prompt that begins with the ids so far", "none" if bridged is None else "other ids")
    added = renderer.decode(bridged[len(prompt) + len(reply_ids) :])
    full = renderer.render([question, reply, *new], tools).tokens
    # some formats quote a tool's answer
    said_all = all(m.content in added or json.dumps(m.content, ensure_ascii=False) in added for m in new)
    if not said_all or not renderer.decode(full).endswith(added):
        raise _failed(f"a bridge that ends like {renderer.decode(full)[-200:]!r}", repr(added[-200:]))
    if bridged == full:
        return "a bridge keeps the ids so far and equals the full render"
    return "a bridge keeps the ids so far (a full render rewrites the reply; sessions bridge)"


def _several_answers(renderer: Renderer, call: ToolCall, tools: Sequence[ToolSpec]) -> str:
    both = Message(role="assistant", tool_calls=(call, dataclasses.replace(call, id="call_1")))
    prompt = renderer.render([Message(role="user", content=_TRICKY)], tools).tokens
    try:
        reply_ids = reply_tokens(renderer, both, tools)
    except BadInput:
        return "a reply has one call at most"
    if renderer.bridge(prompt, reply_ids, _next(both), tools) is None:
        return "several tool answers at once are not bridged: sessions begin a new branch there"
    return f"two tool answers at once: {_bridges(renderer, both, tools)}"


def _truncated(renderer: Renderer, reply: Message, tools: Sequence[ToolSpec]) -> str:
    prompt = renderer.render([Message(role="user", content="Who?")], tools).tokens
    cut = reply_tokens(renderer, _ANSWER, tools)[:2]
    new = [Message(role="user", content="Go on.")] if not tools else _next(reply)
    bridged = renderer.bridge(prompt, cut, new, tools)
    before = (*prompt, *cut)
    closing = set() if bridged is None else set(bridged[len(before) : len(before) + _CLOSING])
    if bridged is None or bridged[: len(before)] != before or not closing & set(renderer.stop_ids):
        got = "none" if bridged is None else repr(renderer.decode(bridged[len(prompt) :]))
        raise _failed("a bridge that closes a reply cut short", got)
    return "a bridge closes a reply that was cut short"


def _whole(renderer: Renderer, reply: Message, tools: Sequence[ToolSpec]) -> str:
    messages = [Message(role="user", content="Who?"), reply, *_next(reply), _ANSWER]
    rendered = demonstration_tokens(renderer, messages, tools)
    marked = [token for token, sampled in zip(rendered.tokens, rendered.sampled, strict=True) if sampled]
    if marked != [*reply_tokens(renderer, reply, tools), *reply_tokens(renderer, _ANSWER, tools)]:
        raise _failed("a demonstration that marks exactly its replies", repr(renderer.decode(marked)))
    return "a demonstration of two replies marks exactly what a model would sample"


def _next(reply: Message) -> list[Message]:
    """Return the messages that follow a reply: a tool's answer to each call, otherwise a user's."""
    if reply.tool_calls:
        return [
            Message(role="tool", content=f"{42 + n}\n<b>é</b>", tool_call_id=call.id, name=call.name)
            for n, call in enumerate(reply.tool_calls)
        ]
    return [Message(role="user", content="Are you sure? é")]


def _failed(expected: str, got: str) -> Exception:
    do = "name a renderer that knows this model, or repair its chat template"
    return refusal("renderer", expected, got, do)
