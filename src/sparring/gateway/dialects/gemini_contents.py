"""Contents of Google's Gemini, read: turns of parts as one conversation, and declarations of functions as tools."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialects.dialect import Placed, is_left_out, name_in, text_in, typed
from sparring.gateway.dialects.handles import unsealed
from sparring.types import Message, ToolCall, ToolSpec

TEXT = frozenset(("text", "thought", "thoughtSignature", "partMetadata"))
"""Names that a part of text may have."""


def conversation_in(contents: Any) -> tuple[list[Placed], str]:
    """Read the turns of a conversation. The calls of a reply have the ids that the client sent; empty without.

    Returns:
        The messages, and the id of the last reply that a signature names; empty where none does.

    Raises:
        BadInput: a turn is malformed or has a part that cannot be shown to the model.
    """
    conversation: list[Placed] = []
    handle = ""
    if isinstance(contents, dict):
        contents = [contents]
    for at, content in enumerate(typed(contents, "contents", list, "a list of contents")):
        where = f"contents[{at}]"
        role = typed(content, where, dict, "a content").get("role") or "user"
        if role not in ("user", "model", "function"):
            raise refusal(f"{where}.role", "user, model or function", repr(role), "correct the request")
        parts = typed(content.get("parts"), f"{where}.parts", list, "a list of parts")
        if role == "model":
            reply, named = _reply(parts, where)
            handle = named or handle
            if conversation and conversation[-1].message.role == "assistant":
                where, first = conversation.pop()
                reply = _joined(first, reply)
            conversation.append(Placed(where, reply))
        else:
            conversation += _told(parts, where)
    return conversation, handle


def named_calls(conversation: Sequence[Placed]) -> list[Placed]:
    """Return a conversation whose calls all have ids. Where a client sends none, an answer belongs to the first call of
    its name, or else to the first of all, that has no answer yet.

    Raises:
        BadInput: there are more answers than calls.
    """
    named: list[Placed] = []
    waiting: list[ToolCall] = []
    for at, (where, message) in enumerate(conversation):
        if message.role == "assistant":
            calls = tuple(
                call if call.id else replace(call, id=f"call_of_{at}_{number}")
                for number, call in enumerate(message.tool_calls)
            )
            waiting = list(calls)
            message = replace(message, tool_calls=calls)
        elif message.role == "tool":
            call = _answered(message, waiting, where)
            waiting.remove(call)
            message = replace(message, tool_call_id=call.id, name=None)
        named.append(Placed(where, message))
    return named


def text_of(content: Any, where: str) -> str:
    """Return the text of a content, which may be a part or a content of parts.

    Raises:
        BadInput: it has a part that is no text.
    """
    typed(content, where, dict, "a content")
    parts = content.get("parts", [content] if "text" in content else None)
    if isinstance(parts, dict):
        parts = [parts]
    texts = [_text(part, f"{where}.parts[{at}]") for at, part in enumerate(typed(parts, where, list, "parts"))]
    return "".join(texts)


def tools_in(tools: Any, leave_out: Collection[str]) -> tuple[ToolSpec, ...]:
    """Read the tools of a request.

    Raises:
        BadInput: one is malformed, or one that the vendor's servers run and that is not to be left out.
    """
    specs: list[ToolSpec] = []
    for at, tool in enumerate(typed([] if tools is None else tools, "tools", list, "a list of tools")):
        for name, value in typed(tool, f"tools[{at}]", dict, "a tool").items():
            where = f"tools[{at}].{name}"
            if name == "functionDeclarations":
                declared = typed(value, where, list, "a list of functions")
                specs += [_declared(each, f"{where}[{number}]") for number, each in enumerate(declared)]
            elif not is_left_out(name, leave_out):
                do = "switch it off in the client, or let the door leave it out"
                raise refusal(where, "functionDeclarations: tools that the client runs", repr(name), do)
    names = [spec.name for spec in specs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise refusal("tools", "functions of different names", f"{twice!r} twice", "rename one")
    return tuple(specs)


def json_schema(schema: Any, where: str) -> Any:
    """Return a schema of the vendor's own kind, with types in upper case, as a JSON schema.

    Raises:
        BadInput: it is no schema.
    """
    typed(schema, where, dict, "a schema")
    converted: dict[str, Any] = {}
    for name, value in schema.items():
        place = f"{where}.{name}"
        if name == "type" and isinstance(value, str):
            converted[name] = value.lower()
        elif name == "properties":
            properties = typed(value, place, dict, "schemas by name").items()
            converted[name] = {key: json_schema(inner, f"{place}.{key}") for key, inner in properties}
        elif name == "items":
            converted[name] = json_schema(value, place)
        elif name == "anyOf":
            inner = typed(value, place, list, "a list of schemas")
            converted[name] = [json_schema(each, f"{place}[{number}]") for number, each in enumerate(inner)]
        elif name in COUNTS and isinstance(value, str):
            converted[name] = int(value) if value.isdecimal() else value
        elif name not in ("propertyOrdering", "nullable"):
            converted[name] = value
    if schema.get("nullable"):
        converted["type"] = [converted["type"], "null"] if "type" in converted else "null"
        if "enum" in converted:
            converted["enum"] = [*converted["enum"], None]
    return converted


COUNTS = frozenset("minItems maxItems minLength maxLength minProperties maxProperties".split())
"""Numbers of a schema, which the vendor writes as text."""


def _declared(function: Any, where: str) -> ToolSpec:
    name = name_in(typed(function, where, dict, "a function").get("name"), f"{where}.name")
    description = typed(function.get("description") or "", f"{where}.description", str, "text")
    schema = function.get("parametersJsonSchema")
    if schema is None:
        own = function.get("parameters")
        schema = {"type": "object", "properties": {}} if own is None else json_schema(own, f"{where}.parameters")
    typed(schema, f"{where}.parametersJsonSchema", dict, "a JSON schema")
    return ToolSpec(name=name, description=text_in(description, where), parameters=schema)


def _reply(parts: Sequence[Any], where: str) -> tuple[Message, str]:
    """Return a reply as the client sends it back, and the id of the reply that its signature names."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls, handle = [], ""
    for at, part in enumerate(parts):
        place = f"{where}.parts[{at}]"
        typed(part, place, dict, "a part")
        handle = unsealed(part.get("thoughtSignature")) or handle
        function = part.get("functionCall")
        if function is None:
            (thoughts if part.get("thought") else texts).append(_text(part, place))
            continue
        name = typed(typed(function, place, dict, "a call").get("name"), f"{place}.functionCall.name", str, "a name")
        arguments = typed(function.get("args") or {}, f"{place}.functionCall.args", dict, "the arguments")
        id = typed(function.get("id") or "", f"{place}.functionCall.id", str, "an id")
        calls.append(ToolCall(id=id, name=text_in(name, place), arguments=arguments))
    reasoning = "".join(thoughts) or None
    return Message(role="assistant", content="".join(texts), reasoning=reasoning, tool_calls=tuple(calls)), handle


def _joined(first: Message, second: Message) -> Message:
    """Return two turns of the model side by side as the one reply that they were."""
    reasoning = (first.reasoning or "") + (second.reasoning or "")
    return Message(
        role="assistant",
        content=first.content + second.content,
        reasoning=reasoning or None,
        tool_calls=first.tool_calls + second.tool_calls,
    )


def _told(parts: Sequence[Any], where: str) -> list[Placed]:
    """Return what a turn of the user has: answers of functions, each by itself, before the text beside them."""
    answers, texts = [], []
    for at, part in enumerate(parts):
        place = f"{where}.parts[{at}]"
        typed(part, place, dict, "a part")
        answer = part.get("functionResponse")
        if answer is None:
            texts.append(_text(part, place))
            continue
        typed(answer, place, dict, "the answer of a function")
        name = typed(answer.get("name"), f"{place}.functionResponse.name", str, "a name")
        id = typed(answer.get("id") or "", f"{place}.functionResponse.id", str, "an id")
        if answer.get("parts"):
            raise refusal(f"{place}.functionResponse.parts", "none", "some", "this model reads text alone")
        content = _answer_text(answer.get("response"), place)
        answers.append(Placed(place, Message(role="tool", content=content, tool_call_id=id, name=name)))
    beside = [Placed(where, Message(role="user", content="".join(texts)))] if texts or not answers else []
    return [*answers, *beside]


def _answer_text(response: Any, where: str) -> str:
    """Return the text of a function's answer: the text itself where that is all that there is, else JSON."""
    if isinstance(response, dict) and len(response) == 1:
        ((name, value),) = response.items()
        if name in ("output", "result") and isinstance(value, str):
            return text_in(value, where)
    return text_in(json.dumps(response, ensure_ascii=False), where)


def _answered(answer: Message, waiting: Sequence[ToolCall], where: str) -> ToolCall:
    """Return the call that an answer belongs to."""
    same = [call for call in waiting if answer.tool_call_id and call.id == answer.tool_call_id]
    named = [call for call in waiting if call.name == answer.name]
    match = next(iter(same or named), None)
    if match is None:
        got = f"one of {answer.name!r}"
        raise refusal(where, "an answer to a call of the reply before it", got, "send the call")
    return match


def _text(part: Any, where: str) -> str:
    typed(part, where, dict, "a part")
    if not part.keys() <= TEXT or "text" not in part and "thoughtSignature" not in part:
        names = ", ".join(sorted(part.keys() - TEXT)) or "nothing"
        raise refusal(where, "a part that is text", names, "this model reads text alone")
    return text_in(typed(part.get("text") or "", f"{where}.text", str, "text"), where)
