"""Proof that text quoted in a prompt cannot write control tokens, and so cannot forge a turn or the end of one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from sparring.errors import BadInput, refusal
from sparring.protocols import Renderer
from sparring.render.control import MARK
from sparring.types import Message, ToolCall, ToolSpec

_SYSTEM = Message(role="system", content="Be brief.")
_USER = Message(role="user", content="Who?")
_REPLY = Message(role="assistant", content="Me.")

Place = tuple[str, list[Message], list[ToolSpec]]


def unforgeable(renderer: Renderer, tools: Sequence[ToolSpec] = (), control_tokens: Sequence[str] = ()) -> str:
    """Write control tokens into every quoted text of a conversation, and compare the number of control tokens in the
    prompt and in a bridge with the number for a harmless word.

    Args:
        tools: tools that the run offers; without any, quotes of tools are not tried.
        control_tokens: roles that may write control tokens before the first reply; their messages are not tried.

    Returns:
        The fact that was proved, in one sentence.

    Raises:
        BadInput: a quoted text became a control token; the error names the place of the text and the token.
    """
    text = " ".join(("x", *renderer.control_ids, "x"))
    messages = _conversation(renderer, tools)
    pairs = zip(_places(messages, tools, text), _places(messages, tools, "word"), strict=True)
    for (where, forged, schemas), (_, plain, plain_schemas) in pairs:
        if where.endswith("before the first reply") and where.split()[0] in control_tokens:
            continue
        _compare(renderer, where, _count(renderer, forged, schemas) - _count(renderer, plain, plain_schemas))
    _bridges(renderer, messages, tools, text)
    return f"none of {len(renderer.control_ids)} control tokens can be written by a message or a tool"


def _conversation(renderer: Renderer, tools: Sequence[ToolSpec]) -> list[Message]:
    reply, answers = _REPLY, []
    if tools:
        reply = dataclasses.replace(
            _REPLY, tool_calls=(ToolCall(id="call_0", name=tools[0].name, arguments={"x": "1"}),)
        )
        answers = [Message(role="tool", content="42", tool_call_id="call_0", name=tools[0].name)]
    messages = [_USER, reply, *answers, *([_REPLY] if tools else []), _USER]
    try:  # some formats take no system message
        renderer.render([_SYSTEM, *messages], tools)
    except BadInput:
        return messages
    return [_SYSTEM, *messages]


def _places(messages: Sequence[Message], tools: Sequence[ToolSpec], text: str) -> Iterator[Place]:
    """Yield copies of a conversation with the text in one place each. The name of a place begins with the role that is
    quoted."""
    first = next(at for at, message in enumerate(messages) if message.role == "assistant")
    for at, message in enumerate(messages):
        when = "before the first reply" if at < first else "after it"
        yield f"{message.role} message {when}", _with(messages, at, content=f"{message.content} {text}"), list(tools)
        if message.role == "tool":
            yield "tool message's name", _with(messages, at, name=f"{message.name}{text}"), list(tools)
            yield "tool message's id", _with(messages, at, tool_call_id=f"{message.tool_call_id}{text}"), list(tools)
        for call in _calls(message, text):
            yield f"{message.role} message's call", _with(messages, at, tool_calls=(call,)), list(tools)
        if message.tool_calls:
            yield f"{message.role} message's thought", _with(messages, at, reasoning=f"So {text}"), list(tools)
            malformed = dataclasses.replace(message.tool_calls[0], arguments=None, raw=f'{{"x": "{text}"')
            without_answers = [other for other in _with(messages, at, tool_calls=(malformed,)) if other.role != "tool"]
            yield f"{message.role} message's malformed call", without_answers, list(tools)
    for schema in _schemas(tools[0], text) if tools else ():
        yield "tool's schema", list(messages), [schema, *tools[1:]]


def _calls(message: Message, text: str) -> Iterator[ToolCall]:
    """Yield copies of a message's first call with the text in one place each."""
    for call in message.tool_calls[:1]:
        yield dataclasses.replace(call, arguments={"x": f"1 {text}"})
        yield dataclasses.replace(call, arguments={"x": ["1", {f"y{text}": f"1 {text}"}]})
        yield dataclasses.replace(call, arguments={f"x{text}": "1"})
        yield dataclasses.replace(call, name=call.name + text)
        yield dataclasses.replace(call, id=call.id + text)


def _schemas(tool: ToolSpec, text: str) -> Iterator[ToolSpec]:
    properties = {
        **tool.parameters.get("properties", {}),
        text: {"type": "string", "description": text, "enum": [text]},
    }
    yield dataclasses.replace(tool, name=tool.name + text)
    yield dataclasses.replace(tool, description=f"{tool.description} {text}")
    yield dataclasses.replace(tool, parameters={**tool.parameters, "properties": properties, "required": [text]})
    yield dataclasses.replace(tool, parameters={**tool.parameters, text: text})


def _bridges(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec], text: str) -> None:
    """Try to forge control tokens through messages that a bridge appends to a reply."""
    prompt = renderer.render([_USER], tools).tokens
    role = "tool" if tools else "user"
    answer = next(message for message in reversed(messages) if message.role == role)
    reply = (*prompt[:1], *renderer.stop_ids[:1])
    plain = renderer.bridge(prompt, reply, [answer], tools)
    forged = renderer.bridge(prompt, reply, [dataclasses.replace(answer, content=f"{answer.content} {text}")], tools)
    if plain is None or forged is None:
        if plain is not forged:
            raise _failure(f"{role} message that is bridged", "a bridge that depends on the text of the message")
        return
    _compare(renderer, f"{role} message that is bridged", _controls(renderer, forged) - _controls(renderer, plain))


def _with(messages: Sequence[Message], at: int, **changes: Any) -> list[Message]:
    return [*messages[:at], dataclasses.replace(messages[at], **changes), *messages[at + 1 :]]


def _count(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Counter[int]:
    return _controls(renderer, renderer.render(messages, tools).tokens)


def _controls(renderer: Renderer, tokens: Sequence[int]) -> Counter[int]:
    ids = set(renderer.control_ids.values())
    if MARK[1:-1] in renderer.decode(tokens):
        raise _failure("a text that contains control tokens", "a text that the template has changed")
    return Counter(token for token in tokens if token in ids)


def _compare(renderer: Renderer, where: str, added: Counter[int]) -> None:
    if added:
        raise _failure(where, f"the control tokens {renderer.decode(list(added))[:80]!r}")


def _failure(where: str, got: str) -> BadInput:
    do = "name a renderer that knows this model, or repair its tokenizer or its chat template"
    return refusal(f"renderer: {where}", "message text encoded as plain text", got, do)
