"""Parsing of a reply while it is sampled, in pieces that no later id can change.

The pieces together are a prefix of the result of `parse` for the whole reply. Undecided text waits: blanks at the end
of a text, the beginning of a tag, an incomplete character, a call without its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from sparring.render.hermes import CLOSE, OPEN, THINK, THINK_END, call_in
from sparring.render.tags import Marks
from sparring.reply import overlap
from sparring.types import ReplyPiece, ToolCall

TextKind = Literal["reasoning", "text"]
"""Kind of a piece of text."""

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_FEW = 8
"""Maximum number of ids that one character takes. A longer run of undecodable ids is decoded again only when its length
has doubled."""


class HoldingReader:
    """Reader of a format that can only be parsed at the end: it emits nothing. Implements `ReplyReader`."""

    def read(self, tokens: Sequence[int]) -> Sequence[ReplyPiece]:
        return ()


class Decoding:
    """Incremental decoding of the ids of a byte-level tokenizer. An incomplete character waits for its last byte."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._waiting: list[int] = []
        self._next = 0

    def add(self, tokens: Sequence[int]) -> str:
        """Add ids; return the text that they complete."""
        self._waiting += tokens
        if len(self._waiting) < self._next:
            return ""
        text = self._decode(self._waiting)
        if text.endswith(_BROKEN):
            self._next = 2 * len(self._waiting) if len(self._waiting) > _FEW else 0
            return ""
        self._waiting, self._next = [], 0
        return text

    @property
    def waits(self) -> bool:
        """Return True while ids of an incomplete character wait."""
        return bool(self._waiting)

    def rest(self) -> str:
        """Return the text of the ids that still wait, at the end of a text."""
        waiting, self._waiting, self._next = self._waiting, [], 0
        return self._decode(waiting) if waiting else ""


class StrippedText:
    """Text of one kind (reasoning or text) as it comes, stripped at both ends.

    Args:
        blanks: characters to strip; None for all whitespace.

    Attributes:
        has_text: whether a character other than whitespace came.
    """

    def __init__(self, blanks: str | None = None) -> None:
        self._chars = blanks
        self.has_text = False
        self._waiting = ""

    def add(self, text: str) -> str:
        """Add text; return the part that is decided. Blanks at the end wait."""
        text = self._waiting + text
        if not self.has_text:
            text = text.lstrip(self._chars)
            self.has_text = bool(text.strip())
        body = text.rstrip(self._chars) if self.has_text else ""
        self._waiting = text[len(body) :]
        return body

    def rest(self) -> str:
        """Return the waiting blanks that are not stripped, at the end of the text; a text of blanks alone is empty."""
        waiting, self._waiting = self._waiting, ""
        return waiting.rstrip(self._chars) if self.has_text else ""


class TaggedReader:
    """Reader of a format whose tags are single ids. Implements `ReplyReader`.

    Args:
        decode: ids -> text, for a byte-level tokenizer.
        parse: parses a call, given its ids with tags and the number of earlier calls.
        thinking: whether the prompt ended inside a thought.

    Attributes:
        undecided: number of ids before the first undecided one, while a call is open or the rest of the reply is held;
            otherwise None.
    """

    def __init__(
        self,
        marks: Marks,
        decode: Callable[[Sequence[int]], str],
        parse: Callable[[Sequence[int], int], Sequence[ToolCall]],
        *,
        thinking: bool,
    ) -> None:
        self.undecided: int | None = None
        self._marks = marks
        single = (marks.think, marks.think_end, marks.call, marks.call_end, marks.middle, marks.section_end)
        self._tags = {tag for tag in single if tag is not None} | marks.opens | marks.ends
        self._parse = parse
        self._decoding = Decoding(decode)
        self._texts: dict[TextKind, StrippedText] = {
            "reasoning": StrippedText(),
            "text": StrippedText(marks.tags.blanks),
        }
        self._state = "thought" if thinking else "start"
        self._may_call = thinking  # whether a call may still end a thought that the prompt began
        self._num_ids = 0
        self._beginning = ""  # undecided text at the beginning of the reply
        self._waiting = ""  # characters that may spell a tag
        self._call: list[int] = []
        self._ends = True  # whether a closing tag would end the open call
        self._num_calls = 0

    def read(self, tokens: Sequence[int]) -> Sequence[ReplyPiece]:
        pieces: list[ReplyPiece] = []
        plain: list[int] = []
        for token in tokens:
            if self._num_ids == 0 and token in self._marks.control and token not in self._tags - self._marks.heads:
                self._hold()  # the head of a turn, which the format's parser may skip
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
            self._num_ids += 1
        if plain:
            self._add(plain, pieces)
        return pieces

    def _hold(self) -> None:
        self._state, self.undecided = "held", self._num_ids

    def _add_tag(self, token: int, pieces: list[ReplyPiece]) -> None:
        marks, state = self._marks, self._state
        if state == "held":
            return
        if token in marks.ends:
            self._state = "ended"
        elif state == "call":
            self._add_to_call(token, pieces)
        elif state == "after":
            self._add_tag_after_text(token)
        elif state == "thought":
            self._add_tag_to_thought(token, pieces)
        elif token in marks.opens:
            self._end_text(token, pieces)
        elif token in (marks.think, marks.think_end):
            self._add_tag_to_text(token, pieces)
        else:
            self._add([token], pieces)

    def _end_text(self, token: int, pieces: list[ReplyPiece]) -> None:
        self._end_run("text", pieces)
        if self._state == "held":
            return
        if self._marks.tags.goes_on:
            self._hold()
            return
        blanks = self._texts["text"].rest()
        if blanks:
            pieces.append(ReplyPiece(kind="text", text=blanks))
        self._add_tag_after_text(token)

    def _add_tag_after_text(self, token: int) -> None:
        marks = self._marks
        self._state = "after"
        if token == marks.call:
            self._state, self._call, self._ends = "call", [token], marks.middle is None
            self.undecided = self._num_ids
        elif token == marks.section_end:
            self._state = "ended"

    def _add_to_call(self, token: int, pieces: list[ReplyPiece]) -> None:
        marks = self._marks
        if token == marks.section_end:  # the section ends inside a call
            self._state = "held"
            return
        self._call.append(token)
        self._ends = self._ends or token == marks.middle
        if token == marks.call_end and self._ends:
            self._state, self.undecided = "after", None
            for call in self._parse(self._call, self._num_calls):
                pieces.append(ReplyPiece(kind="call", call=call))
                self._num_calls += 1

    def _add_tag_to_thought(self, token: int, pieces: list[ReplyPiece]) -> None:
        marks = self._marks
        if token == marks.think_end:
            self._end_run("reasoning", pieces)
            self._state = "text" if self._state == "thought" else "held"
        elif token == marks.think:
            if marks.tags.thinks_again:
                self._end_run("reasoning", pieces)
            self._may_call = False
        elif token in marks.opens and self._nothing_thought():
            self._hold()
        else:  # a call drafted inside a thought is text of the thought
            self._add([token], pieces)

    def _nothing_thought(self) -> bool:
        """Return whether a thought that the prompt began is blank so far."""
        return self._may_call and not self._texts["reasoning"].has_text and not self._decoding.waits

    def _add_tag_to_text(self, token: int, pieces: list[ReplyPiece]) -> None:
        """Handle a tag of a thought outside an open thought."""
        marks, again = self._marks, self._marks.tags.thinks_again
        if self._state == "start" and token == marks.think:
            self._end_run("text", pieces)
            if self._state == "start":
                self._state = "thought"
                if not again:  # the blanks before a thought are no text
                    self._texts["text"] = StrippedText(marks.tags.blanks)
                return
        if self._state == "held":
            return
        if again and token == marks.think_end:
            self._end_run("text", pieces)
        else:
            self._add([token], pieces)

    def _end_run(self, kind: TextKind, pieces: list[ReplyPiece]) -> None:
        text = self._decoding.rest()
        if self._state == "start":
            text, self._beginning = self._beginning + text, ""
            self._state = "text" if text.strip() else "start"
        self._show(kind, text, pieces)
        waiting, self._waiting = self._waiting, ""
        if self._state != "held":
            self._piece(kind, waiting, pieces)

    def _add(self, tokens: Sequence[int], pieces: list[ReplyPiece]) -> None:
        text = self._decoding.add(tokens)
        if self._state == "start":
            text = self._begin(text)
        if text:
            self._show("reasoning" if self._state == "thought" else "text", text, pieces)

    def _begin(self, text: str) -> str:
        """Return the text of a reply's beginning once it is known to be text."""
        self._beginning += text
        start = self._beginning.lstrip()
        if any(start.startswith(beginning) for beginning in self._marks.undecided):
            self._hold()
        elif start and not any(beginning.startswith(start) for beginning in self._marks.undecided):
            self._state, text, self._beginning = "text", self._beginning, ""
            return text
        return ""

    def _show(self, kind: TextKind, text: str, pieces: list[ReplyPiece]) -> None:
        if self._state == "held":
            return
        spelled = self._marks.tags.spelled
        if spelled and kind == "reasoning" and self._nothing_thought():
            text = self._waiting + text
            start = text.lstrip()
            if start.startswith(spelled[0]):
                self._hold()
            waits = start.startswith(spelled[0]) or spelled[0].startswith(start)
            text, self._waiting = ("", text) if waits else (text, "")
        elif spelled and kind == "text":
            text = self._waiting + text
            at = min((at for tag in spelled if (at := text.find(tag)) >= 0), default=None)
            if at is None:
                at = len(text) - max(overlap(text, tag) for tag in spelled)
            else:
                self._hold()
            text, self._waiting = text[:at], text[at:]
        self._piece(kind, text, pieces)

    def _piece(self, kind: TextKind, text: str, pieces: list[ReplyPiece]) -> None:
        piece_text = self._texts[kind].add(text)
        if piece_text:
            pieces.append(ReplyPiece(kind=kind, text=piece_text))


class TextReader:
    """Reader of the replies that `hermes.parse_reply` parses, whose tags are text. Implements `ReplyReader`.

    Args:
        decode: ids -> text, for a byte-level tokenizer.
        stop: ids that end a turn.
        thinking: whether the prompt ended inside a thought.
        calls: whether there are tools to call; otherwise text that looks like a call stays text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[int],
        *,
        thinking: bool,
        calls: bool = True,
    ) -> None:
        self._stop = frozenset(stop)
        self._thinking, self._may_call = thinking, calls
        self._decoding, self._stripped = Decoding(decode), StrippedText()
        self._state = "start"
        self._text = ""  # undecided text
        self._looked = 0  # number of its characters that were searched for the end of a call
        self._num_calls = 0

    def read(self, tokens: Sequence[int]) -> Sequence[ReplyPiece]:
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
        """Advance the parser; return True while it made progress."""
        if self._state == "start":
            return self._start()
        if self._state == "thought":
            return self._until(THINK_END, "reasoning", "text", pieces)
        if self._state == "text":
            return self._until(OPEN if self._may_call else None, "text", "call", pieces)
        return self._state != "ended" and self._calls(pieces)

    def _start(self) -> bool:
        text = self._text.lstrip()
        if THINK.startswith(text) and text != THINK:  # an incomplete tag waits for its rest
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

    def _until(self, tag: str | None, kind: TextKind, state: str, pieces: list[ReplyPiece]) -> bool:
        """Emit the text before a tag, except for an end that may begin the tag; without a tag, emit all text."""
        text, ended, rest = (self._text, "", "") if tag is None else self._text.partition(tag)
        if tag is not None and not ended:
            waiting = overlap(text, tag)
            text, rest = text[: len(text) - waiting], text[len(text) - waiting :]
        self._text = rest
        piece_text = self._stripped.add(text)
        if piece_text:
            pieces.append(ReplyPiece(kind=kind, text=piece_text))
        if ended:
            self._state, self._stripped = state, StrippedText()
        return bool(ended)

    def _calls(self, pieces: list[ReplyPiece]) -> bool:
        """Emit a call that its closing tag, or the next call, ends; look for the next one."""
        if self._state == "after":
            _, opened, rest = self._text.partition(OPEN)
            self._text = rest if opened else self._text[len(self._text) - overlap(self._text, OPEN) :]
            self._state = "call" if opened else "after"
            return bool(opened)
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
