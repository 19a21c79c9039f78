"""A renderer of the `renderers` library behind our protocol."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from renderers import ToolCallParseStatus

from sparring.errors import BadInput, PolicyFailure, boundary
from sparring.generation import GenerateRequest, Rendered
from sparring.render.control import MARK
from sparring.render.dialect import tool_call, tool_dicts
from sparring.render.escaping import TextEscaper
from sparring.render.hermes import THINK, parse_reply
from sparring.render.reading import HoldingReader, TaggedReader
from sparring.render.tags import FORMAT_TAGS, Marks, marks_of
from sparring.render.text_rules import TextRules
from sparring.render.thoughts import drops_thoughts, has_dropped, with_thoughts
from sparring.render.tokenizer import FileTokenizer
from sparring.types import Message, ToolCall, ToolSpec

_PROBE = [{"role": "user", "content": "x"}]
_FUNCTION = {"name": "look", "arguments": {"at": "it"}}
_REPLIES = (
    {"role": "assistant", "content": "y"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "call_0", "function": _FUNCTION}]},
)

# The rollouts of a group begin with the same prompt, and the library spends a millisecond or more on one.
_REMEMBERED_RENDERS = 64
_REMEMBERED_TOKENS = 8192


class LibraryRenderer:
    """Adapter of one hand-written renderer of the library. `name` is the library's own name of it; `keeps_thoughts`:
    whether the thoughts of earlier replies stay where they are, also where the format itself drops them."""

    def __init__(
        self, library: Any, tokenizer: FileTokenizer, name: str, escaper: TextEscaper, *, keeps_thoughts: bool = False
    ) -> None:
        self._library = library
        own = MARK in tokenizer.decode(library.render([{"role": "user", "content": MARK}]).token_ids)
        self._escaper = escaper.without_marks() if own else escaper
        self.tokenizer = tokenizer
        self.name = name
        self._stop_ids = tuple(library.get_stop_token_ids())
        self._text_rules = TextRules(tokenizer, self._stop_ids, self)
        without = library.render(_PROBE).token_ids
        with_prompt = library.render(_PROBE, add_generation_prompt=True).token_ids
        self._generation_prompt = tuple(with_prompt[len(without) :])
        self._ends = {self._end(reply) for reply in _REPLIES} - {None}
        tags = FORMAT_TAGS.get(name)
        self._strips = tags is not None and tags.goes_on
        self._remembered: dict[bytes, Rendered] = {}
        self._remembering = threading.Lock()
        self._mends_thoughts = keeps_thoughts and drops_thoughts(self)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids that end a turn; the first is the one this format writes."""
        return self._stop_ids

    @property
    def control_ids(self) -> Mapping[str, int]:
        """Return the added tokens of the tokenizer, text -> id: the text of messages and tools never becomes one of
        them."""
        return self.tokenizer.control.ids

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool = True) -> Rendered:
        """Render a whole conversation as ids [T], ending where the next reply begins when `generation`.

        Raises:
            BadInput: the format refuses the conversation.
        """
        key = _key(messages, tools, generation)
        remembered = None if key is None else self._remembered.get(key)
        if remembered is not None:
            return remembered
        rendered = None
        if self._mends_thoughts and has_dropped(messages):
            rendered = with_thoughts(self, messages, tools, generation)
        rendered = rendered or self.plain(messages, tools, generation)
        if key is not None and len(rendered.tokens) <= _REMEMBERED_TOKENS:
            with self._remembering:  # long conversations are rendered by threads of the recorder
                self._remembered[key] = rendered
                if len(self._remembered) > _REMEMBERED_RENDERS:
                    del self._remembered[next(iter(self._remembered))]
        return rendered

    def plain(self, messages: Sequence[Message], tools: Sequence[ToolSpec], generation: bool) -> Rendered:
        """Return a conversation as the format itself writes it. Raises as `render` does."""
        return self._rendered(self._escaper.messages(messages), self._escaper.tools(tools), generation)

    def bridge(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> tuple[int, ...] | None:
        """Return the next prompt: prompt + completion to the id, the format's end of turn where the completion lacks
        it, then the new messages. None where the format cannot, and where the turn ended inside a thought, which
        nothing can close any more."""
        if not completion:
            return None
        # the library takes any stop id for the end of a turn; one that the format does not write is a cut
        foreign = bool(self._ends) and completion[-1] in self._stop_ids and completion[-1] not in self._ends
        reply = completion[:-1] if foreign else completion
        bridged = self._library.bridge_to_next_turn(
            list(prompt), list(reply), self._escaper.answers(new), tools=self._escaper.tools(tools) or None
        )
        if bridged is None:
            return None
        before = (*prompt, *reply)
        tokens = tuple(bridged.token_ids)
        return (*prompt, *completion, *tokens[len(before) :]) if tokens[: len(before)] == before else None

    def parse(self, completion: Sequence[int], tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> Message:
        """Parse sampled ids as a reply. Every sequence parses: text that no grammar accepts is plain content, and a
        call that breaks the library's own parser, such as JSON nested past Python's recursion limit, is malformed."""
        completion = self._own(completion, prompt)
        try:
            return self._message(completion, tools, prompt)
        except PolicyFailure:
            return self._mended(completion, tools, prompt)

    def reader(self, tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> TaggedReader | HoldingReader:
        """Return the reader of a reply that is sampled now; of formats that have no `FORMAT_TAGS`, it says nothing
        before the end."""
        marks = self._marks
        if marks is None:
            return HoldingReader()
        thinking = self._thinks(prompt)
        if marks.think is None and thinking:
            return HoldingReader()

        def parse(call: Sequence[int], before: int) -> Sequence[ToolCall]:
            try:
                return self._message((*marks.head, *call), tools, (), before).tool_calls
            except PolicyFailure:
                raw = self.decode(call[1:-1]).strip()
                return (tool_call(f"call_{before}", None, None, raw),)

        return TaggedReader(marks, self.decode, parse, thinking=thinking)

    def thought_length(self, completion: Sequence[int]) -> int | None:
        """Count the ids of a reply's thought, up to and including its end, or up to what ends it otherwise; None in
        formats that have no `FORMAT_TAGS`."""
        marks = self._marks
        if marks is None or marks.think_end is None:
            return None
        begun, stop = 0, self._end_of(completion)
        if marks.tags.thinks_again and marks.think in completion:  # an end before the beginning ends nothing
            first = completion.index(marks.think)
            before = [token for token in completion[:first] if token != marks.think_end]
            begun = 0 if self.decode(before).strip() else first + 1
        opens = marks.opens if marks.tags.ends_thought else frozenset()
        closed = next((at for at in range(begun, stop) if completion[at] == marks.think_end), None)
        opened = next((at for at in range(begun, stop) if completion[at] in opens), None)
        if closed is None or marks.tags.goes_on and opened is not None and opened < closed:
            return stop if opened is None else opened
        return closed + 1

    @functools.cached_property
    def _word(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode("x"))

    @functools.cached_property
    def _marks(self) -> Marks | None:
        """The tags of the format; None where they are not known, or are no ids of their own."""
        if not self.tokenizer.decodes_bytes:
            return None
        marks = marks_of(self.name, self.tokenizer.added_tokens, self._stop_ids)
        if marks is None or marks.think is None:
            return marks
        thinks = self._message((marks.think, *self._word), (), ()).reasoning
        return marks if thinks else marks.without_thoughts()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some ids, special tokens included."""
        return self.tokenizer.decode(tokens)

    @property
    def longest_token(self) -> int:
        """Return the bytes of the longest token."""
        return self.tokenizer.longest

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one id, which may be a part of a character."""
        return self.tokenizer.bytes_of(token)

    def bind(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with its stop strings and its constraint as rules over ids."""
        return self._text_rules.bind(request)

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], generation: bool) -> Rendered:
        with boundary(
            BadInput, f"renderer {self.name}", "a conversation that its format takes", "correct the conversation"
        ):
            rendered = self._library.render(messages, tools=tools or None, add_generation_prompt=generation)
        tokens = tuple(rendered.token_ids)
        sampled = list(rendered.sampled_mask) or [
            index >= 0 and messages[index]["role"] == "assistant" for index in rendered.message_indices
        ]
        self._unmark_generation_prompts(tokens, sampled)
        return Rendered(tokens=tokens, sampled=tuple(sampled))

    def _end(self, reply: dict[str, Any]) -> int | None:
        """Return the id with which the format itself ends this reply; None where the next turn's beginning is its
        end."""
        rendered = self._rendered([*_PROBE, reply], [], False)
        ends = [
            t for t, sampled in zip(rendered.tokens, rendered.sampled, strict=True) if sampled and t in self._stop_ids
        ]
        return ends[-1] if ends else None

    def _message(
        self, completion: Sequence[int], tools: Sequence[ToolSpec], prompt: Sequence[int], calls_before: int = 0
    ) -> Message:
        """Return what the library's own parser says of a reply. Raises `PolicyFailure` where one breaks it."""
        with boundary(PolicyFailure, f"renderers {self.name}"):
            parsed = self._library.parse_response(
                list(completion), tools=tool_dicts(tools) or None, prompt_ids=list(prompt) or None
            )
        content = parsed.content or ""
        return Message(
            role="assistant",
            # blanks that count only beside no call do not count
            content=content.strip() if self._strips else content,
            reasoning=(parsed.reasoning_content or "").strip() or None,  # of an open thought, the library keeps blanks
            tool_calls=tuple(_call(calls_before + number, call) for number, call in enumerate(parsed.tool_calls)),
        )

    def _mended(self, completion: Sequence[int], tools: Sequence[ToolSpec], prompt: Sequence[int]) -> Message:
        """Return what is decided of a reply that breaks the library's parser; the rest is a malformed call."""
        body = completion[: self._end_of(completion)]
        reader = self.reader(tools, prompt=prompt)
        if isinstance(reader, HoldingReader):
            return parse_reply(self.decode(body), thinking=False)
        pieces = reader.read(body)
        calls = [piece.call for piece in pieces if piece.call is not None]
        if reader.undecided is not None:
            raw = self.decode(body[reader.undecided :]).strip()
            calls.append(tool_call(f"call_{len(calls)}", None, None, raw))
        return Message(
            role="assistant",
            content="".join(piece.text for piece in pieces if piece.kind == "text"),
            reasoning="".join(piece.text for piece in pieces if piece.kind == "reasoning") or None,
            tool_calls=tuple(calls),
        )

    def _own(self, completion: Sequence[int], prompt: Sequence[int]) -> Sequence[int]:
        """Return a reply without what the library alone reads into it: a turn behind the head of another turn that the
        model wrote itself, a thought behind the text."""
        marks = self._marks
        if marks is None:
            return completion
        if marks.heads and completion and completion[0] not in marks.heads:
            end = next((at for at, token in enumerate(completion) if token in marks.heads), len(completion))
            return completion[:end]
        if not marks.tags.thinks_again or marks.think not in completion:
            return completion
        first = completion.index(marks.think)
        before = [token for token in completion[:first] if token != marks.think_end]
        thinking = self._thinks(prompt)
        begun = 0 if thinking else first + 1
        if thinking or not self.decode(before).strip():
            ends = {marks.think_end, *marks.opens}
            begun = next((at for at in range(begun, len(completion)) if completion[at] in ends), len(completion))
        elif not thinking:
            begun = first
        plain = self._plain_think
        return [*completion[:begun], *(id for t in completion[begun:] for id in (plain if t == marks.think else (t,)))]

    def _thinks(self, prompt: Sequence[int]) -> bool:
        """Return whether a reply to this prompt begins inside a thought."""
        return bool(self._message(self._word, (), prompt).reasoning)

    @functools.cached_property
    def _plain_think(self) -> tuple[int, ...]:
        """The ids that spell the beginning of a thought, and are not its tag."""
        return tuple(self.tokenizer.control.encode(self.tokenizer.control.marked(THINK)))

    def _end_of(self, completion: Sequence[int]) -> int:
        return next((at for at, token in enumerate(completion) if token in self._stop_ids), len(completion))

    def _unmark_generation_prompts(self, tokens: Sequence[int], sampled: list[bool]) -> None:
        """Unmark prefilled blocks (an empty thought), which the library counts as sampled: in a live rollout the prompt
        holds them."""
        prefix = self._generation_prompt
        for start, token in enumerate(tokens):
            if prefix and token == prefix[0] and tuple(tokens[start : start + len(prefix)]) == prefix:
                sampled[start : start + len(prefix)] = [False] * len(prefix)


def _key(messages: Sequence[Message], tools: Sequence[ToolSpec], generation: bool) -> bytes | None:
    """Return bytes that differ for all that may render differently (1, 1.0 and True do); None for what has no bytes: an
    integer beyond 64 bits, a lone surrogate, an argument that is no plain data."""
    try:
        return msgspec.msgpack.encode((tuple(messages), tuple(tools), generation))
    except (TypeError, ValueError, OverflowError):
        return None


def _call(number: int, parsed: Any) -> ToolCall:
    id = parsed.id or f"call_{number}"
    if parsed.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL):
        return tool_call(id, parsed.name, parsed.arguments, parsed.raw)
    return tool_call(id, parsed.name, None, parsed.raw)
