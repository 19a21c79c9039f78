"""Recognition of recorded conversations in the forms in which clients send replies back."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from sparring.record.identity import (
    ReplyDigest,
    chain_digests,
    digest,
    join_parts,
    join_replies,
    message_key,
    other_forms,
    thought_of,
)
from sparring.record.lines import START
from sparring.types import Message, ToolCall


class Forms:
    """Forms of the messages of a session. A conversation has the digest of the recorded conversation, in whatever form
    the client sends the replies.

    A reply that comes back in parts is recognised by the ids of its calls. If the client has its own ids, such a reply
    is recognised by the calls themselves: successive calls, each followed by its answer, are one reply if that reply is
    recorded and the parts are not.

    Attributes:
        lines: number of the latest lane that contains a conversation, by the conversation's digest.
    """

    def __init__(self) -> None:
        self.lines: dict[bytes, int] = {}
        self._aliases: dict[bytes, bytes] = {}
        self._parts: set[bytes] = set()
        self._calls: dict[str, tuple[int, ToolCall]] = {}
        self._call_ids: set[str] = set()
        self._thoughts: dict[bytes, str] = {}

    def read(self, messages: Sequence[Message]) -> tuple[Sequence[Message], list[bytes]]:
        """Return a conversation with each reply as one message, and the digest of the conversation up to each message.
        `messages`: messages of the client; returned unchanged if every reply is one message."""
        keys = self.keys(START, messages)
        last = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].role == "assistant"), None)
        if last is None or keys[last] in self.lines:
            return messages, keys
        together = join_replies(messages, self._calls)
        if together is not messages:
            messages, keys = together, self.keys(START, together)
        if not self._parts or self._parts.isdisjoint(keys):
            return messages, keys
        return self._join_parts(messages)

    def _join_parts(self, messages: Sequence[Message]) -> tuple[Sequence[Message], list[bytes]]:
        """Join the parts of each reply into one message. Return the conversation and its digests."""
        together: list[Message] = []
        read: list[bytes] = []
        at = 0
        while at < len(messages):
            before = read[-1] if read else START
            (key,) = self.keys(before, messages[at : at + 1])
            end = self._end_of_parts(before, messages, at) if key in self._parts else 0
            if not end:
                together.append(messages[at])
                read.append(key)
                at += 1
                continue
            parts = [message for message in messages[at:end] if message.role == "assistant"]
            answers = [message for message in messages[at:end] if message.role != "assistant"]
            reply = join_parts(parts)
            together += (reply, *answers)
            read += self.keys(before, (reply, *answers))
            at = end
        return together, read

    def has_call(self, id: str) -> bool:
        """Return whether a reply of the session has a call with this id."""
        return id in self._call_ids

    def keys(self, before: bytes, messages: Sequence[Message]) -> list[bytes]:
        """Return the digest of the conversation up to each message. `before`: digest of the earlier messages."""
        return chain_digests(before, messages, self._aliases)

    def with_thoughts(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Put thoughts that the client left out back into its conversation, from the latest equal reply of the session.
        Return the conversation unchanged if no thought is missing."""
        if not self._thoughts:
            return messages
        restored = list(messages)
        for at, message in enumerate(messages):
            if message.role == "assistant" and not thought_of(message):
                thought = self._thoughts.get(digest(message_key(message)))
                restored[at] = message if thought is None else replace(message, reasoning=thought)
        return messages if all(map(operator.is_, restored, messages)) else restored

    def add_reply(self, before: bytes, reply: Message, line: int, place: int) -> bytes:
        """Record a reply of the session. Return the digest of the conversation up to and including the reply.

        Args:
            before: digest of the conversation before the reply.
            reply: reply with the session's call ids. A call id that occurs again identifies no call from then on.
            line: number of the reply's lane.
        """
        if thought_of(reply):
            self._thoughts[digest(message_key(reply))] = reply.reasoning or ""
        keys = chain_digests(before, [reply])
        self.add_messages(before, [reply], keys, line)
        for call in reply.tool_calls:
            if call.id in self._call_ids:
                self._calls.pop(call.id, None)
            else:
                self._calls[call.id] = place, call
            self._call_ids.add(call.id)
        return keys[0]

    def add_messages(self, before: bytes, messages: Sequence[Message], keys: Sequence[bytes], line: int) -> None:
        """Record messages of a client.

        Args:
            before: digest of the prefix.
            keys: `keys[i]` is the digest of the prefix and `messages[:i + 1]`.
            line: number of the messages' lane.
        """
        for message, key in zip(messages, keys, strict=True):
            self.lines[key] = line
            if message.tool_calls:
                self._add_parts(before, message)
                for form in other_forms(message):
                    other = digest(before + message_key(form))
                    if other not in self.lines:
                        self._aliases[other] = key
                        self._add_parts(before, form)
            before = key

    def _add_parts(self, before: bytes, reply: Message) -> None:
        """Record the digests of the first parts of a reply with several calls, which may come back in parts."""
        if len(reply.tool_calls) > 1:
            begun = ReplyDigest(before, replace(reply, tool_calls=()))
            self._parts.update(begun.goes_on((call,)) for call in reply.tool_calls[:-1])

    def _end_of_parts(self, before: bytes, messages: Sequence[Message], start: int) -> int:
        """Return the index after the last part of a reply whose first part is at `start`; 0 if the parts make no
        recorded reply, or if they are recorded as separate replies."""
        reply, end = ReplyDigest(before, messages[start]), 0
        last = messages[start].tool_calls[-1]
        for at in range(start + 1, len(messages)):
            part = messages[at]
            if part.role == "tool":
                continue
            if part.role != "assistant" or part.content.strip() or not part.tool_calls:
                break
            if self._of_two_replies(last, part.tool_calls[0]):
                break
            last, key = part.tool_calls[-1], reply.goes_on(part.tool_calls)
            if self._aliases.get(key, key) in self.lines:
                end = at + 1
            elif key not in self._parts:
                break
        if end and self.keys(before, messages[start:end])[-1] in self.lines:
            return 0
        return end

    def _of_two_replies(self, *calls: ToolCall) -> bool:
        """Return whether the session gave the ids of these calls to different replies."""
        places = {self._calls[call.id][0] if call.id in self._calls else None for call in calls}
        return len(places) > 1 and None not in places
