"""Reader of a reply in pieces while it is sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sparring.protocols import ReplyReader
from sparring.reply import ReplyHead, ShownReply
from sparring.types import Message, ReplyPiece, ToolCall


class StopHolder:
    """Buffer of the end of a reply's text that may be the beginning of a stop string.

    Args:
        strings: stop strings of the client; they and the text after them are not shown.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._waiting = ""
        self._over = False

    def add(self, text: str) -> str:
        """Add text, and return the text that certainly belongs to the reply."""
        if self._over:
            return ""
        text = self._waiting + text
        end = first_of(text, self._strings)
        if end is not None:
            self._over, self._waiting = True, ""
            return text[: end[0]]
        waiting = max(_overlap(text, string) for string in self._strings)
        self._waiting = text[len(text) - waiting :]
        return text[: len(text) - waiting]


class PieceReader:
    """Reader of one reply in pieces, each as soon as it is certain.

    Args:
        reader: reader of the reply's format.
        head: head, which is yielded before the first piece.
        stop: stop strings of the client.
        calls: prefix of the ids of its calls.
    """

    def __init__(self, reader: ReplyReader, head: ReplyHead, *, stop: Sequence[str], calls: str) -> None:
        self._reader = reader
        self._head: ReplyHead | None = head
        self._shown, self.calls = ShownReply(), calls
        self._holders = {kind: StopHolder(stop) for kind in ("reasoning", "text")} if stop else {}
        self._num_calls = 0

    def read(self, tokens: Sequence[int]) -> Iterator[ReplyHead | ReplyPiece]:
        """Read further ids of the reply; yield the new pieces."""
        yield from self._begin()
        for piece in self._reader.read(tokens):
            if piece.call is not None:
                piece = ReplyPiece(kind="call", call=_with_call_id(piece.call, self._num_calls, self.calls))
                self._num_calls += 1
            elif self._holders:
                text = self._holders[piece.kind].add(piece.text)
                if not text:
                    continue
                piece = ReplyPiece(kind=piece.kind, text=text)
            self._shown.add(piece)
            yield piece

    def rest(self, message: Message) -> Iterator[ReplyHead | ReplyPiece]:
        """Yield the pieces of the complete reply that were not yielded before."""
        yield from self._begin()
        yield from self._shown.rest(message)

    def _begin(self) -> Iterator[ReplyHead]:
        if self._head is not None:
            head, self._head = self._head, None
            yield head


def without_stop(message: Message, strings: Sequence[str]) -> tuple[Message, str | None]:
    """Return a reply up to its earliest stop string, and that string; the whole reply and None if it has no stop
    string."""
    thought = message.reasoning or ""
    if (end := first_of(thought, strings)) is not None:
        return replace(message, reasoning=thought[: end[0]]), end[1]
    if (end := first_of(message.content, strings)) is not None:
        return replace(message, content=message.content[: end[0]]), end[1]
    return message, None


def named(reply: Message, calls: str) -> Message:
    """Return a reply whose calls have ids with the prefix `calls`. Ids of the chat format stay."""
    if not reply.tool_calls:
        return reply
    return replace(reply, tool_calls=tuple(_with_call_id(call, at, calls) for at, call in enumerate(reply.tool_calls)))


def _with_call_id(call: ToolCall, at: int, calls: str) -> ToolCall:
    return replace(call, id=f"{calls}{at}") if call.id == f"call_{at}" else call


def first_of(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Return the index of the earliest of some strings in a text, and that string; None if the text has none of
    them."""
    return min(((at, string) for string in strings if (at := text.find(string)) >= 0), default=None)


def _overlap(text: str, string: str) -> int:
    """Return the number of characters at the end of a text that may begin a string."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if string.startswith(text[-length:]):
            return length
    return 0
