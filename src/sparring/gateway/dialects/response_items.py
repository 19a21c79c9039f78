"""Readers of the items of OpenAI's Responses: messages, reasoning, calls and their outputs as a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialects.dialect import Placed, ReplyParts
from sparring.gateway.dialects.fields import objects_in, text_field, typed
from sparring.gateway.dialects.handles import EMPTY, reply_named
from sparring.gateway.dialects.openai import UNREADABLE, read_text
from sparring.gateway.dialects.response_tools import read_call, write_call
from sparring.reply import pieces_of
from sparring.types import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")

Recall = Callable[[str], Sequence[Message] | None]
"""Function from a reply id to the conversation up to and including that reply; None for an unknown id."""


def conversation_in(items: Sequence[Any], recall: Recall) -> tuple[list[Placed], str]:
    """Read the items of a conversation.

    Successive items of one reply become one message. A call joins this message even if the client placed it after the
    output of another call of the reply. A second text begins another reply; if that is wrong, the recorder notices.

    Args:
        recall: function from a reply id to the conversation up to that reply, for items that are references.

    Returns:
        Messages, and the id of the last reply that an item's handle names; empty if no item names a reply.
    """
    conversation: list[Placed | tuple[str, ReplyParts]] = []
    reply: ReplyParts | None = None  # last reply, while items may still belong to it
    handle = ""
    for place, item in objects_in(items, "input", "text or a list of items", "an item"):
        if item.get("type") == "item_reference":
            item = _resolve_reference(item, recall, place)
        kind = item.get("type") or "message"
        handle = reply_named(item.get("encrypted_content")) or _reply_of_item(item.get("id")) or handle
        if kind in OUTPUTS:
            conversation.append(Placed(place, _read_output(item, place)))
            continue
        if kind in CALLS:
            call = read_call(item, place)
            last = conversation[-1] if conversation else None
            behind = isinstance(last, Placed) and last.message.role == "tool"
            if reply is None or behind and not (reply.calls and _one_reply(reply.calls[-1].id, call.id)):
                conversation.append((place, reply := ReplyParts()))
            reply.calls.append(call)
            continue
        role = _role(item, kind, place)
        if role != "assistant":
            reply = None
            text = read_text(item.get("content"), f"{place}.content")
            conversation.append(Placed(place, Message(role="user" if role == "user" else "system", content=text)))
            continue
        second = kind == "message" and reply is not None and bool(reply.texts)
        if reply is None or second or isinstance(conversation[-1], Placed):
            conversation.append((place, reply := ReplyParts()))
        if kind == "reasoning":
            reply.thoughts.append(_read_thoughts(item, place))
        else:
            reply.texts.append(read_text(item.get("content"), f"{place}.content"))
    return [each if isinstance(each, Placed) else Placed(each[0], each[1].message()) for each in conversation], handle


def replies_referenced(items: Sequence[Any]) -> frozenset[str]:
    """Return the ids of the replies that are referenced by items of type `item_reference`."""
    references = (item for item in items if isinstance(item, dict) and item.get("type") == "item_reference")
    return frozenset(_reply_of_item(reference.get("id")) for reference in references) - {""}


def _resolve_reference(reference: Mapping[str, Any], recall: Recall, where: str) -> dict[str, Any]:
    """Return the item of a reply that a reference names.

    Raises:
        BadInput: the reference names no item of a reply that this key may read.
    """
    id = typed(reference.get("id"), f"{where}.id", str, "the id of an item")
    reply = _reply_of_item(id)
    conversation = recall(reply) if reply else None
    pieces = pieces_of(conversation[-1]) if conversation else ()
    if pieces and id.startswith("msg_") and id.endswith(f".{EMPTY}"):
        return {"type": "message", "id": id, "role": "assistant", "content": ""}
    number = id.rpartition(".")[2] if "." in id else "0"  # thoughts have no number, and come first
    piece = next((piece for at, piece in enumerate(pieces) if str(at) == number), None)
    if piece is None or id.startswith("rs_") != (piece.kind == "reasoning"):
        got, do = json.dumps(id), "send the item itself"
        raise refusal(f"{where}.id", "the id of an item of a reply under this key", got, do)
    if piece.call is not None:
        return {**write_call(piece.call, {}), "id": id}
    if piece.kind == "reasoning":
        return {"type": "reasoning", "id": id, "content": [{"type": "reasoning_text", "text": piece.text}]}
    return {"type": "message", "id": id, "role": "assistant", "content": piece.text}


def _role(item: Mapping[str, Any], kind: Any, where: str) -> str:
    """Return the role of an item.

    Raises:
        BadInput: the model cannot read items of this type or role.
    """
    if kind == "reasoning":
        return "assistant"
    if kind != "message":
        expected = f"message, reasoning, item_reference, {', '.join((*CALLS, *OUTPUTS))}"
        do = "switch off in the client what makes it"
        raise refusal(f"{where}.type", expected, repr(kind), do)
    role = ROLES.get(str(item.get("role")))
    if role is None:
        raise refusal(f"{where}.role", f"one of {', '.join(ROLES)}", repr(item.get("role")), "correct the request")
    return role


def _read_output(item: Mapping[str, Any], where: str) -> Message:
    id = text_field(item, "call_id", where, "the id of a call")
    content = read_text(item.get("output"), f"{where}.output")
    return Message(role="tool", content=content, tool_call_id=id.removeprefix(UNREADABLE))


def _read_thoughts(item: Mapping[str, Any], where: str) -> str:
    """Return the thoughts of a reasoning item; empty if the client kept only its handle."""
    parts = objects_in(item.get("content") or [], f"{where}.content", "a list of parts", "a part")
    return "".join([text_field(part, "text", place) for place, part in parts])


def _reply_of_item(id: object) -> str:
    """Return the id of the reply that an item id names; empty if the item id names no reply."""
    return reply_named(id.partition("_")[2].partition(".")[0]) if isinstance(id, str) else ""


def _one_reply(first: str, second: str) -> bool:
    """Return whether two call ids belong to one reply, that is, are equal up to the number at the end."""
    (turn, _, number), (other_turn, _, other) = first.rpartition("_"), second.rpartition("_")
    return turn == other_turn != "call" and number.isdecimal() and other.isdecimal()
