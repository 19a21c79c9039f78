"""Parsing of a reply in the Hermes format, for models without a library renderer: a thought, text, tool calls.

<think> ... </think> text <tool_call>{"name": ..., "arguments": {...}}</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sparring.render.dialect import tool_call
from sparring.render.reply_reader import Decoding, StrippedText, message_of
from sparring.render.tags import CLOSE, OPEN, THINK, THINK_END
from sparring.reply import overlap
from sparring.types import Message, ReplyPiece, ToolCall
from sparring.validation import read_json

_AFTER = {THINK_END: "text", OPEN: "call", CLOSE: "after"}
"""Part of a reply that begins after a tag."""

_BLOCK = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)


class HermesReader:
    """Reader of a reply's text; every text parses.

    Args:
        thinking: whether the prompt ended inside a thought.
        calls: whether there are tools to call; otherwise text that looks like a call stays text.
    """

    def __init__(self, *, thinking: bool, calls: bool) -> None:
        self._thinking = thinking
        self._ends = {"reasoning": (THINK_END,), "text": (OPEN,) * calls, "call": (CLOSE, OPEN), "after": (OPEN,)}
        self._part = "start"
        self._text = ""  # undecided text of the part
        self._looked = 0  # number of characters of `_text` that were searched for the end of the part
        self._stripped = StrippedText()
        self._num_calls = 0

    def add(self, text: str) -> Iterator[ReplyPiece]:
        """Add text; yield the pieces that are decided."""
        self._text += text
        if self._part == "start":
            self._start()
        while self._part != "start":
            tags = self._ends[self._part]
            ends = [(at, tag) for tag in tags if (at := self._text.find(tag, max(0, self._looked - len(tag)))) >= 0]
            if not ends:
                self._looked = len(self._text)
                if self._part in ("reasoning", "text"):
                    yield from self._show(len(self._text) - max((overlap(self._text, tag) for tag in tags), default=0))
                return
            at, tag = min(ends)
            yield from self._show(at, closed=tag == CLOSE)
            self._part, self._text = _AFTER[tag], self._text[len(tag) :]
            self._looked, self._stripped = 0, StrippedText()

    def rest(self) -> Iterator[ReplyPiece]:
        """Yield the pieces that waited for the end of the reply."""
        if self._part == "start":
            self._part = "reasoning" if self._thinking else "text"
        yield from self._show(len(self._text))

    def _start(self) -> None:
        """Find out whether the reply begins with a thought; an incomplete tag is not decided yet."""
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._part, self._text = "reasoning", text[len(THINK) :]
        elif not THINK.startswith(text) and not (self._thinking and THINK_END.removesuffix(">").startswith(text)):
            self._part = "reasoning" if self._thinking else "text"

    def _show(self, end: int, *, closed: bool = False) -> Iterator[ReplyPiece]:
        """Remove the text up to an index, and yield the piece that the client gets for this text."""
        text, self._text, self._looked = self._text[:end], self._text[end:], 0
        if self._part == "call":
            yield ReplyPiece(kind="call", call=call_in(self._num_calls, text + CLOSE if closed else text))
            self._num_calls += 1
        elif self._part in ("reasoning", "text") and (stripped := self._stripped.add(text)):
            yield ReplyPiece(kind="reasoning" if self._part == "reasoning" else "text", text=stripped)


class TextReader:
    """Reader of the sampled ids of a reply in the Hermes format. Implements `ReplyReader`.

    Args:
        decode: ids -> text, for a byte-level tokenizer; for any other, all ids must be read at once.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[int], *, thinking: bool, calls: bool
    ) -> None:
        self._stop, self._is_over = frozenset(stop), False
        self._decoding, self._reader = Decoding(decode), HermesReader(thinking=thinking, calls=calls)

    def read(self, tokens: Sequence[int]) -> Sequence[ReplyPiece]:
        if self._is_over:
            return ()
        end = next((at for at, token in enumerate(tokens) if token in self._stop), None)
        self._is_over = end is not None
        return tuple(self._reader.add(self._decoding.add(tokens if end is None else tokens[:end])))

    def rest(self) -> Sequence[ReplyPiece]:
        """Return the pieces that waited for the end of the reply."""
        return [*self._reader.add(self._decoding.rest()), *self._reader.rest()]


def parse_reply(text: str, *, thinking: bool, calls: bool = True) -> Message:
    """Parse a reply's text, without the token that ended it, as a message. Args: as for `HermesReader`."""
    reader = HermesReader(thinking=thinking, calls=calls)
    return message_of([*reader.add(text), *reader.rest()])


def plain_parts(text: str) -> list[tuple[str, bool]]:
    """Split the text of a reply into pairs of a part and whether this part is plain text. The tags of a complete
    thought at the beginning, and of complete calls, are not plain: data sets write them into the text of a message."""
    parts = []
    if text.lstrip().startswith(THINK) and THINK_END in text:
        thought, _, text = text.partition(THINK_END)
        before, _, thought = thought.partition(THINK)
        parts += [(before + THINK, False), (thought, True), (THINK_END, False)]
    position = 0
    for block in _BLOCK.finditer(text):
        if call_in(0, block[1] + CLOSE).arguments is not None:
            parts += [(text[position : block.start()], True), (OPEN, False), (block[1], True), (CLOSE, False)]
            position = block.end()
    return [*parts, (text[position:], True)]


def call_in(number: int, block: str) -> ToolCall:
    """Parse the text after an opening tag as a call. Text after the closing tag is left out."""
    body, closed, _ = block.partition(CLOSE)
    raw = body.strip()
    parsed: Any = None
    if closed:
        try:
            parsed = read_json(raw)
        except ValueError:
            parsed = None
    fields = parsed if isinstance(parsed, dict) else {}
    return tool_call(f"call_{number}", fields.get("name"), fields.get("arguments", {} if fields else None), raw)
