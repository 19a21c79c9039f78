"""Reader of a reply in pieces while it is sampled."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from sparring.protocols import Renderer, ReplyReader
from sparring.reply import ReplyHead, ReplyRequest, ShownReply, overlap
from sparring.types import Message, ReplyPiece, ToolCall

Decode = Callable[[Sequence[int]], str]

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class StopHolder:
    """Buffer of the ids at the end of a reply whose text may be a part of a stop string.

    Args:
        strings: stop strings of the client; a stop string and the text after it are not shown.
        decode: ids -> text.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings, self._decode = tuple(strings), decode
        self._waiting: tuple[int, ...] = ()
        self._over = False

    def add(self, tokens: Sequence[int]) -> Sequence[int]:
        """Add ids, and return the ids that certainly lie before any stop string."""
        if self._over or not self._strings:
            return () if self._over else tokens
        waiting = (*self._waiting, *tokens)
        text = self._decode(waiting).rstrip(_BROKEN)
        end = first_of(text, self._strings)
        self._over = end is not None
        at = len(text) - max(overlap(text, string) for string in self._strings) if end is None else end[0]
        whole = num_before(waiting, at, self._decode)
        self._waiting = waiting[whole:]
        return waiting[:whole]


class PieceReader:
    """Reader of one reply in pieces. Each piece is yielded as soon as it is certain.

    Args:
        head: reply's head, which is yielded before the first piece.
        holder: buffer of the ids that may be part of a stop string.
        calls: prefix of the ids of the reply's calls.
    """

    def __init__(self, reader: ReplyReader, head: ReplyHead, *, holder: StopHolder, calls: str) -> None:
        self._reader = reader
        self._head: ReplyHead | None = head
        self._shown, self.calls = ShownReply(), calls
        self._holder = holder
        self._num_calls = 0

    def read(self, tokens: Sequence[int]) -> Iterator[ReplyHead | ReplyPiece]:
        """Read further ids of the reply; yield the new pieces."""
        yield from self._begin()
        for piece in self._reader.read(self._holder.add(tokens)):
            if piece.call is not None:
                piece = ReplyPiece(kind="call", call=_with_call_id(piece.call, self._num_calls, self.calls))
                self._num_calls += 1
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


def without_stop(
    message: Message, request: ReplyRequest, tokens: Sequence[int], prompt: Sequence[int], renderer: Renderer
) -> tuple[Message, str | None]:
    """Return a reply up to its earliest stop string of the client, and that string; the whole reply and None if it has
    no stop string. A call that a stop string cuts is malformed and has no name, so that no client gets a cut call as a
    call. `prompt`: ids before the reply, as for `Renderer.parse`."""
    strings, thought = request.stop, message.reasoning or ""
    if (end := first_of(thought, strings)) is not None:
        return replace(message, reasoning=thought[: end[0]] or None, content="", tool_calls=()), end[1]
    if (end := first_of(message.content, strings)) is not None:
        message = replace(message, content=message.content[: end[0]])
    text = renderer.decode(tokens) if strings and message.tool_calls else ""
    if (found := first_of(text, strings)) is None:
        return message, end and end[1]
    tokens = tokens[: num_before(tokens, found[0], renderer.decode)]
    before = renderer.parse(tokens, request.callable, prompt=prompt)
    begun = renderer.decode(tokens)
    rest = text[len(begun.rstrip()) : found[0]]
    if not before.tool_calls:
        content = before.content.rstrip() + rest if rest.strip() else before.content
        return replace(message, content=content, tool_calls=()), found[1]
    pieces = renderer.reader(request.callable, prompt=prompt).read(tokens)
    closed = sum(piece.call is not None for piece in pieces)
    calls, last = before.tool_calls[:-1], before.tool_calls[-1]
    if closed <= len(calls) and last.arguments is None:
        last = replace(last, name="", raw=(last.raw + rest).rstrip())
    return replace(message, tool_calls=(*calls, last)), found[1]


def named(reply: Message, calls: str) -> Message:
    """Return a reply whose calls have ids with the prefix `calls`. Ids of the chat format stay."""
    if not reply.tool_calls:
        return reply
    return replace(reply, tool_calls=tuple(_with_call_id(call, at, calls) for at, call in enumerate(reply.tool_calls)))


def _with_call_id(call: ToolCall, at: int, calls: str) -> ToolCall:
    return replace(call, id=f"{calls}{at}") if call.id == f"call_{at}" else call


def first_of(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Return the index of the earliest of some strings in a text, and that string; None if the text contains none of
    the strings."""
    return min(((at, string) for string in strings if (at := text.find(string)) >= 0), default=None)


def num_before(tokens: Sequence[int], end: int, decode: Decode) -> int:
    """Return the number of leading ids whose text has at most `end` characters."""
    return bisect_right(range(1, len(tokens) + 1), end, key=lambda count: len(decode(tokens[:count])))
