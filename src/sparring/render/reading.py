"""Reading a reply while it is sampled: what no later id can change, in pieces.

Together the pieces are a beginning of what `parse` says of the whole reply. What is not decided yet waits: the blanks
at the end of a text, the beginning of a tag, an unfinished character, a call without its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparring.render.hermes import CLOSE, OPEN, THINK, THINK_END, call_in
from sparring.render.tags import Marks
from sparring.types import ReplyPiece, ToolCall

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
    """Text of one kind without what does not count at both its ends, as it comes.

    Args:
        blanks: characters that do not count; None for all blanks.
    """

    def __init__(self, blanks: str | None = None) -> None:
        self._chars = blanks
        self._begun = False
        self._waiting = ""

    def add(self, text: str) -> str:
        """Return the text that is decided; blanks alone decide nothing."""
        text = self._waiting + text
        if not self._begun:
            text = text.lstrip(self._chars)
            self._begun = bool(text.strip())
        body = text.rstrip(self._chars) if self._begun else ""
        self._waiting = text[len(body) :]
        return body

    def rest(self) -> str:
        """Return what counts of the blanks that waited, when the text is at its end."""
        waiting, self._waiting = self._waiting, ""
        return waiting.strip(self._chars)


class TaggedReader:
    """Reader of a format whose tags are single ids: a thought, a text, calls. Implements `ReplyReader`.

    Args:
        marks: of the format.
        decode: ids to text, byte by byte.
        parse: reads the ids of one call, its tags included, and how many calls came before.
        thinking: whether the prompt ended inside a thought.

    Attributes:
        undecided: how many ids came before those of which nothing is known; None where all of them are.
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
        self._shown = {"reasoning": Shown(), "text": Shown(marks.tags.blanks)}
        self._state = "thought" if thinking else "start"
        self._num_ids = 0
        self._beginning = ""  # text of which it is not decided what it begins
        self._tail = ""  # the last characters of a thought, which may spell its end
        self._waiting = ""  # characters that may spell a tag
        self._call: list[int] = []
        self._ends = True  # whether the end of a call would end this one
        self._num_calls = 0

    def read(self, tokens: Sequence[int]) -> Sequence[ReplyPiece]:
        """Take the next ids; return the pieces that they decide."""
        pieces: list[ReplyPiece] = []
        plain: list[int] = []
        for token in tokens:
            if self._num_ids == 0 and token in self._marks.control and token not in self._tags - self._marks.heads:
                self._hold()  # the head of a turn, which the format may pass over
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
            self._after(token)
        elif state == "thought":
            self._add_tag_to_thought(token, pieces)
        elif token in marks.opens:
            self._end_text(token, pieces)
        elif token in (marks.think, marks.think_end):
            self._add_tag_to_text(token, pieces)
        else:
            self._add([token], pieces)

    def _end_text(self, token: int, pieces: list[ReplyPiece]) -> None:
        """Take a tag that ends the text."""
        self._end_run("text", pieces)
        if self._state == "held":
            return
        if self._marks.tags.goes_on:
            self._hold()
            return
        blanks = self._shown["text"].rest()
        if blanks:
            pieces.append(ReplyPiece(kind="text", text=blanks))
        self._after(token)

    def _after(self, token: int) -> None:
        """Take a tag behind the text."""
        marks = self._marks
        self._state = "after"
        if token == marks.call:
            self._state, self._call, self._ends = "call", [token], marks.middle is None
            self.undecided = self._num_ids
        elif token == marks.section_end:
            self._state = "ended"

    def _add_to_call(self, token: int, pieces: list[ReplyPiece]) -> None:
        marks = self._marks
        if token == marks.section_end:  # it cuts the call
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
        elif token in marks.opens and (marks.tags.ends_thought or marks.tags.goes_on):
            self._end_run("reasoning", pieces)  # it ends the thought, unless the thought's own end comes later
            self._hold()
        else:
            self._add([token], pieces)

    def _add_tag_to_text(self, token: int, pieces: list[ReplyPiece]) -> None:
        """Take a tag of a thought, behind no thought that is open."""
        marks, again = self._marks, self._marks.tags.thinks_again
        if self._state == "start" and token == marks.think:
            self._end_run("text", pieces)
            if self._state == "start":
                self._state = "thought"
                if not again:  # the blanks before a thought are no text
                    self._shown["text"] = Shown(marks.tags.blanks)
                return
        if self._state == "held":
            return
        if again and token == marks.think_end:
            self._end_run("text", pieces)
        else:
            self._add([token], pieces)

    def _end_run(self, kind: str, pieces: list[ReplyPiece]) -> None:
        """Show what waited in a text that a tag ends."""
        text = self._decoding.rest()
        if self._state == "start":
            text, self._beginning = self._beginning + text, ""
            self._state = "text" if text.strip() else "start"
        self._show(kind, text, pieces)
        waiting, self._waiting = self._waiting, ""
        if self._state != "held":
            self._piece(kind, waiting, pieces)

    def _add(self, tokens: Sequence[int], pieces: list[ReplyPiece]) -> None:
        """Take ids that are text where they stand."""
        text = self._decoding.add(tokens)
        if self._state == "start":
            text = self._begin(text)
        if text:
            self._show("reasoning" if self._state == "thought" else "text", text, pieces)

    def _begin(self, text: str) -> str:
        """Return the text of a reply's beginning when it is decided that it is text."""
        self._beginning += text
        begun = self._beginning.lstrip()
        if any(begun.startswith(beginning) for beginning in self._marks.undecided):
            self._hold()
        elif begun and not any(beginning.startswith(begun) for beginning in self._marks.undecided):
            self._state, text, self._beginning = "text", self._beginning, ""
            return text
        return ""

    def _show(self, kind: str, text: str, pieces: list[ReplyPiece]) -> None:
        if kind == "reasoning":
            self._tail = self._tail[-len(THINK_END) :] + text
            if THINK_END in self._tail:
                self._hold()  # spelled, not the tag: formats differ in what it ends
        if self._state == "held":
            return
        spelled = self._marks.tags.spelled
        if spelled:
            text = self._waiting + text
            at = min((at for tag in spelled if (at := text.find(tag)) >= 0), default=None)
            if at is None:
                at = len(text) - max(overlap(text, tag) for tag in spelled)
            else:
                self._hold()
            text, self._waiting = text[:at], text[at:]
        self._piece(kind, text, pieces)

    def _piece(self, kind: str, text: str, pieces: list[ReplyPiece]) -> None:
        shown = self._shown[kind].add(text)
        if shown:
            pieces.append(ReplyPiece(kind="reasoning" if kind == "reasoning" else "text", text=shown))


class TextReader:
    """Reader of replies that `hermes.parse_reply` parses, whose tags are text. Implements `ReplyReader`.

    Args:
        decode: ids to text, byte by byte.
        stop: ids that end a turn.
        thinking: whether the prompt ended inside a thought.
        calls: whether what stands between the tags of a call is one, and no text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[int], *, thinking: bool, calls: bool = True
    ) -> None:
        self._may_call = calls
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
            return self._until(OPEN if self._may_call else "", "text", "call", pieces)
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
        text, ended, rest = self._text.partition(tag) if tag else (self._text, "", "")
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
