"""Identity of messages: a message that a client serialises in another form is the same message, not an edit."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import xxhash

from sparring.types import Message, ToolCall, ToolSpec
from sparring.validation import read_json

EXACT = 1 << 53
"""Largest n such that a double represents every integer up to n exactly."""

DIGEST_BYTES = 16
"""Number of bytes of a digest."""

UNREAD = "INVALID_JSON"
"""Argument that holds the text of a malformed call in formats whose arguments are objects; the vendors use this
name."""

_SEED = secrets.randbits(64)
_OWN_ID = re.compile(r"call_\d+_\d+")

# made once: `json.dumps` with any option makes an encoder for every call
_sorted = json.JSONEncoder(default=dict, sort_keys=True)
_fast = msgspec.msgpack.Encoder()


def message_key(message: Message) -> bytes:
    """Return a key that is equal for messages that differ only in form.

    These differences are form: None or empty; order and spacing of JSON arguments; the notation of a number (10000 and
    10000.0 are one double); blanks around a reply; names and ids that link a tool's answer to its call, since the order
    links them as well. The key ignores a reply's thought, because clients drop thoughts; see `thought_of`.
    """
    content = message.content
    if message.role == "assistant":
        content = content.strip()
        if message.tool_calls:
            calls = "\0".join(map(_call_key, message.tool_calls))
            return f"assistant {len(content)} {content}{calls}".encode("utf-8", "surrogatepass")
        return f"assistant {len(content)} {content}".encode("utf-8", "surrogatepass")
    return _head(message) + content.encode("utf-8", "surrogatepass")


def other_forms(reply: Message) -> list[Message]:
    """Return the other forms in which clients send back a reply with a malformed call: as an object with the argument
    `UNREAD`, as text, and as a regular call if the malformed text is JSON after all."""
    malformed = [call for call in reply.tool_calls if call.arguments is None]
    if not malformed:
        return []
    calls = tuple(call for call in reply.tool_calls if call.arguments is not None)
    text = reply.content + "".join(call.raw for call in malformed)
    forms = [replace(reply, content=text, tool_calls=calls)]
    if any(call.name for call in malformed):
        text = reply.content + "".join(call.raw for call in malformed if not call.name)
        named = tuple(call for call in reply.tool_calls if call.name)
        as_sent = tuple(replace(call, arguments=shown_arguments(call)) for call in named)
        forms += [replace(reply, content=text, tool_calls=calls) for calls in (named, as_sent)]
    parsed = tuple(replace(call, arguments=_object(call.raw)) for call in malformed)
    if any(call.arguments is not None for call in parsed):
        rest = iter(parsed)
        calls = tuple(next(rest) if call.arguments is None else call for call in reply.tool_calls)
        forms.append(replace(reply, tool_calls=calls))
    return forms


def shown_arguments(call: ToolCall) -> Mapping[str, Any]:
    """Return the arguments of a call for formats whose arguments are objects; for a malformed call, an object with its
    text."""
    return {UNREAD: call.raw} if call.arguments is None else call.arguments


def join_replies(messages: Sequence[Message], recorded: Mapping[str, tuple[int, ToolCall]]) -> Sequence[Message]:
    """Return a conversation in which each reply is one message and each malformed call has its sampled text.

    Some clients send the text and the calls of a reply as separate messages, or each call before its answer. Many turn
    a malformed call into a regular one, and some move such calls to the end.

    Args:
        messages: messages of the client; returned unchanged if no reply is in parts and no call is malformed.
        recorded: place (segment number) of the reply and sampled call, by the call's id.
    """
    merged: list[Message] = []
    moved: list[Message] = []  # replies whose calls were reordered
    same = True
    reply = -1  # index of the last reply
    for message in messages:
        if message.role == "assistant":
            message, sent = _restore_calls(message, recorded), message
            same = same and message is sent
            if [call.id for call in message.tool_calls] != [call.id for call in sent.tool_calls]:
                moved.append(message)
            calls = message.tool_calls if reply >= 0 and not message.content.strip() else ()
            before = merged[reply].tool_calls[-1:] if calls else ()
            places = [recorded[call.id][0] if call.id in recorded else None for call in (*before, *calls[:1])]
            interleaved = bool(before) and None is not places[0] == places[1]
            if interleaved and any(between.role != "tool" for between in merged[reply + 1 :]):
                interleaved = False
            if merged and merged[-1].role == "assistant" or interleaved:
                merged[reply] = join_parts((merged[reply], message))
                continue
            reply = len(merged)
        merged.append(message)
    for each in moved:
        _put_in_order(merged, each)
    return messages if same and len(merged) == len(messages) else merged


def _restore_calls(reply: Message, recorded: Mapping[str, tuple[int, ToolCall]]) -> Message:
    """Return a reply with the sampled text of its malformed calls, found by id, and with its calls in the sampled
    order. Ids that a chat format writes itself are ignored, because a format repeats its ids."""
    own = [call.id in recorded and _OWN_ID.fullmatch(call.id) is not None for call in reply.tool_calls]
    written = [recorded[c.id][1] if of_session else c for c, of_session in zip(reply.tool_calls, own, strict=True)]
    calls = tuple(w if w.arguments is None else c for w, c in zip(written, reply.tool_calls, strict=True))
    if len(calls) > 1 and all(own) and len({recorded[call.id][0] for call in calls}) == 1:
        calls = tuple(sorted(calls, key=lambda call: int(call.id.rpartition("_")[2])))
    return reply if calls == reply.tool_calls else replace(reply, tool_calls=calls)


def _put_in_order(messages: list[Message], reply: Message) -> None:
    """Sort the answers that follow a reply in the order of its calls."""
    begun = next((at + 1 for at, message in enumerate(messages) if message is reply), len(messages))
    ended = begun
    while ended < len(messages) and messages[ended].role == "tool":
        ended += 1
    places = {call.id: at for at, call in enumerate(reply.tool_calls)}
    messages[begun:ended] = sorted(messages[begun:ended], key=lambda m: places.get(m.tool_call_id or "", len(places)))


def join_parts(parts: Sequence[Message]) -> Message:
    """Join successive messages, which are parts of one reply, into that reply."""
    return replace(
        parts[0],
        content="".join(part.content for part in parts),
        reasoning="".join(part.reasoning or "" for part in parts) or None,
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
    )


class ReplyDigest:
    """Digest of a conversation up to a reply that grows call by call. After each step, the digest equals the result of
    `chain_digests` for the reply with the calls so far.

    Args:
        before: digest of the conversation before the reply.
    """

    def __init__(self, before: bytes, reply: Message) -> None:
        self._hashed = xxhash.xxh3_128(before, seed=_SEED)
        self._hashed.update(message_key(reply))
        self._calls = bool(reply.tool_calls)

    def goes_on(self, calls: Sequence[ToolCall]) -> bytes:
        """Add calls and return the digest."""
        text = "\0".join((*[""] * self._calls, *map(_call_key, calls)))
        self._hashed.update(text.encode("utf-8", "surrogatepass"))
        self._calls = True
        return self._hashed.digest()


def thought_of(message: Message) -> str:
    """Return the thought of a reply without surrounding blanks; empty if there is none or the client dropped it."""
    return (message.reasoning or "").strip()


def tools_key(tools: Sequence[ToolSpec]) -> bytes:
    """Return a key that is equal for tool lists that differ only in form: the order of the tools, and of the keys in
    their schemas.

    Other tools make another conversation, because the prompt prints them.
    """
    texts = sorted(_sorted.encode([tool.name, tool.description, _as_doubles(tool.parameters)]) for tool in tools)
    return "\0".join(texts).encode("utf-8", "surrogatepass")


def written_key(tools: Sequence[ToolSpec]) -> bytes | None:
    """Return a digest of tools that depends on the order of all keys, in a hundredth of the time of `tools_key`; None
    if the tools cannot be encoded."""
    try:
        return digest(_fast.encode(tuple(tools)))
    except (TypeError, ValueError, OverflowError):
        return None


def text_of(message: Message) -> str:
    """Return the text by which two messages are compared: the content, and the calls of a reply as JSON."""
    if message.role != "assistant":
        return message.content
    return "".join((message.content.strip(), *(f"\n{_call_key(call)}" for call in message.tool_calls)))


def chain_digests(before: bytes, messages: Sequence[Message], aliases: Mapping[bytes, bytes] = {}) -> list[bytes]:
    """Return for each message the digest of all messages up to and including this message.

    Args:
        before: digest of the messages before `messages`.
        aliases: digest of the recorded form, by the digest of a conversation whose last reply has another form.
    """
    keys = []
    for message in messages:
        if message.role == "assistant":
            before = digest(before + message_key(message))
        else:  # most of a request's bytes, which are hashed without copies
            hashed = xxhash.xxh3_128(before, seed=_SEED)
            hashed.update(_head(message))
            hashed.update(message.content.encode("utf-8", "surrogatepass"))
            before = hashed.digest()
        if aliases:
            before = aliases.get(before, before)
        keys.append(before)
    return keys


def digest(data: bytes) -> bytes:
    """Return 16 bytes of XXH3 with a random seed of the process, so that clients cannot construct collisions."""
    return xxhash.xxh3_128_digest(data, seed=_SEED)


def _head(message: Message) -> bytes:
    """Return the part of a message's key before its content, for a message that is not a reply."""
    name = message.name if message.role != "tool" else None
    return f"{message.role} {name or ''}\0".encode("utf-8", "surrogatepass")


def _call_key(call: ToolCall) -> str:
    if call.arguments is None:
        return _sorted.encode([call.name, "malformed", call.raw])
    return _sorted.encode([call.name, "called", _as_doubles(call.arguments)])


def arguments_key(arguments: Mapping[str, Any]) -> str:
    """Return a text that is equal for arguments that differ only in form; see `message_key`."""
    return _sorted.encode(_as_doubles(arguments))


def _object(text: str) -> Mapping[str, Any] | None:
    """Parse a JSON object; return None if the text is not a JSON object."""
    try:
        data = read_json(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _as_doubles(value: Any) -> Any:
    """Convert the numbers of plain data to doubles, as a client in JavaScript does; doubles with an integral value
    become integers."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: _as_doubles(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_doubles(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, int) and abs(value) <= EXACT:
        return value
    try:
        double = float(value)
    except OverflowError:
        return value
    return int(double) if math.isfinite(double) and double.is_integer() else double
