"""Adapter to the renderers of the `renderers` library."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from sparring.errors import BadInput, boundary
from sparring.generation import Rendered
from sparring.render.capabilities import TemplatePlaces
from sparring.render.control import MARK
from sparring.render.escaping import TextEscaper
from sparring.render.library_parser import LibraryParser
from sparring.render.reply_reader import HoldingReader, TaggedReader
from sparring.render.tags import around_call
from sparring.render.text_rules import TextRules, TokenizedFormat
from sparring.render.thoughts import drops_thoughts, has_dropped, with_thoughts
from sparring.render.tokenizer import FileTokenizer
from sparring.types import Message, ToolSpec

_PROBE = [{"role": "user", "content": "x"}]
_FUNCTION = {"name": "look", "arguments": {"at": "it"}}
_REPLIES = (
    {"role": "assistant", "content": "y"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "call_0", "function": _FUNCTION}]},
)

_IN_JSON = {"kimi-k2.5": "tool_declare"}
"""Formats that write tools in TypeScript, with the role of the message that holds all tools as JSON if a schema has no
TypeScript form (`oneOf`, no type, a reference to a schema outside `$defs`). Kimi K2.5's own tokenizer writes JSON then;
the library refuses such a schema."""

# The rollouts of a group begin with the same prompt, and the library spends a millisecond or more on one.
_REMEMBERED_RENDERS = 64
_REMEMBERED_TOKENS = 8192


class LibraryRenderer(TokenizedFormat):
    """Adapter of one hand-written renderer of the library. Implements `Renderer`.

    Args:
        name: the library's name of the renderer.
        keeps_thoughts: whether thoughts of earlier replies stay in the prompt even if the format drops them.
        stop_ids: ids that the checkpoint names as ends of a generation, in addition to the format's.
    """

    def __init__(
        self,
        library: Any,
        tokenizer: FileTokenizer,
        name: str,
        escaper: TextEscaper,
        *,
        keeps_thoughts: bool = False,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self._library = library
        own = MARK in tokenizer.decode(library.render([{"role": "user", "content": MARK}]).token_ids)
        self._escaper = (escaper.without_marks() if own else escaper).between(around_call(name))
        self.tokenizer = tokenizer
        self.name = name
        self.stop_ids = tuple(dict.fromkeys((*library.get_stop_token_ids(), *stop_ids)))
        self._places = TemplatePlaces(self._write)
        self._text_rules = TextRules(tokenizer, self.stop_ids, self)
        without = library.render(_PROBE).token_ids
        with_prompt = library.render(_PROBE, add_generation_prompt=True).token_ids
        self._generation_prompt = tuple(with_prompt[len(without) :])
        self._ends = {self._end(reply) for reply in _REPLIES} - {None}
        self._parser = LibraryParser(library, tokenizer, name, self.stop_ids)
        self._remembered: dict[bytes, Rendered] = {}
        self._remembering = threading.Lock()
        self._mends_thoughts = keeps_thoughts and drops_thoughts(self)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool = True) -> Rendered:
        """Render a conversation as ids [T]; with `generation`, up to where the next reply begins."""
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
        """Render a conversation as the format does, without keeping thoughts. Raises the errors of `render`."""
        self._places.check(tools)
        arranged = self._places.arranged(messages, tools)
        return self._render(self._escaper.messages(arranged), self._escaper.tools(tools), generation)

    def bridge(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> tuple[int, ...] | None:
        """Return the next prompt: prompt + completion, the format's end of turn if the completion lacks it, and the new
        messages. None if the format cannot append the messages, or if the end of turn was sampled inside a thought."""
        if not completion:
            return None
        # the library takes any stop id for the end of a turn; a stop id that the format does not write cuts the turn
        foreign = bool(self._ends) and completion[-1] in self.stop_ids and completion[-1] not in self._ends
        reply = completion[:-1] if foreign else completion
        close = self._parser.left_open(reply, prompt)
        if close is not None and any(token in self.stop_ids for token in reply):
            return None
        bridged = self._library.bridge_to_next_turn(
            list(prompt),
            [*reply, *(() if close is None else (close,))],
            self._escaper.answers(self._places.following(new, tools)),
            tools=self._escaper.tools(tools) or None,
        )
        if bridged is None:
            return None
        before = (*prompt, *reply)
        tokens = tuple(bridged.token_ids)
        return (*prompt, *completion, *tokens[len(before) :]) if tokens[: len(before)] == before else None

    def parse(self, completion: Sequence[int], tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> Message:
        """Parse sampled ids as a reply. Every sequence parses: text that no grammar accepts is plain content, and a
        call that breaks the library's parser, such as JSON nested beyond Python's recursion limit, is malformed.
        Without tools, nothing is a call."""
        return self._parser.parse(completion, tools, prompt)

    def reader(self, tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> TaggedReader | HoldingReader:
        return self._parser.reader(tools, prompt)

    def thought_length(self, completion: Sequence[int]) -> int | None:
        return self._parser.thought_length(completion)

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], generation: bool) -> Rendered:
        try:
            rendered = self._render_by_library(messages, tools, generation)
        except BadInput:
            if not tools or self.name not in _IN_JSON:
                raise
            declared = json.dumps(tools, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
            messages = [{"role": _IN_JSON[self.name], "content": declared}, *messages]
            rendered = self._render_by_library(messages, [], generation)
        tokens = tuple(rendered.token_ids)
        sampled = list(rendered.sampled_mask) or [
            index >= 0 and messages[index]["role"] == "assistant" for index in rendered.message_indices
        ]
        self._unmark_generation_prompts(tokens, sampled)
        return Rendered(tokens=tokens, sampled=tuple(sampled))

    def _render_by_library(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], generation: bool) -> Any:
        with boundary(
            BadInput, f"renderer {self.name}", "a conversation that its format takes", "correct the conversation"
        ):
            return self._library.render(messages, tools=tools or None, add_generation_prompt=generation)

    def _write(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], generation: bool) -> str:
        return self.decode(self._render(messages, tools, generation).tokens)

    def _end(self, reply: dict[str, Any]) -> int | None:
        """Return the id with which the format ends this reply; None if the beginning of the next turn ends it."""
        rendered = self._render([*_PROBE, reply], [], False)
        ends = [
            t for t, sampled in zip(rendered.tokens, rendered.sampled, strict=True) if sampled and t in self.stop_ids
        ]
        return ends[-1] if ends else None

    def _unmark_generation_prompts(self, tokens: Sequence[int], sampled: list[bool]) -> None:
        """Mark prefilled blocks (an empty thought) as not sampled: the library counts these blocks as sampled, but in a
        live rollout the prompt contains them."""
        prefix = self._generation_prompt
        for start, token in enumerate(tokens):
            if prefix and token == prefix[0] and tuple(tokens[start : start + len(prefix)]) == prefix:
                sampled[start : start + len(prefix)] = [False] * len(prefix)


def _key(messages: Sequence[Message], tools: Sequence[ToolSpec], generation: bool) -> bytes | None:
    """Return a cache key that is different wherever a rendering may differ, as for 1, 1.0 and True. None if the
    conversation cannot be encoded as a key, because of an integer beyond 64 bits, a lone surrogate, or an argument that
    is no plain data."""
    try:
        return msgspec.msgpack.encode((tuple(messages), tuple(tools), generation))
    except (TypeError, ValueError, OverflowError):
        return None
