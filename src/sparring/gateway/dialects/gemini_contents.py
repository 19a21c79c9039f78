"""Readers of the contents of Google's Gemini: turns of parts as a conversation, and function declarations as tools."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialects.dialect import Placed, ReplyParts, is_left_out
from sparring.gateway.dialects.fields import PlacedObjects, name_in, objects_in, text_field, typed
from sparring.gateway.dialects.handles import reply_named
from sparring.record.identity import join_parts
from sparring.render.calls.schemas import each_inner
from sparring.types import Message, ToolCall, ToolSpec

TEXT = frozenset(("text", "thought", "thoughtSignature", "partMetadata"))
"""Fields that a part of text may have."""


def conversation_in(contents: Any) -> tuple[list[Placed], str]:
    """Read the turns of a conversation. Calls keep the client's ids, which may be empty; see `with_call_ids`.

    Returns:
        Messages, and the id of the last reply that a signature names; empty if no signature names a reply.

    Raises:
        BadInput: a turn is malformed or has a part that the model cannot read.
    """
    conversation: list[Placed] = []
    handle = ""
    if isinstance(contents, dict):
        contents = [contents]
    for where, content in objects_in(contents, "contents", "a list of contents", "a content"):
        role = content.get("role") or "user"
        if role not in ("user", "model", "function"):
            raise refusal(f"{where}.role", "user, model or function", repr(role), "correct the request")
        parts = objects_in(content.get("parts"), f"{where}.parts", "a list of parts", "a part")
        if role == "model":
            reply, named = _read_reply(parts)
            handle = named or handle
            if conversation and conversation[-1].message.role == "assistant":
                where, first = conversation.pop()
                reply = join_parts((first, reply))
            conversation.append(Placed(where, reply))
        else:
            conversation += _user_messages(parts, where)
    return conversation, handle


def with_call_ids(conversation: Sequence[Placed]) -> list[Placed]:
    """Assign an id to each call without an id, and find the call of each answer: by id, or else the first unanswered
    call with the answer's name.
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
            call = _call_of_answer(message, waiting, where)
            waiting.remove(call)
            message = replace(message, tool_call_id=call.id, name=None)
        named.append(Placed(where, message))
    return named


def text_of(content: Any, where: str) -> str:
    """Return the text of a content, which may be a single part or have parts."""
    typed(content, where, dict, "a content")
    parts = content.get("parts", [content] if "text" in content else None)
    if isinstance(parts, dict):
        parts = [parts]
    return "".join([_text(part, place) for place, part in objects_in(parts, f"{where}.parts", "parts", "a part")])


def tools_in(tools: Any, leave_out: Collection[str]) -> tuple[ToolSpec, ...]:
    """Read the tools of a request.

    Raises:
        BadInput: a tool is malformed, or hosted by the vendor and not in `leave_out`, or two tools have the same name.
    """
    specs: list[ToolSpec] = []
    for place, tool in objects_in([] if tools is None else tools, "tools", "a list of tools", "a tool"):
        for name, value in tool.items():
            where = f"{place}.{name}"
            if name == "functionDeclarations":
                declared = objects_in(value, where, "a list of functions", "a function")
                specs += [_read_declaration(function, at) for at, function in declared]
            elif not is_left_out(name, leave_out):
                do = "switch it off in the client, or let the door leave it out"
                raise refusal(where, "functionDeclarations: tools that the client runs", repr(name), do)
    names = [spec.name for spec in specs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise refusal("tools", "functions of different names", f"{twice!r} twice", "rename one")
    return tuple(specs)


def json_schema(schema: Any, where: str) -> Any:
    """Convert a schema in Google's format, with types in upper case and `nullable`, to a JSON schema, at every depth. A
    JSON schema stays as it is.
    """
    typed(schema, where, dict, "a schema")
    typed(schema.get("properties", {}), f"{where}.properties", dict, "schemas by name")
    typed(schema.get("anyOf", []), f"{where}.anyOf", list, "a list of schemas")
    converted = each_inner(
        {"$ref" if name == "ref" else name: value for name, value in schema.items() if name not in GOOGLES},
        lambda inner: inner if isinstance(inner, bool) else json_schema(inner, where),
    )
    for name in COUNTS & converted.keys():
        if isinstance(converted[name], str) and converted[name].isdecimal():
            converted[name] = int(converted[name])
    named = converted.get("type")
    if isinstance(named, str | list):
        types = [str(each).lower() for each in ([named] if isinstance(named, str) else named)]
        converted["type"] = types if isinstance(named, list) else types[0]
    return _with_null(converted) if schema.get("nullable") is True else converted


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    if any(key in schema for key in ("$ref", "allOf", "oneOf", "const", "not")):
        return {"anyOf": [schema, {"type": "null"}]}
    if "anyOf" in schema:
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    types = schema.get("type", "null")
    types = types if isinstance(types, list) else [types]
    return {**schema, "type": types if "null" in types else [*types, "null"]} if "type" in schema else schema


GOOGLES = ("propertyOrdering", "nullable")
"""Fields of Google's schemas that JSON Schema does not have."""

COUNTS = frozenset("minItems maxItems minLength maxLength minProperties maxProperties".split())
"""Numbers in a schema that Google writes as strings."""


def _read_declaration(function: Mapping[str, Any], where: str) -> ToolSpec:
    name = name_in(function.get("name"), f"{where}.name")
    description = typed(function.get("description") or "", f"{where}.description", str, "text")
    schema = function.get("parametersJsonSchema")
    if schema is None:
        own = function.get("parameters")
        schema = {"type": "object", "properties": {}} if own is None else json_schema(own, f"{where}.parameters")
    else:
        schema = json_schema(schema, f"{where}.parametersJsonSchema")
    return ToolSpec(name=name, description=description, parameters=schema)


def _read_reply(parts: PlacedObjects) -> tuple[Message, str]:
    """Read a reply in a conversation. Return its message and the id of the recorded reply that its signature names."""
    reply, handle = ReplyParts(), ""
    for place, part in parts:
        handle = reply_named(part.get("thoughtSignature")) or handle
        function = part.get("functionCall")
        if function is None:
            (reply.thoughts if part.get("thought") else reply.texts).append(_text(part, place))
            continue
        name = text_field(typed(function, place, dict, "a call"), "name", f"{place}.functionCall", "a name")
        arguments = typed(function.get("args") or {}, f"{place}.functionCall.args", dict, "the arguments")
        id = typed(function.get("id") or "", f"{place}.functionCall.id", str, "an id")
        reply.calls.append(ToolCall(id=id, name=name, arguments=arguments))
    return reply.message(), handle


def _user_messages(parts: PlacedObjects, where: str) -> list[Placed]:
    """Read a turn of the user: answers of functions, one message each, before the text."""
    answers, texts = [], []
    for place, part in parts:
        answer = part.get("functionResponse")
        if answer is None:
            texts.append(_text(part, place))
            continue
        typed(answer, place, dict, "the answer of a function")
        name = typed(answer.get("name"), f"{place}.functionResponse.name", str, "a name")
        id = typed(answer.get("id") or "", f"{place}.functionResponse.id", str, "an id")
        if answer.get("parts"):
            raise refusal(f"{place}.functionResponse.parts", "none", "some", "this model reads text alone")
        content = _answer_text(answer.get("response"))
        answers.append(Placed(place, Message(role="tool", content=content, tool_call_id=id, name=name)))
    beside = [Placed(where, Message(role="user", content="".join(texts)))] if texts or not answers else []
    return [*answers, *beside]


def _answer_text(response: Any) -> str:
    """Return the answer of a function as text: a single string unchanged, any other value as JSON."""
    if isinstance(response, dict) and len(response) == 1:
        ((name, value),) = response.items()
        if name in ("output", "result") and isinstance(value, str):
            return value
    return json.dumps(response, ensure_ascii=False)


def _call_of_answer(answer: Message, waiting: Sequence[ToolCall], where: str) -> ToolCall:
    same = [call for call in waiting if answer.tool_call_id and call.id == answer.tool_call_id]
    named = [call for call in waiting if call.name == answer.name]
    match = next(iter(same or named), None)
    if match is None:
        got = f"one of {answer.name!r}"
        raise refusal(where, "an answer to a call of the reply before it", got, "send the call")
    return match


def _text(part: Mapping[str, Any], where: str) -> str:
    if not part.keys() <= TEXT or "text" not in part and "thoughtSignature" not in part:
        names = ", ".join(sorted(part.keys() - TEXT)) or "nothing"
        raise refusal(where, "a part that is text", names, "this model reads text alone")
    return str(typed(part.get("text") or "", f"{where}.text", str, "text"))
