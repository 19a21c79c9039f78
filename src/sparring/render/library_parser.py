"""Parsing of replies in the formats of the `renderers` library, as a whole and while they are sampled.

The tags of a format (`tags.py`) decide what is a thought, a text and a call, so that both ways agree; arguments between
tags are read by `calls/between_tags.py`. The library parses JSON calls, and formats that have no entry in
`FORMAT_TAGS`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from renderers import ToolCallParseStatus

from sparring.errors import PolicyFailure, boundary
from sparring.render.calls.between_tags import LAYOUTS, TaggedCalls
from sparring.render.dialect import tool_call, tool_dicts
from sparring.render.hermes import THINK, parse_reply
from sparring.render.reply_reader import HoldingReader, TaggedReader
from sparring.render.tags import FORMAT_TAGS, Marks, marks_of
from sparring.render.tokenizer import FileTokenizer
from sparring.types import Message, ToolCall, ToolSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """Tags of a format that has no entry in `FORMAT_TAGS`.

    Attributes:
        begin: tag before a thought.
        end: tag after a thought.
        calls: tags that begin a call.
    """

    begin: str
    end: str
    calls: tuple[str, ...]


_CHANNELS: Mapping[str, Channel] = {
    "gemma4": Channel(begin="<|channel>", end="<channel|>", calls=("<|tool_call>",)),
    "inkling": Channel(
        begin="<|content_thinking|>",
        end="<|end_message|>",
        calls=("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"),
    ),
}

LONGEST_BEGINNING = 64
"""Maximum number of ids in a cache key of `thinks`. A key is the tail of a prompt from its last end of turn."""

REMEMBERED = 256
"""Maximum number of keys in the cache of `thinks`."""


class LibraryParser:
    """Parser of one format of the library.

    Args:
        name: the library's name of the format.
    """

    def __init__(self, library: Any, tokenizer: FileTokenizer, name: str, stop_ids: Sequence[int]) -> None:
        self._library, self._tokenizer, self._name = library, tokenizer, name
        self._stop_ids = frozenset(stop_ids)
        self._own_stops = frozenset(library.get_stop_token_ids())
        self._foreign = self._stop_ids - self._own_stops
        self._thinks_after = functools.lru_cache(maxsize=REMEMBERED)(self._library_thinks)
        layout, added = LAYOUTS.get(name), tokenizer.added_tokens
        self._tagged = None if layout is None else TaggedCalls(layout, added, tokenizer.decode)
        self._added = added

    def parse(self, completion: Sequence[int], tools: Sequence[ToolSpec], prompt: Sequence[int]) -> Message:
        """Parse sampled ids as a reply; every sequence parses. Without tools, nothing is a call."""
        marks = self._marks
        if marks is None:
            return self._parse_untagged(completion, tools, prompt)
        ids, thinking = self._body(completion), self.thinks(prompt)
        if self._spells_thoughts and not tools:
            return parse_reply(self._tokenizer.decode(ids), thinking=thinking, calls=False)
        if self._spells_thoughts and self._is_open(ids, thinking):
            return parse_reply(self._tokenizer.decode(ids), thinking=thinking)
        thought = marks.thought(ids, thinking, self._tokenizer.decode)
        reasoning = None
        if thought is not None:
            inside = [token for token in ids[thought.begin : thought.end] if token != marks.think]
            reasoning = self._tokenizer.decode(inside).strip() or None
        rest = list(ids if thought is None else ids[thought.rest :])
        if not tools:
            return Message(role="assistant", content=self._text(rest, marks), reasoning=reasoning)
        if self._tagged is not None:
            content, calls = self._parse_tagged_calls(rest, tools, marks)
            return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
        return self._parse_json_calls(rest, tools, prompt, reasoning, thought is not None)

    def reader(self, tools: Sequence[ToolSpec], prompt: Sequence[int]) -> TaggedReader | HoldingReader:
        """Return the reader of a reply that is being sampled. It emits nothing before the end if the format has no
        entry in `FORMAT_TAGS` or the tokenizer is not byte-level."""
        marks = self._marks
        if marks is None or not self._tokenizer.decodes_bytes:
            return HoldingReader()
        thinking = self.thinks(prompt)
        if marks.think is None and thinking:
            return HoldingReader()

        def parse(call: Sequence[int], before: int) -> Sequence[ToolCall]:
            if self._tagged is not None:
                return self._tagged.read(call[1:-1], tools, before, closed=True)
            try:
                return self._message((*marks.head, *call), tools, (), before).tool_calls
            except PolicyFailure:
                raw = self._tokenizer.decode(call[1:-1]).strip()
                return (tool_call(f"call_{before}", None, None, raw),)

        active = marks if tools else marks.without_calls()
        return TaggedReader(active, self._tokenizer.decode, parse, thinking=thinking)

    def thought_length(self, completion: Sequence[int]) -> int | None:
        """Count the ids of a reply's thought, its end included; all ids if no end follows. None for a format that has
        no entry in `FORMAT_TAGS` or whose thoughts are not ended by an id."""
        marks = self._marks
        if marks is None or marks.think_end is None or not self._tokenizer.decodes_bytes:
            return None
        ids = self._body(completion)
        thought = marks.thought(ids, False, self._tokenizer.decode) or marks.thought(ids, True, self._tokenizer.decode)
        return len(ids) if thought is None else min(thought.rest, len(ids))

    def left_open(self, completion: Sequence[int], prompt: Sequence[int]) -> int | None:
        """Return the id that ends the thought in which a reply was cut; None if the reply did not end in a thought, or
        no id ends one."""
        marks = self._marks
        if marks is None:
            return None
        ids = self._body(completion)
        thought = marks.thought(ids, self.thinks(prompt), self._tokenizer.decode)
        return marks.think_end if thought is not None and thought.rest > len(ids) else None

    def thinks(self, prompt: Sequence[int]) -> bool:
        """Return whether a reply to this prompt begins inside a thought.

        The library's answer depends only on the ids after the last end of turn, which are the same for nearly all
        prompts, so it is cached by these ids.
        """
        for at in range(len(prompt) - 1, max(0, len(prompt) - LONGEST_BEGINNING) - 1, -1):
            if prompt[at] in self._own_stops:
                return self._thinks_after(tuple(prompt[at:]))
        return self._library_thinks(prompt)

    def _library_thinks(self, prompt: Sequence[int]) -> bool:
        return bool(self._message(self._word, (), prompt).reasoning)

    def _body(self, completion: Sequence[int]) -> Sequence[int]:
        """Return the ids of a reply before its end, or before the head of another turn that the model wrote itself."""
        heads = frozenset() if self._marks is None else self._marks.heads
        if completion and completion[0] in heads:
            heads = frozenset()
        ends = self._stop_ids | heads
        end = next((at for at, token in enumerate(completion) if token in ends), len(completion))
        return completion[:end]

    def _text(self, ids: Sequence[int], marks: Marks) -> str:
        """Decode a text, without the blanks and stray ends of thoughts that the format ignores."""
        if marks.tags.thinks_again:
            ids = [token for token in ids if token != marks.think_end]
        text = self._tokenizer.decode(ids)
        return text.strip(marks.tags.blanks) if text.strip() else ""

    def _parse_tagged_calls(
        self, ids: Sequence[int], tools: Sequence[ToolSpec], marks: Marks
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """Parse what follows the thought into text and calls, for a format whose arguments stand between tags."""
        assert self._tagged is not None
        first = next((at for at, token in enumerate(ids) if token in marks.opens), len(ids))
        text, calls = list(ids[:first]), list[ToolCall]()
        behind = first
        for begin, end, closed in marks.calls(ids, first):
            text += ids[behind : begin - 1] if marks.tags.goes_on else ()
            behind = end + 1
            calls += self._tagged.read(ids[begin:end], tools, len(calls), closed=closed)
        text += ids[behind:] if marks.tags.goes_on else ()
        return self._text(text, marks), tuple(calls)

    def _parse_json_calls(
        self,
        rest: list[int],
        tools: Sequence[ToolSpec],
        prompt: Sequence[int],
        reasoning: str | None,
        thought: bool,
    ) -> Message:
        """Parse what follows the thought with the library, which is given an empty thought instead."""
        marks = self._marks
        assert marks is not None
        if marks.tags.thinks_again:  # the library would parse a thought after the text
            rest = [id for t in rest for id in (self._plain[THINK] if t == marks.think else (t,))]
        ids = rest
        if thought:
            assert marks.think is not None and marks.think_end is not None  # the thought was found by its tags
            ids = [marks.think, marks.think_end, *rest]
        try:
            read = self._message(ids, tools, prompt)
        except PolicyFailure:
            read = self._salvage(ids, tools, prompt)
        return Message(
            role="assistant",
            content=read.content,
            reasoning=reasoning if thought else read.reasoning,
            tool_calls=read.tool_calls,
        )

    def _parse_untagged(self, completion: Sequence[int], tools: Sequence[ToolSpec], prompt: Sequence[int]) -> Message:
        """Parse a reply of a format that has no entry in `FORMAT_TAGS`."""
        foreign = next((at for at, token in enumerate(completion) if token in self._foreign), len(completion))
        ids = self._without_drafts(completion[:foreign], bool(tools), prompt)
        try:
            read = self._message(ids, tools, prompt)
        except PolicyFailure:
            return parse_reply(self._tokenizer.decode(self._body(ids)), thinking=False, calls=bool(tools))
        if tools or not read.tool_calls:
            return read
        written = (call.raw for call in self._parse_by_library(ids, (), prompt).tool_calls)
        return Message(role="assistant", content="".join((read.content, *written)), reasoning=read.reasoning)

    def _without_drafts(self, ids: Sequence[int], calls: bool, prompt: Sequence[int]) -> Sequence[int]:
        """Replace the tags of calls by ids that spell them: only inside thoughts if `calls`, else everywhere."""
        channel = _CHANNELS.get(self._name)
        if channel is None or not {channel.begin, channel.end, *channel.calls} <= self._added.keys():
            return ids
        begin, end = self._added[channel.begin], self._added[channel.end]
        spelled = {self._added[tag]: self._plain[tag] for tag in channel.calls}
        spelled_ids: list[int] = []
        inside = self.thinks(prompt)
        for token in ids:
            inside = token == begin or inside and token != end
            spelled_ids += spelled.get(token, (token,)) if inside or not calls else (token,)
        return spelled_ids

    @functools.cached_property
    def _word(self) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode("x"))

    @functools.cached_property
    def _marks(self) -> Marks | None:
        """Tags of the format as ids; None if the format has no entry in `FORMAT_TAGS`, or the tags of its calls are no
        single ids."""
        marks = marks_of(self._name, self._added, tuple(self._stop_ids))
        if marks is None or marks.think is None:
            return marks
        thinks = self._message((marks.think, *self._word), (), ()).reasoning
        return marks if thinks else marks.without_thoughts()

    @functools.cached_property
    def _plain(self) -> Mapping[str, tuple[int, ...]]:
        """Ids that spell each tag as plain text."""
        control, channel = self._tokenizer.control, _CHANNELS.get(self._name)
        tags = (THINK, *(() if channel is None else channel.calls))
        return {tag: tuple(control.encode(control.marked(tag))) for tag in tags}

    @property
    def _spells_thoughts(self) -> bool:
        """Return True if the tags of a thought are no single ids, and are recognised by their text."""
        tags = FORMAT_TAGS[self._name]
        return tags.think is not None and not set(tags.think) <= self._added.keys()

    def _is_open(self, ids: Sequence[int], thinking: bool) -> bool:
        """Return whether a reply ends inside its thought, for a format that spells the tags of thoughts."""
        tags, text = FORMAT_TAGS[self._name], self._tokenizer.decode(ids)
        assert tags.think is not None and self._marks is not None
        if thinking and self._marks.calls_at_once(ids, self._tokenizer.decode):
            return False
        return (thinking or text.lstrip().startswith(tags.think[0])) and tags.think[1] not in text

    def _parse_by_library(self, ids: Sequence[int], tools: Sequence[ToolSpec], prompt: Sequence[int]) -> Any:
        with boundary(PolicyFailure, f"renderers {self._name}"):
            return self._library.parse_response(
                list(ids), tools=tool_dicts(tools) or None, prompt_ids=list(prompt) or None
            )

    def _message(
        self, ids: Sequence[int], tools: Sequence[ToolSpec], prompt: Sequence[int], calls_before: int = 0
    ) -> Message:
        """Parse a reply with the library's own parser.

        Raises:
            PolicyFailure: the reply breaks the library's parser.
        """
        parsed = self._parse_by_library(ids, tools, prompt)
        return Message(
            role="assistant",
            content=parsed.content or "",
            reasoning=(parsed.reasoning_content or "").strip()
            or None,  # the library keeps the blanks of an open thought
            tool_calls=tuple(_call(calls_before + number, call) for number, call in enumerate(parsed.tool_calls)),
        )

    def _salvage(self, ids: Sequence[int], tools: Sequence[ToolSpec], prompt: Sequence[int]) -> Message:
        """Parse a reply that breaks the library's parser: what a reader could decide, and the rest as a malformed
        call."""
        reader = self.reader(tools, prompt)
        if isinstance(reader, HoldingReader):
            return parse_reply(self._tokenizer.decode(ids), thinking=False)
        pieces = reader.read(ids)
        calls = [piece.call for piece in pieces if piece.call is not None]
        if reader.undecided is not None:
            raw = self._tokenizer.decode(ids[reader.undecided :]).strip()
            calls.append(tool_call(f"call_{len(calls)}", None, None, raw))
        return Message(
            role="assistant",
            content="".join(piece.text for piece in pieces if piece.kind == "text"),
            reasoning="".join(piece.text for piece in pieces if piece.kind == "reasoning") or None,
            tool_calls=tuple(calls),
        )


def _call(number: int, parsed: Any) -> ToolCall:
    id = parsed.id or f"call_{number}"
    if parsed.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL):
        return tool_call(id, parsed.name, parsed.arguments, parsed.raw)
    return tool_call(id, parsed.name, None, parsed.raw)
