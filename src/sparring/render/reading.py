"""Reading a reply while it is sampled: what no later id can change, in pieces.

Together the pieces are a beginning of what `parse` says of the whole reply. What is not decided yet waits: the blanks
at the end of a text, the beginning of a tag, an unfinished character, a call without its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sparring.render.hermes import CLOSE, OPEN, THINK, THINK_END, call_in
from sparring.types import Message, ReplyPiece

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_FEW = 8
"""Ids that one character may take; more that do not end a character are looked at ever more rarely."""


class HoldingReader:
    """Reader of a format of which nothing is decided before the end. Implements `ReplyReader`."""

    def read(self, tokens: Sequence[int]) -> Sequence[ReplyPiece]:
        """Return nothing."""
        return ()


class Decoding:
    """Text of ids as they come, of a tokenizer of bytes. An unfinished character waits for its last byte."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._waiting: list[int] = []
        self._next = 0

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that these ids decide."""
        self._waiting += tokens
        if len(self._waiting) < self._next:
            return ""
        text = self._decode(self._waiting)
        if text.endswith(_BROKEN):
            self._next = 2 * len(self._waiting) if len(self._waiting) > _FEW else 0
            return ""
        self._waiting, self._next = [], 0
        return text

    def rest(self) -> str:
        """Return the text of the ids that wait, which no other id follows."""
        waiting, self._waiting, self._next = self._waiting, [], 0
        return self._decode(waiting) if waiting else ""


class Shown:
    """Text of one kind without the blanks at both its ends, as it comes."""

    def __init__(self) -> None:
        self._begun = False
        self._blanks = ""

    def add(self, text: str) -> str:
        """Return the text that is decided."""
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        text = self._blanks + text
        body = text.rstrip()
        self._blanks = text[len(body) :]
        return body


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Ids of the tags of a format, and those that end a turn."""

    think: int
    think_end: int
    call: int
    call_end: int
    stop: frozenset[int]
    control: frozenset[int]


class TaggedReader:
    """Reader of a format whose tags are single ids: a thought, a text, calls. Implements `ReplyReader`.

    Args:
        marks: of the format.
        decode: ids to text, byte by byte.
        parse: reads the ids of one call, its tags included.
        thinking: whether the prompt ended inside a thought.
    """

    def __init__(
        self,
        marks: Marks,
        decode: Callable[[Sequence[int]], str],
        parse: Callable[[Sequence[int]], Message],
        *,
        thinking: bool,
    ) -> None:
        self._marks = marks
        self._tags = {marks.think, marks.think_end, marks.call, marks.call_end, *marks.stop}
        self._parse = parse
        self._decoding, self._shown = Decoding(decode), Shown()
        self._state = "thought" if thinking else "start"
        self._any = False
        self._tail = ""  # the last characters of a thought, which may spell its end
        self._call: list[int] = []
        self._num_calls = 0

    def read(self, tokens: Sequence[int]) -> Sequence[ReplyPiece]:
        """Take the next ids; return the pieces that they decide."""
        pieces: list[ReplyPiece] = []
        plain: list[int] = []
        for token in tokens:
            if not self._any and token in self._marks.control and token not in self._tags:
                self._state = "held"  # the head of a turn, which the format may pass over
            self._any = True
            if self._state in ("held", "ended"):
                return pieces
            if token in self._tags:
                if plain:
                    self._add(plain, pieces)
                    plain = []
                self._add_tag(token, pieces)
            elif self._state == "call":
                self._call.append(token)
            elif self._state != "after":
                plain.append(token)
        if plain:
            self._add(plain, pieces)
        return pieces

    def _add_tag(self, token: int, pieces: list[ReplyPiece]) -> None:
        marks, state = self._marks, self._state
        if state == "held":
            return
        if token in marks.stop:
            self._state = "ended"
        elif state == "call":
            self._call.append(token)
            if token == marks.call_end:
                self._end_call(pieces)
        elif state == "thought":
            self._add_tag_to_thought(token, pieces)
        elif token == marks.call:
            if state != "after":
                self._show("text", self._decoding.rest(), pieces)
            self._state, self._call = "call", [token]
        elif state == "start" and token == marks.think:
            before = self._decoding.rest()
            self._state = "text" if before.strip() else "thought"
            if self._state == "text":
                self._show("text", before, pieces)
                self._add([token], pieces)
        elif state != "after":
            self._add([token], pieces)

    def _add_tag_to_thought(self, token: int, pieces: list[ReplyPiece]) -> None:
        if token == self._marks.call_end:
            self._add([token], pieces)
        elif token == self._marks.think_end:
            self._show("reasoning", self._decoding.rest(), pieces)
            self._state, self._shown = "text" if self._state == "thought" else "held", Shown()
        elif token == self._marks.call:  # it ends the thought, unless the thought's own end comes later
            self._show("reasoning", self._decoding.rest(), pieces)
            self._state = "held"

    def _add(self, tokens: Sequence[int], pieces: list[ReplyPiece]) -> None:
        """Take ids that are text where they stand."""
        text = self._decoding.add(tokens)
        if self._state == "start" and text.strip():
            self._state = "text"
        self._show("reasoning" if self._state == "thought" else "text", text, pieces)

    def _show(self, kind: str, text: str, pieces: list[ReplyPiece]) -> None:
        if kind == "reasoning":
            self._tail = self._tail[-len(THINK_END) :] + text
            if THINK_END in self._tail:
                self._state = "held"  # spelled, not the tag: formats differ in what it ends
                return
        shown = self._shown.add(text)
        if shown:
            pieces.append(ReplyPiece(kind="reasoning" if kind == "reasoning" else "text", text=shown))

    def _end_call(self, pieces: list[ReplyPiece]) -> None:
        self._state = "after"
        for call in self._parse(self._call).tool_calls:
            id = f"call_{self._num_calls}" if call.id == "call_0" else call.id
            pieces.append(ReplyPiece(kind="call", call=replace(call, id=id)))
            self._num_calls += 1


class TextReader:
    """Reader of replies that `hermes.parse_reply` parses, whose tags are text. Implements `ReplyReader`.

    Args:
        decode: ids to text, byte by byte.
        stop: ids that end a turn.
        thinking: whether the prompt ended inside a thought.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[int], *, thinking: bool) -> None:
        self._stop = frozenset(stop)
        self._thinking = thinking
        self._decoding, self._shown = Decoding(decode), Shown()
        self._state = "start"
        self._text = ""  # that is not decided
        self._looked = 0  # its characters in which no end of a call is
        self._num_calls = 0

    def read(self, tokens: Sequence[int]) -> Sequence[ReplyPiece]:
        """Take the next ids; return the pieces that they decide."""
        if self._state == "ended":
            return ()
        end = next((at for at, token in enumerate(tokens) if token in self._stop), None)
        self._text += self._decoding.add(tokens if end is None else tokens[:end])
        pieces: list[ReplyPiece] = []
        while self._step(pieces):
            pass
        if end is not None:
            self._state = "ended"
        return pieces

    def _step(self, pieces: list[ReplyPiece]) -> bool:
        """Decide something of the text; return whether more may be decided."""
        if self._state == "start":
            return self._start()
        if self._state == "thought":
            return self._until(THINK_END, "reasoning", "text", pieces)
        if self._state == "text":
            return self._until(OPEN, "text", "call", pieces)
        return self._state != "ended" and self._calls(pieces)

    def _start(self) -> bool:
        text = self._text.lstrip()
        if THINK.startswith(text):  # it may become the tag, and is it where nothing is left out
            if text != THINK:
                return False
        if text.startswith(THINK):
            self._state, self._text = "thought", text[len(THINK) :]
        elif self._thinking:
            if len(text) < len(THINK_END) and THINK_END.startswith(text):
                return False
            self._state = "thought"
        else:
            self._state = "text"
        return True

    def _until(self, tag: str, kind: str, state: str, pieces: list[ReplyPiece]) -> bool:
        """Show the text before a tag, or what cannot be its beginning."""
        text, ended, rest = self._text.partition(tag)
        if not ended:
            waiting = overlap(text, tag)
            text, rest = text[: len(text) - waiting], text[len(text) - waiting :]
        self._text = rest
        shown = self._shown.add(text)
        if shown:
            pieces.append(ReplyPiece(kind="reasoning" if kind == "reasoning" else "text", text=shown))
        if ended:
            self._state, self._shown = state, Shown()
        return bool(ended)

    def _calls(self, pieces: list[ReplyPiece]) -> bool:
        """Show a call that is whole, or that another one ends; look for the next."""
        if self._state == "after":
            _, begun, rest = self._text.partition(OPEN)
            self._text = rest if begun else self._text[len(self._text) - overlap(self._text, OPEN) :]
            self._state = "call" if begun else "after"
            return bool(begun)
        first = max(0, self._looked - len(CLOSE))
        ends = [(at, tag) for tag in (CLOSE, OPEN) if (at := self._text.find(tag, first)) >= 0]
        self._looked = len(self._text)
        if not ends:
            return False
        at, tag = min(ends)
        block, self._text, self._looked = self._text[: at + len(tag)], self._text[at + len(tag) :], 0
        self._state = "after" if tag == CLOSE else "call"
        call = call_in(self._num_calls, block if tag == CLOSE else block[: -len(tag)])
        pieces.append(ReplyPiece(kind="call", call=call))
        self._num_calls += 1
        return True


def overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of a text may begin a tag."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
