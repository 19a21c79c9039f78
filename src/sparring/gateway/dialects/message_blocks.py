"""Readers for Anthropic's Messages API. They convert blocks (text, thinking, tool calls and results) to a conversation,
and read tool definitions."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialects.dialect import Placed, ReplyParts, is_left_out
from sparring.gateway.dialects.fields import PlacedObjects, name_in, objects_in, text_field, typed
from sparring.gateway.dialects.forms import MESSAGE_ROLES
from sparring.gateway.dialects.handles import reply_named
from sparring.types import Message, ToolCall, ToolSpec

BILLING = "x-anthropic-billing-header"
"""Beginning of a system block that claude-code uses for billing. This block differs between agents and means nothing to
a model."""


def tools_in(tools: Any, leave_out: Collection[str]) -> tuple[tuple[ToolSpec, ...], dict[str, ToolSpec]]:
    """Read the tools of a request.

    Returns:
        Tools of the prompt, and tools with deferred loading, by name: the prompt shows a deferred tool once a tool's
        answer loads this tool.

    Raises:
        BadInput: a tool is malformed, or hosted by the vendor and not in `leave_out`, or two tools have the same name.
    """
    specs: list[ToolSpec] = []
    deferred: dict[str, ToolSpec] = {}
    names: set[str] = set()
    for where, tool in objects_in([] if tools is None else tools, "tools", "a list of tools", "a tool"):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            if is_left_out(kind, leave_out):
                continue
            do = "switch it off in the client, or let the door leave it out"
            raise refusal(f"{where}.type", "a tool that the client runs", repr(kind), do)
        name = name_in(tool.get("name"), f"{where}.name")
        schema = typed(tool.get("input_schema"), f"{where}.input_schema", dict, "a JSON schema")
        description = typed(tool.get("description") or "", f"{where}.description", str, "text")
        if name in names:
            raise refusal(where, "tools of different names", f"{name!r} twice", "rename one")
        names.add(name)
        spec = ToolSpec(name=name, description=description, parameters=schema)
        if tool.get("defer_loading"):
            deferred[name] = spec
        else:
            specs.append(spec)
    return tuple(specs), deferred


def system_in(system: Any) -> str:
    """Return the text of `system`, which may be a list of blocks."""
    if system is None or isinstance(system, str):
        return system or ""
    texts = [_text(block, place) for place, block in objects_in(system, "system", "text or blocks", "a block")]
    return "\n\n".join(text for text in texts if not text.startswith(BILLING))


def conversation_in(messages: Any, loadable: Mapping[str, ToolSpec]) -> tuple[list[Placed], str]:
    """Read the messages of a conversation.

    Args:
        loadable: tools with deferred loading, by name; a tool's answer that loads such a tool shows its definition.

    Returns:
        Messages, and the id of the last reply that a signature names; empty if no signature names a reply.

    Raises:
        BadInput: a message is malformed or has a block that the model cannot read.
    """
    conversation: list[Placed] = []
    handle = ""
    for where, message in objects_in(messages, "messages", "a list of messages", "a message"):
        role, content = message.get("role"), message.get("content")
        if role not in MESSAGE_ROLES:
            raise refusal(f"{where}.role", "user, assistant or system", repr(role), "correct the request")
        if isinstance(content, str):
            conversation.append(Placed(where, Message(role=role, content=content)))
            continue
        blocks = objects_in(content, f"{where}.content", "text or blocks", "a block")
        if role == "assistant":
            reply, named = _read_reply(blocks)
            conversation.append(Placed(where, reply))
            handle = named or handle
        else:
            conversation += _messages_of(blocks, role, where, loadable)
    return conversation, handle


def _text(block: Mapping[str, Any], where: str) -> str:
    kind = block.get("type")
    if kind != "text":
        raise refusal(where, "a block of text", repr(kind), "this model reads text alone")
    return text_field(block, "text", where)


def _messages_of(blocks: PlacedObjects, role: Any, where: str, loadable: Mapping[str, ToolSpec]) -> list[Placed]:
    """Read a message that is not a reply: answers of tools, one message each, before the text."""
    answers, texts = [], []
    for place, block in blocks:
        if block.get("type") == "tool_result":
            id = text_field(block, "tool_use_id", place, "the id of a call")
            content = _answer(block.get("content"), place, loadable)
            answers.append(Placed(place, Message(role="tool", content=content, tool_call_id=id)))
        else:
            texts.append(_text(block, place))
    beside = [Placed(where, Message(role=role, content="".join(texts)))] if texts or not answers else []
    return [*answers, *beside]


def _answer(content: Any, where: str, loadable: Mapping[str, ToolSpec]) -> str:
    """Return the text of a tool's answer, with one line per tool that it loads."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for place, block in objects_in(content, f"{where}.content", "text or blocks", "a block"):
        if block.get("type") != "tool_reference":
            texts.append(_text(block, place))
            continue
        name = typed(block.get("tool_name"), f"{place}.tool_name", str, "the name of a tool")
        if name not in loadable:
            do = "send the tool, with defer_loading"
            raise refusal(f"{place}.tool_name", "a tool of the request whose loading is deferred", repr(name), do)
        texts.append(_tool_text(loadable[name]) + "\n")
    return "".join(texts)


def _tool_text(spec: ToolSpec) -> str:
    function = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def _read_reply(blocks: PlacedObjects) -> tuple[Message, str]:
    """Read a reply in a conversation. Return its message, and the id of the recorded reply from the signature of a
    thinking block."""
    reply, handle = ReplyParts(), ""
    for place, block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            reply.thoughts.append(text_field(block, "thinking", place))
            handle = reply_named(block.get("signature")) or handle
        elif kind == "redacted_thinking":
            handle = reply_named(block.get("data")) or handle
        elif kind == "tool_use":
            name, id = text_field(block, "name", place, "a name"), text_field(block, "id", place, "an id")
            arguments = typed(block.get("input"), f"{place}.input", dict, "the arguments")
            reply.calls.append(ToolCall(id=id, name=name, arguments=arguments))
        else:
            reply.texts.append(_text(block, place))
    return reply.message(), handle
