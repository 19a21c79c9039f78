"""A renderer of the `renderers` library behind our protocol."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from renderers import ToolCallParseStatus
from renderers.reasoning import prompt_ends_in_reasoning

from sparring.errors import BadInput, PolicyFailure, boundary
from sparring.generation import GenerateRequest, Rendered
from sparring.render.control import MARK
from sparring.render.dialect import tool_call, tool_dicts
from sparring.render.escaping import TextEscaper
from sparring.render.hermes import CLOSE, OPEN, THINK, THINK_END, parse_reply
from sparring.render.reading import HoldingReader, Marks, TaggedReader
from sparring.render.text_rules import TextRules
from sparring.render.tokenizer import FileTokenizer
from sparring.types import Message, ToolCall, ToolSpec

_PROBE = [{"role": "user", "content": "x"}]
_FUNCTION = {"name": "look", "arguments": {"at": "it"}}
_REPLIES = (
    {"role": "assistant", "content": "y"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "call_0", "function": _FUNCTION}]},
)

TAGS = (THINK, THINK_END, OPEN, CLOSE)
READ_BY_TAGS = (
    *("qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3"),
    *("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
)
"""Formats whose replies are a thought, a text and calls between these tags, each of them one id."""

# The rollouts of a group begin with the same prompt, and the library spends a millisecond or more on one.
_REMEMBERED_RENDERS = 64
_REMEMBERED_TOKENS = 8192


class LibraryRenderer:
    """Adapter of one hand-written renderer of the library. `name` is the library's own name of it."""

    def __init__(self, library: Any, tokenizer: FileTokenizer, name: str, escaper: TextEscaper) -> None:
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
        self._remembered: dict[bytes, Rendered] = {}

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
        rendered = self._rendered(self._escaper.messages(messages), self._escaper.tools(tools), generation)
        if key is not None and len(rendered.tokens) <= _REMEMBERED_TOKENS:
            self._remembered[key] = rendered
            if len(self._remembered) > _REMEMBERED_RENDERS:
                del self._remembered[next(iter(self._remembered))]
        return rendered

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
        broken: dict[int, str] = {}
        try:
            parsed = self._parsed(completion, tools, prompt)
        except PolicyFailure:
            mended, broken = self._without_broken_calls(completion, tools)
            try:
                parsed = self._parsed(mended, tools, prompt)
            except PolicyFailure:
                return parse_reply(self._text(completion), thinking=False)
        return Message(
            role="assistant",
            content=parsed.content or "",
            reasoning=(parsed.reasoning_content or "").strip() or None,  # of an open thought, the library keeps blanks
            tool_calls=tuple(
                _call(number, call, broken.get(call.token_span[0], call.raw) if broken else call.raw)
                for number, call in enumerate(parsed.tool_calls)
            ),
        )

    def reader(self, tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> TaggedReader | HoldingReader:
        """Return the reader of a reply that is sampled now; of formats other than `READ_BY_TAGS`, it says nothing
        before the end."""
        if self._marks is None:
            return HoldingReader()
        thinking = prompt_ends_in_reasoning(self.tokenizer, list(prompt) or None, stop_ids=self._marks.stop)
        return TaggedReader(self._marks, self.decode, lambda call: self.parse(call, tools), thinking=thinking)

    @functools.cached_property
    def _marks(self) -> Marks | None:
        """The tags of the format; None where it has others, or they are no ids of their own."""
        added = self.tokenizer.added_tokens
        if self.name not in READ_BY_TAGS or not self.tokenizer.decodes_bytes or not added.keys() >= set(TAGS):
            return None
        think, think_end, call, call_end = (added[tag] for tag in TAGS)
        return Marks(
            think=think,
            think_end=think_end,
            call=call,
            call_end=call_end,
            stop=frozenset(self._stop_ids),
            control=frozenset(added.values()),
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some ids, special tokens included."""
        return self.tokenizer.decode(tokens)

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

    def _parsed(self, completion: Sequence[int], tools: Sequence[ToolSpec], prompt: Sequence[int]) -> Any:
        with boundary(PolicyFailure, f"renderers {self.name}"):
            return self._library.parse_response(
                list(completion), tools=tool_dicts(tools) or None, prompt_ids=list(prompt) or None
            )

    def _without_broken_calls(
        self, completion: Sequence[int], tools: Sequence[ToolSpec]
    ) -> tuple[list[int], dict[int, str]]:
        """Return a reply with nothing in the calls that break the library's parser, and what they said, by the place of
        their tags."""
        mended: list[int] = []
        broken: dict[int, str] = {}
        marks, at = self._marks, 0
        while marks is not None and marks.call in completion[at:]:
            start = completion.index(marks.call, at)
            end = next((n for n in range(start, len(completion)) if completion[n] == marks.call_end), None)
            if end is None:
                break
            mended += completion[at : start + 1]
            try:
                self._parsed(completion[start : end + 1], tools, ())
                mended += completion[start + 1 : end + 1]
            except PolicyFailure:
                broken[len(mended) - 1] = self.decode(completion[start + 1 : end]).strip()
                mended.append(marks.call_end)
            at = end + 1
        return [*mended, *completion[at:]], broken

    def _text(self, completion: Sequence[int]) -> str:
        end = next((at for at, token in enumerate(completion) if token in self._stop_ids), len(completion))
        return self.decode(completion[:end])

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


def _call(number: int, parsed: Any, raw: str) -> ToolCall:
    id = parsed.id or f"call_{number}"
    if parsed.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL):
        return tool_call(id, parsed.name, parsed.arguments, raw)
    return tool_call(id, parsed.name, None, raw)
