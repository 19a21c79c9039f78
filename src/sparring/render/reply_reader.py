"""Parsing of a reply while it is sampled. A whole reply is parsed alike: by `read` with all ids, then `rest`.

No later id changes a piece that was returned. Undecided text waits: blanks at the end of a text, the beginning of a
tag, an incomplete character, a call without its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from sparring.errors import PolicyFailure
from sparring.render.dialect import tool_call
from sparring.render.tags import Marks
from sparring.reply import ShownReply, overlap
from sparring.types import Message, ReplyPiece, ToolCall

TextKind = Literal["reasoning", "text"]
"""Kind of a piece of text."""

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_FEW = 8
"""Maximum number of ids that one character takes. A longer run of undecodable ids is decoded again only when the run
has doubled in length."""


def message_of(pieces: Iterable[ReplyPiece]) -> Message:
    """Join the pieces of a whole reply to a message."""
    pieces = tuple(pieces)
    return Message(
        role="assistant",
        content="".join(piece.text for piece in pieces if piece.kind == "text"),
        reasoning="".join(piece.text for piece in pieces if piece.kind == "reasoning") or None,
        tool_calls=tuple(piece.call for piece in pieces if piece.call is not None),
    )


class HoldingReader:
    """Reader of a format that can only be parsed at the end: `read` returns no pieces. Implements `ReplyReader`."""

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
        """Return whether ids of an incomplete character wait."""
        return bool(self._waiting)

    def rest(self) -> str:
        """Return the text of the ids that still wait, at the end of a text."""
        waiting, self._waiting, self._next = self._waiting, [], 0
        return self._decode(waiting) if waiting else ""


class StrippedText:
    """Text of one kind (reasoning or text) that arrives in pieces and is stripped at both ends.

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


class ReadCall(Protocol):
    """Parser of one call."""

    def __call__(self, call: Sequence[int], before: int, *, closed: bool) -> Sequence[ToolCall]:
        """Parse the ids of a call, its tags included.

        Args:
            before: number of earlier calls of the reply.
            closed: whether the closing tag is there.
        """


class TaggedReader:
    """Reader of a format whose tags are single ids. Implements `ReplyReader`.

    Only the closing tag ends a thought: a call drafted inside belongs to the thought, and a thought that is never
    closed takes the rest of the reply. There is one exception: if the prompt began the thought, the reply begins with a
    call, and no closing tag follows, the thought is empty. The `renderers` library differs: for several formats, the
    beginning of a call ends an open thought there, as in other servers. For GLM and DeepSeek-V4 this holds even if the
    closing tag follows; PrimeIntellect-ai/renderers pull 80 fixed this for other formats.

    Args:
        thinking: whether the prompt ended inside a thought.
        calls: whether there are tools to call; otherwise the tags of calls are text.
        parse_rest: function that parses the ids after a reply's thought where tags alone do not suffice; its second
            argument is whether there was a thought. It may raise PolicyFailure. None for a format whose tags suffice.
    """

    def __init__(
        self,
        marks: Marks,
        decode: Callable[[Sequence[int]], str],
        read_call: ReadCall,
        *,
        thinking: bool,
        calls: bool,
        parse_rest: Callable[[Sequence[int], bool], Message] | None = None,
    ) -> None:
        self._marks = marks
        single = (marks.think, marks.think_end, marks.call, marks.call_end, marks.middle, marks.section_end)
        self._tags = {tag for tag in single if tag is not None} | marks.opens
        self._stops = marks.ends
        self._turn_heads = marks.control - self._tags if parse_rest is not None else frozenset()
        self._decode, self._read_call, self._parse_rest = decode, read_call, parse_rest
        self._calls = calls
        self._is_over = False
        self._state = "thought" if thinking else "start"
        self._may_call = thinking  # whether a call may still end a thought that the prompt began
        self._length = 0
        self._thought_length: int | None = None
        self._ids: list[int] = []  # ids since the end of the thought
        self._plain: list[int] = []  # last ids of a thought or a text, not yet decoded
        self._drafted: list[int] = []  # ids of what is a call, or a draft if the thought is closed later
        self._call: list[int] = []
        self._closes = True  # whether a closing tag would end the open call
        self._num_calls = 0
        self._pieces: list[ReplyPiece] = []
        self._late: list[ReplyPiece] = []  # calls that wait for the end of the text around them
        self._num_chars = 0  # number of characters of shown text
        self._shown = ShownReply()
        self._begin_text()

    def read(self, tokens: Sequence[int]) -> Sequence[ReplyPiece]:
        for token in tokens:
            if not self._is_over:
                self._take(token)
        self._decode_plain()
        return self._taken()

    def rest(self) -> Sequence[ReplyPiece]:
        """Return the pieces that waited for the end of the reply."""
        if self._state == "thought":
            self._end_text("reasoning")
        if self._state == "undecided":
            self._read_as_call()
        if self._state in ("start", "text"):
            self._end_text("text")
        if self._state == "call" and self._parse_rest is None:
            if self._marks.tags.goes_on:
                self._end_text("text")
            self._add_calls(closed=False)
        elif self._state in ("call", "held"):
            self._parse_held()
        self._pieces += self._late
        return self._taken()

    @property
    def in_thought(self) -> bool:
        """Whether the ids so far end inside a thought."""
        return self._state == "thought"

    @property
    def is_past_thoughts(self) -> bool:
        """Whether no later id can begin a thought or belong to one."""
        return self._state not in ("start", "thought", "undecided")

    @property
    def thought_length(self) -> int | None:
        """Number of ids up to the end of the thought, its tag included; None if there is no thought."""
        if self._state == "undecided":
            return 0
        return self._length if self._state == "thought" else self._thought_length

    def _taken(self) -> list[ReplyPiece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _begin_text(self) -> None:
        self._decoding = Decoding(self._decode)
        blanks = self._marks.tags.blanks
        self._texts: dict[TextKind, StrippedText] = {"reasoning": StrippedText(), "text": StrippedText(blanks)}
        self._beginning = ""  # undecided text at the beginning of the reply
        self._waiting = ""  # characters that may spell a tag

    def _take(self, token: int) -> None:
        marks, is_first = self._marks, self._length == 0
        if is_first and token in marks.heads:  # the format's parser skips it
            self._stops -= marks.heads
        if token in self._stops:
            self._is_over = True
            return
        self._length += 1
        self._ids.append(token)
        if self._state == "undecided":
            self._take_undecided(token)
        elif self._state == "call":
            self._take_in_call(token)
        elif self._state == "after":
            self._take_after_text(token)
        elif is_first and self._state == "start" and token in self._turn_heads:
            self._state = "held"  # the head of a turn, which the format's parser may skip
        elif self._state in ("start", "text", "thought"):
            take_tag = self._take_in_thought if self._state == "thought" else self._take_in_text
            if token not in self._tags or not take_tag(token):
                self._plain.append(token)

    def _take_in_thought(self, token: int) -> bool:
        """Process a tag inside a thought. Return False for a tag that counts as text, such as a drafted call's."""
        marks = self._marks
        if token == marks.think_end:
            self._end_thought()
        elif token == marks.think:
            self._decode_plain()
            if self._state == "undecided":
                self._drafted.append(token)
            self._may_call = False
        elif token in marks.opens and self._nothing_thought():
            self._state, self._drafted = "undecided", [token]
        else:
            return False
        return True

    def _end_thought(self) -> None:
        self._state, self._may_call = "thought", False
        self._end_text("reasoning")
        self._state, self._ids, self._thought_length = "text", [], self._length

    def _nothing_thought(self) -> bool:
        """Return whether a thought that the prompt began is blank so far."""
        if self._may_call:
            self._decode_plain()
        return self._may_call and not self._texts["reasoning"].has_text and not self._decoding.waits

    def _take_undecided(self, token: int) -> None:
        """Process an id after the beginning of a call in a thought, a draft if the thought is closed later."""
        if token == self._marks.think_end:
            self._plain = [drafted for drafted in self._drafted if drafted != self._marks.think]
            self._end_thought()
        else:
            self._drafted.append(token)

    def _read_as_call(self) -> None:
        """Read the reply again, as a reply that begins with a call and has no thought."""
        ids, self._ids = self._ids, []
        self._state, self._thought_length = "start", 0
        self._begin_text()
        for token in ids:
            self._take(token)
        self._decode_plain()

    def _take_in_text(self, token: int) -> bool:
        """Process a tag outside thoughts and calls. Return False if the tag counts as text."""
        marks = self._marks
        if token == marks.think_end:
            return marks.tags.thinks_again
        if self._calls and token in marks.opens:
            self._open_calls(token)
            return True
        if token == marks.think and self._state == "start":
            self._decode_plain()
            if self._state == "start" and not self._decoding.waits:
                self._state = "thought"
                self._begin_text()  # the blanks before a thought are no text
                return True
        return False

    def _open_calls(self, token: int) -> None:
        if self._marks.tags.goes_on:
            self._decode_plain()
            self._add_text("text", "")
        else:
            self._end_text("text")
        if self._state != "held":
            self._take_after_text(token)

    def _take_after_text(self, token: int) -> None:
        marks = self._marks
        self._state = "after"
        if token == marks.call:
            self._state, self._call, self._closes = "call", [token], marks.middle is None
        elif token == marks.section_end:
            self._state = "ended"

    def _take_in_call(self, token: int) -> None:
        marks = self._marks
        if token == marks.section_end:  # the section ends inside a call
            self._state = "held"
            return
        self._call.append(token)
        self._closes = self._closes or token == marks.middle
        if token == marks.call_end and self._closes:
            self._add_calls(closed=True)
            self._state, self._call = "text" if marks.tags.goes_on else "after", []

    def _add_calls(self, *, closed: bool) -> None:
        pieces = [
            ReplyPiece(kind="call", call=call) for call in self._read_call(self._call, self._num_calls, closed=closed)
        ]
        self._num_calls += len(pieces)
        if self._marks.tags.goes_on:
            self._late += pieces
        else:
            self._show(*pieces)

    def _parse_held(self) -> None:
        """Show the rest of the reply after its thought, parsed; if parsing fails, show the rest as a malformed call."""
        assert self._parse_rest is not None
        try:
            self._show(*self._shown.rest(self._parse_rest(self._ids, self._thought_length is not None)))
        except PolicyFailure:
            text = self._decode(self._ids).lstrip(self._marks.tags.blanks)
            unread = self._decode(self._call) if self._call else text[self._num_chars :]
            call = tool_call(f"call_{self._num_calls}", None, None, unread.strip())
            self._show(ReplyPiece(kind="call", call=call))

    def _end_text(self, kind: TextKind) -> None:
        """Show the waiting end of a thought or a text."""
        self._decode_plain()
        self._add_text(kind, self._decoding.rest())
        if self._state not in ("held", "undecided"):
            waiting, self._waiting = self._waiting, ""
            self._show_text(kind, self._texts[kind].add(waiting) + self._texts[kind].rest())

    def _decode_plain(self) -> None:
        if not self._plain:
            return
        text = self._decoding.add(self._plain)
        self._plain = []
        if self._state != "start":
            self._add_text("reasoning" if self._state == "thought" else "text", text)
            return
        self._beginning += text
        start = self._beginning.lstrip()
        if any(start.startswith(beginning) for beginning in self._marks.undecided):
            self._state = "held"
        elif start and not any(beginning.startswith(start) for beginning in self._marks.undecided):
            self._add_text("text", "")

    def _add_text(self, kind: TextKind, text: str) -> None:
        """Show text, except for an end that may be the beginning of a tag."""
        if self._state == "start":
            text, self._beginning = self._beginning + text, ""
            self._state = "text" if text.strip() else "start"
        spelled = self._marks.tags.spelled
        if self._state == "held" or not (text or self._waiting):
            return
        text, self._waiting = self._waiting + text, ""
        if spelled and kind == "reasoning" and self._may_call and not self._texts[kind].has_text:
            start = text.lstrip()
            if start.startswith(spelled[0]):
                self._state, self._drafted = "undecided", []
            if start.startswith(spelled[0]) or spelled[0].startswith(start):
                text, self._waiting = "", text
        elif spelled and kind == "text" and self._calls:
            at = min((at for tag in spelled if (at := text.find(tag)) >= 0), default=None)
            if at is None:
                at = len(text) - max(overlap(text, tag) for tag in spelled)
            else:
                self._state = "held"
            text, self._waiting = text[:at], text[at:]
        self._show_text(kind, self._texts[kind].add(text))

    def _show_text(self, kind: TextKind, text: str) -> None:
        if text:
            self._num_chars += len(text) if kind == "text" else 0
            self._show(ReplyPiece(kind=kind, text=text))

    def _show(self, *pieces: ReplyPiece) -> None:
        self._pieces += pieces
        for piece in pieces:
            self._shown.add(piece)
