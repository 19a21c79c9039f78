"""Forms in which clients send the replies of a session back, and which conversation each of them is."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from sparring.record.identity import (
    ReplyDigest,
    chained,
    digest,
    joined,
    message_key,
    other_forms,
    put_together,
    thought_of,
)
from sparring.record.lines import START
from sparring.types import Message, ToolCall


class Forms:
    """Forms of what a session said and was told: the digest of a conversation is that of the recorded one, whatever its
    client made of the replies in it.

    A reply that comes back in parts is known by the ids of its calls. Where its client has ids of its own, it is known
    by what it calls: its calls, each before its answer, are one reply where that is recorded and they, as they stand,
    are not.

    Attributes:
        lines: number of the latest line of turns that has a conversation, by its digest, for all that were recorded.
    """

    def __init__(self) -> None:
        self.lines: dict[bytes, int] = {}
        self._aliases: dict[bytes, bytes] = {}
        self._parts: set[bytes] = set()
        self._calls: dict[str, tuple[int, ToolCall]] = {}
        self._call_ids: set[str] = set()
        self._thoughts: dict[bytes, str] = {}

    def read(self, messages: Sequence[Message]) -> tuple[Sequence[Message], list[bytes]]:
        """Return a conversation with each reply as one message, and the digests of the conversation up to each.

        Args:
            messages: as they were sent; returned as they are where nothing is to be put together.
        """
        keys = self.keys(START, messages)
        last = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].role == "assistant"), None)
        if last is None or keys[last] in self.lines:
            return messages, keys
        together = put_together(messages, self._calls)
        if together is not messages:
            messages, keys = together, self.keys(START, together)
        if not self._parts or self._parts.isdisjoint(keys):
            return messages, keys
        return self._parts_together(messages)

    def _parts_together(self, messages: Sequence[Message]) -> tuple[Sequence[Message], list[bytes]]:
        """Return a conversation with the parts of each reply as one message, and its digests."""
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
            reply = joined(parts)
            together += (reply, *answers)
            read += self.keys(before, (reply, *answers))
            at = end
        return together, read

    def has_call(self, id: str) -> bool:
        """Return whether a reply that the session gave has a call with this id."""
        return id in self._call_ids

    def keys(self, before: bytes, messages: Sequence[Message]) -> list[bytes]:
        """Return the digests of a conversation up to each of the messages that follow one with a digest."""
        return chained(before, messages, self._aliases)

    def with_thoughts(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return a conversation whose client left thoughts out with these put back: of a reply that the session gave,
        the latest such. It is returned as it is where there are none."""
        if not self._thoughts:
            return messages
        restored = list(messages)
        for at, message in enumerate(messages):
            if message.role == "assistant" and not thought_of(message):
                thought = self._thoughts.get(digest(message_key(message)))
                restored[at] = message if thought is None else replace(message, reasoning=thought)
        return messages if all(map(operator.is_, restored, messages)) else restored

    def said(self, before: bytes, reply: Message, line: int, place: int) -> bytes:
        """Take note of a reply that the session gave. Return the digest of the conversation up to it.

        Args:
            before: digest of the conversation before it.
            reply: with ids of its own calls; an id that is given again tells nothing from then on.
            line: number of its line of turns.
            place: of its segment.
        """
        if thought_of(reply):
            self._thoughts[digest(message_key(reply))] = reply.reasoning or ""
        keys = chained(before, [reply])
        self.told(before, [reply], keys, line)
        for call in reply.tool_calls:
            if call.id in self._call_ids:
                self._calls.pop(call.id, None)
            else:
                self._calls[call.id] = place, call
            self._call_ids.add(call.id)
        return keys[0]

    def told(self, before: bytes, messages: Sequence[Message], keys: Sequence[bytes], line: int) -> None:
        """Take note of messages that follow a conversation.

        Args:
            before: digest of the conversation.
            messages: that follow it.
            keys: digests up to each of them.
            line: number of their line of turns.
        """
        for message, key in zip(messages, keys, strict=True):
            self.lines[key] = line
            if message.tool_calls:
                self._note_parts(before, message)
                for form in other_forms(message):
                    other = digest(before + message_key(form))
                    if other not in self.lines:
                        self._aliases[other] = key
                        self._note_parts(before, form)
            before = key

    def _note_parts(self, before: bytes, reply: Message) -> None:
        """Take note of what a reply with several calls begins with, when it comes back in parts."""
        if len(reply.tool_calls) > 1:
            begun = ReplyDigest(before, replace(reply, tool_calls=()))
            self._parts.update(begun.goes_on((call,)) for call in reply.tool_calls[:-1])

    def _end_of_parts(self, before: bytes, messages: Sequence[Message], start: int) -> int:
        """Return the place after the last part of a reply whose first part stands at `start`; 0 where the parts make no
        recorded reply, or are recorded as they stand."""
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
        """Return whether calls have ids that the session gave to different replies."""
        places = {self._calls[call.id][0] if call.id in self._calls else None for call in calls}
        return len(places) > 1 and None not in places
