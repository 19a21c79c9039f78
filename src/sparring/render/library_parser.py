"""Parsing of replies in the formats of the `renderers` library, as a whole and while they are sampled.

The tags of a format (`tags.py`) separate thoughts, texts and calls, so that both ways of parsing agree; arguments
between tags are read by `calls/between_tags.py`. The library parses JSON calls, and formats that have no entry in
`FORMAT_TAGS`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from renderers import ToolCallParseStatus

from sparring.errors import PolicyFailure, boundary
from sparring.render.calls.between_tags import LAYOUTS, TaggedCalls
from sparring.render.dialect import tool_call, tool_dicts
from sparring.render.hermes import parse_reply
from sparring.render.reply_reader import HoldingReader, TaggedReader, message_of
from sparring.render.tags import FORMAT_TAGS, THINK, Marks, marks_of
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

_STEP = 64
"""Number of ids that are read at once to find the end of a thought."""

REMEMBERED = 256
"""Maximum number of keys in the cache of `thinks`."""


class LibraryParser:
    """Parser of one format of the library."""

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
        marks, thinking = self._marks, self._marks is not None and self.thinks(prompt)
        if marks is None:
            return self._parse_untagged(completion, tools, prompt)
        if marks.think is None and thinking:
            ids = self._body(completion)
            try:
                return self._parse_unmarked(ids, tools, prompt, thinking=True)
            except PolicyFailure:
                return parse_reply(self._tokenizer.decode(ids), thinking=False)
        reader = self._tagged_reader(marks, tools, prompt, thinking=thinking)
        return message_of((*reader.read(completion), *reader.rest()))

    def reader(self, tools: Sequence[ToolSpec], prompt: Sequence[int]) -> TaggedReader | HoldingReader:
        """Return the reader of a reply that is being sampled. Nothing is emitted before the end if the format has no
        entry in `FORMAT_TAGS`, the tokenizer is not byte-level, or the reply begins inside a thought that no single id
        ends."""
        marks, thinking = self._marks, self._marks is not None and self.thinks(prompt)
        if marks is None or not self._tokenizer.decodes_bytes or marks.think is None and thinking:
            return HoldingReader()
        return self._tagged_reader(marks, tools, prompt, thinking=thinking)

    def thought_length(self, completion: Sequence[int]) -> int | None:
        """Count the ids of a reply's thought, its closing tag included; all ids if the thought is not closed. None for
        a tokenizer that is not byte-level, and a format without an entry in `FORMAT_TAGS` or whose closing tag is not a
        single id."""
        marks = self._marks
        if marks is None or marks.think_end is None or not self._tokenizer.decodes_bytes:
            return None
        lengths = (self._thought_reader(marks, completion, thinking).thought_length for thinking in (False, True))
        return next(length for length in lengths if length is not None)

    def left_open(self, completion: Sequence[int], prompt: Sequence[int]) -> int | None:
        """Return the id of the tag that closes the thought in which a reply was cut; None if the reply did not end in a
        thought, or the closing tag is not a single id."""
        marks = self._marks
        if marks is None or marks.think is None:
            return None
        reader = self._thought_reader(marks, completion, self.thinks(prompt))
        return marks.think_end if reader.in_thought else None

    def _tagged_reader(
        self, marks: Marks, tools: Sequence[ToolSpec], prompt: Sequence[int], *, thinking: bool
    ) -> TaggedReader:
        def read_call(call: Sequence[int], before: int, *, closed: bool) -> Sequence[ToolCall]:
            if self._tagged is not None:
                return self._tagged.read(call[1:-1] if closed else call[1:], tools, before, closed=closed)
            try:
                return self._message((*marks.head, *call), tools, (), before).tool_calls
            except PolicyFailure:
                raw = self._tokenizer.decode(call[1:-1]).strip()
                return (tool_call(f"call_{before}", None, None, raw),)

        def parse_rest(ids: Sequence[int], thought: bool) -> Message:
            if marks.think is None or marks.think_end is None:
                return self._parse_unmarked(ids, tools, prompt, thinking=False)
            if marks.tags.thinks_again:  # the library would parse a thought after the text
                ids = [id for token in ids for id in (self._plain[THINK] if token == marks.think else (token,))]
            return self._message((marks.think, marks.think_end, *ids) if thought else ids, tools, prompt)

        undecided = tuple(text for text in marks.undecided if tools or text not in marks.tags.undecided)
        tags_decide = not undecided and (not tools or self._tagged is not None)
        return TaggedReader(
            replace(marks, undecided=undecided),
            self._tokenizer.decode,
            read_call,
            thinking=thinking,
            calls=bool(tools),
            parse_rest=None if tags_decide else parse_rest,
        )

    def _thought_reader(self, marks: Marks, completion: Sequence[int], thinking: bool) -> TaggedReader:
        """Return a reader that has read a reply to the end of its thought."""
        reader = TaggedReader(
            marks,
            self._tokenizer.decode,
            lambda call, before, *, closed: (),
            thinking=thinking,
            calls=True,
            parse_rest=lambda ids, thought: Message(role="assistant"),
        )
        for start in range(0, len(completion), _STEP):
            reader.read(completion[start : start + _STEP])
            if reader.is_past_thoughts:
                break
        reader.rest()
        return reader

    def thinks(self, prompt: Sequence[int]) -> bool:
        """Return whether a reply to this prompt begins inside a thought.

        The library's answer depends only on the ids after the last end of turn, so the answer is cached by these ids,
        which are the same for nearly all prompts.
        """
        for at in range(len(prompt) - 1, max(0, len(prompt) - LONGEST_BEGINNING) - 1, -1):
            if prompt[at] in self._own_stops:
                return self._thinks_after(tuple(prompt[at:]))
        return self._library_thinks(prompt)

    def _library_thinks(self, prompt: Sequence[int]) -> bool:
        return bool(self._message(self._word, (), prompt).reasoning)

    def _body(self, completion: Sequence[int]) -> Sequence[int]:
        end = next((at for at, token in enumerate(completion) if token in self._stop_ids), len(completion))
        return completion[:end]

    def _parse_unmarked(
        self, ids: Sequence[int], tools: Sequence[ToolSpec], prompt: Sequence[int], *, thinking: bool
    ) -> Message:
        """Parse a reply whose thought tags are not single ids. This occurs only in formats whose calls the library
        parses."""
        marks, tags, text = self._marks, FORMAT_TAGS[self._name], self._tokenizer.decode(ids)
        assert marks is not None
        if tags.think is not None and not self._added.keys() >= set(tags.think):
            first = next((at for at, token in enumerate(ids) if token in marks.opens), None)
            calls = first is not None and not self._tokenizer.decode(ids[:first]).strip()
            calls = calls or bool(tags.spelled) and text.lstrip().startswith(tags.spelled[0])
            begun = text.lstrip().startswith(tags.think[0]) or thinking and not calls
            if not tools or begun and tags.think[1] not in text:
                return parse_reply(text, thinking=thinking, calls=bool(tools))
        return self._message(ids, tools, prompt)

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
        """Replace the tags of calls by ids of the same plain text: only in thoughts if `calls`, else everywhere."""
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


def _call(number: int, parsed: Any) -> ToolCall:
    id = parsed.id or f"call_{number}"
    if parsed.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL):
        return tool_call(id, parsed.name, parsed.arguments, parsed.raw)
    return tool_call(id, parsed.name, None, parsed.raw)
