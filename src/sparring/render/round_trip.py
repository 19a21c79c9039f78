"""Round trips through a renderer before a run starts: they prove this checkpoint's template, tool calls and bridges."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.errors import BadInput, refusal
from sparring.protocols import Renderer
from sparring.render.bridges import ANSWER, QUESTION, said_of, without_bridge
from sparring.render.calls.samples import sample_arguments
from sparring.render.demonstrate import demonstration_tokens, reply_tokens
from sparring.render.grammars.call_format import call_id
from sparring.render.unforgeable import unforgeable
from sparring.types import Message, ToolCall, ToolSpec

_TRICKY = 'Say "no"\n\tor {"x": [1, 2]} \\ <tool_call> 数 é 🙂 it\'s  two   spaces'
_CLOSING = 3  # maximum number of ids with which a bridge closes a truncated reply: end of thought, end of turn
_ANSWER = Message(role="assistant", content="It is 42.")
_THOUGHT = "So it is."


def check_round_trip(
    renderer: Renderer, tools: Sequence[ToolSpec] = (), control_tokens: Sequence[str] = ()
) -> list[str]:
    """Round-trip texts, tool calls and bridges through a renderer, and try to forge control tokens.

    Args:
        tools: tools that the run offers; without any, tool calls are not tried.

    Returns:
        The facts that were proved, one sentence each.

    Raises:
        BadInput: something does not round-trip, or the text of a message becomes a control token.
    """
    reply = _writable(renderer, _ANSWER)
    facts = [_turn_ends(renderer, reply), _texts(renderer, tools), unforgeable(renderer, tools, control_tokens)]
    if tools:
        facts.append(_tool_calls(renderer, tools))
        reply = _calling_reply(renderer, tools[0], next(iter(sample_arguments(tools[0].parameters))))
        facts.append(_several_answers(renderer, reply, tools))
    missing = without_bridge(renderer, tools)
    if missing:
        facts.append(said_of(missing))
    if (ANSWER if tools else QUESTION) in missing:
        return facts
    facts.append(_bridges(renderer, reply, tools))
    facts.append(_truncated(renderer, reply, tools, bool(missing)))
    facts.append(_demonstrates(renderer, reply, tools))
    return facts


def check_tool_calls(renderer: Renderer, tools: Sequence[ToolSpec]) -> str:
    """Round-trip calls of tools that an agent program brings, and check that a prompt names these tools.

    Args:
        tools: tools of the agent's requests, at least one.

    Returns:
        The fact that was proved, in one sentence.

    Raises:
        BadInput: a prompt does not name a tool, or a parsed call differs from the written call.
    """
    _texts(renderer, tools)
    return _tool_calls(renderer, tools)


def _writable(renderer: Renderer, reply: Message, tools: Sequence[ToolSpec] = ()) -> Message:
    """Return the reply, with a thought added if the format cannot write the reply without one.

    Raises:
        BadInput: the format can write the reply neither with nor without a thought.
    """
    try:
        reply_tokens(renderer, reply, tools)
    except BadInput:
        thoughtful = dataclasses.replace(reply, reasoning=_THOUGHT)
        reply_tokens(renderer, thoughtful, tools)
        return thoughtful
    return reply


def _calling_reply(renderer: Renderer, tool: ToolSpec, arguments: Mapping[str, Any]) -> Message:
    """Return a reply that calls a tool, with the call id that the format writes."""
    call = ToolCall(id=call_id(renderer.name, tool.name, 0), name=tool.name, arguments=arguments)
    return _writable(renderer, Message(role="assistant", tool_calls=(call,)), (tool,))


def _turn_ends(renderer: Renderer, answer: Message) -> str:
    reply = reply_tokens(renderer, answer)
    if not renderer.stop_ids or reply[-1] not in renderer.stop_ids or set(reply[:-1]) & set(renderer.stop_ids):
        raise _failure("a reply that ends with one stop token", renderer.decode(reply))
    parsed = renderer.parse(reply, (), prompt=renderer.render([Message(role="user", content="Who?")], ()).tokens)
    if parsed != answer:
        raise _failure(f"a reply that parses to {answer.content!r}", repr(parsed))
    return f"a reply ends with {renderer.decode(reply[-1:])!r} and parses to the message"


def _texts(renderer: Renderer, tools: Sequence[ToolSpec]) -> str:
    text = renderer.decode(renderer.render([Message(role="user", content=_TRICKY)], tools).tokens)
    for part in (_TRICKY, *(tool.name for tool in tools)):
        if part not in text:
            raise _failure(f"a prompt that contains {part!r}", repr(text[-400:]))
    return f"a prompt carries its text unchanged{' and names every tool' if tools else ''}"


def _tool_calls(renderer: Renderer, tools: Sequence[ToolSpec]) -> str:
    """Round-trip a call of every tool, with arguments made from its schema. Each tool is offered alone, since its
    schema alone decides how its arguments are parsed."""
    for tool in tools:
        prompt = renderer.render([Message(role="user", content=_TRICKY)], (tool,)).tokens
        for arguments in sample_arguments(tool.parameters):
            reply = _calling_reply(renderer, tool, arguments)
            parsed = renderer.parse(reply_tokens(renderer, reply, (tool,)), (tool,), prompt=prompt)
            if [(call.name, call.arguments) for call in parsed.tool_calls] != [(tool.name, arguments)]:
                got = repr([call.raw if call.arguments is None else call.arguments for call in parsed.tool_calls])
                expected = f"a call that parses to the same name and arguments, {arguments!r}"
                raise _failure(expected, got if parsed.tool_calls else repr(parsed.content), f"tool {tool.name}")
    names = f"calls of {len(tools)} tools" if len(tools) > 1 else f"calls of the tool {tools[0].name}"
    return f"{names}, with values of their own schemas, parse to the same names and arguments"


def _bridges(renderer: Renderer, reply: Message, tools: Sequence[ToolSpec]) -> str:
    question = Message(role="user", content=_TRICKY)
    new = _next(reply)
    prompt = renderer.render([question], tools).tokens
    reply_ids = reply_tokens(renderer, reply, tools)
    bridged = renderer.bridge(prompt, reply_ids, new, tools)
    if bridged is None or bridged[: len(prompt) + len(reply_ids)] != (*prompt, *reply_ids):
        raise _failure("a next prompt that begins with the ids so far", "none" if bridged is None else "other ids")
    added = renderer.decode(bridged[len(prompt) + len(reply_ids) :])
    full = renderer.render([question, reply, *new], tools).tokens
    # some formats quote a tool's answer
    said_all = all(m.content in added or json.dumps(m.content, ensure_ascii=False) in added for m in new)
    if not said_all or not renderer.decode(full).endswith(added):
        raise _failure(f"a bridge that ends like {renderer.decode(full)[-200:]!r}", repr(added[-200:]))
    if bridged == full:
        return "a bridge keeps the ids so far and equals the full render"
    return "a bridge keeps the ids so far (a full render rewrites the reply; sessions bridge)"


def _several_answers(renderer: Renderer, reply: Message, tools: Sequence[ToolSpec]) -> str:
    (call,) = reply.tool_calls
    second = dataclasses.replace(call, id=call_id(renderer.name, call.name, 1))
    both = dataclasses.replace(reply, tool_calls=(call, second))
    prompt = renderer.render([Message(role="user", content=_TRICKY)], tools).tokens
    try:
        reply_ids = reply_tokens(renderer, both, tools)
    except BadInput:
        return "a reply has one call at most"
    if renderer.bridge(prompt, reply_ids, _next(both), tools) is None:
        return "several tool answers at once are not bridged: sessions begin a new branch there"
    return f"two tool answers at once: {_bridges(renderer, both, tools)}"


def _truncated(renderer: Renderer, reply: Message, tools: Sequence[ToolSpec], begins_anew: bool) -> str:
    prompt = renderer.render([Message(role="user", content="Who?")], tools).tokens
    cut = reply_tokens(renderer, _writable(renderer, _ANSWER, tools), tools)[:2]
    before = (*prompt, *cut)
    ways = [[Message(role="user", content="Go on.")], *([_next(reply)] if tools else [])]
    bridged = next((made for new in ways if (made := renderer.bridge(prompt, cut, new, tools)) is not None), None)
    if bridged is None and begins_anew:
        return "a conversation begins anew behind a reply that was cut short"
    closing = set() if bridged is None else set(bridged[len(before) : len(before) + _CLOSING])
    if bridged is None or bridged[: len(before)] != before or not closing & set(renderer.stop_ids):
        got = "none" if bridged is None else repr(renderer.decode(bridged[len(prompt) :]))
        raise _failure("a bridge that closes a reply cut short", got)
    return "a bridge closes a reply that was cut short"


def _demonstrates(renderer: Renderer, reply: Message, tools: Sequence[ToolSpec]) -> str:
    answer = _writable(renderer, _ANSWER, tools)
    messages = [Message(role="user", content="Who?"), reply, *_next(reply), answer]
    rendered = demonstration_tokens(renderer, messages, tools)
    marked = [token for token, sampled in zip(rendered.tokens, rendered.sampled, strict=True) if sampled]
    if marked != [*reply_tokens(renderer, reply, tools), *reply_tokens(renderer, answer, tools)]:
        raise _failure("a demonstration that marks exactly its replies", repr(renderer.decode(marked)))
    return "a demonstration of two replies marks exactly what a model would sample"


def _next(reply: Message) -> list[Message]:
    """Return messages that may follow a reply: an answer to each of its calls, or else a user's message."""
    if reply.tool_calls:
        return [
            Message(role="tool", content=f"{42 + n}\n<b>é</b>", tool_call_id=call.id, name=call.name)
            for n, call in enumerate(reply.tool_calls)
        ]
    return [Message(role="user", content="Are you sure? é")]


def _failure(expected: str, got: str, where: str = "renderer") -> Exception:
    do = "name a renderer that knows this model, or repair its chat template"
    return refusal(where, expected, got, do)
