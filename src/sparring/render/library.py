"""A renderer of the `renderers` library behind our protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from renderers import ToolCallParseStatus

from sparring.errors import PolicyFailure, boundary
from sparring.generation import GenerateRequest
from sparring.protocols import Rendered
from sparring.render.dialect import message_dicts, tool_call, tool_dicts
from sparring.render.hermes import parse_reply
from sparring.render.text_rules import TextRules
from sparring.render.tokenizer import FileTokenizer
from sparring.types import Message, ToolCall, ToolSpec

_PROBE = [{"role": "user", "content": "x"}]

# The rollouts of a group begin with the same prompt, and the library spends a millisecond or more on one.
_REMEMBERED_RENDERS = 64
_REMEMBERED_TOKENS = 8192


class LibraryRenderer:
    """Adapts one hand-written renderer of the library. `name` is the library's own name of it."""

    def __init__(self, library: Any, tokenizer: FileTokenizer, name: str) -> None:
        self._library = library
        self.tokenizer = tokenizer
        self.name = name
        self._stop_ids = tuple(library.get_stop_token_ids())
        self._text_rules = TextRules(tokenizer, self._stop_ids)
        without = library.render(_PROBE).token_ids
        with_prompt = library.render(_PROBE, add_generation_prompt=True).token_ids
        self._generation_prompt = tuple(with_prompt[len(without) :])
        self._remembered: dict[bytes, Rendered] = {}

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn; the first is the one this format writes."""
        return self._stop_ids

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool = True) -> Rendered:
        """A whole conversation as ids [T], ending where the next reply begins when `generation`."""
        key = _key(messages, tools, generation)
        known = None if key is None else self._remembered.get(key)
        if known is not None:
            return known
        rendered = self._rendered(message_dicts(messages), tool_dicts(tools), generation)
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
        """The next prompt: prompt + completion to the id, then the new messages; None where the format cannot."""
        if not completion:
            return None
        bridged = self._library.bridge_to_next_turn(
            list(prompt), list(completion), message_dicts(new), tools=tool_dicts(tools) or None
        )
        if bridged is None:
            return None
        before = (*prompt, *completion)
        tokens = tuple(bridged.token_ids)
        return tokens if tokens[: len(before)] == before else None

    def parse(self, completion: Sequence[int], tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> Message:
        """The reply that sampled ids stand for. Every sequence parses: what no grammar accepts is plain text."""
        try:
            with boundary(PolicyFailure, f"renderers {self.name}"):
                parsed = self._library.parse_response(
                    list(completion), tools=tool_dicts(tools) or None, prompt_ids=list(prompt) or None
                )
        except PolicyFailure:
            # Only what breaks the library's own parser comes here, such as JSON nested past Python's recursion limit.
            return parse_reply(self._text(completion), thinking=False)
        return Message(
            role="assistant",
            content=parsed.content or "",
            reasoning=parsed.reasoning_content or None,
            tool_calls=tuple(_call(number, call) for number, call in enumerate(parsed.tool_calls)),
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some ids, special tokens included."""
        return self.tokenizer.decode(tokens)

    def bind(self, request: GenerateRequest) -> GenerateRequest:
        """The request with what its sampling says in text also said in ids."""
        return self._text_rules.bind(request)

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], generation: bool) -> Rendered:
        rendered = self._library.render(messages, tools=tools or None, add_generation_prompt=generation)
        tokens = tuple(rendered.token_ids)
        sampled = list(rendered.sampled_mask) or [
            index >= 0 and messages[index]["role"] == "assistant" for index in rendered.message_indices
        ]
        self._unmark_generation_prompts(tokens, sampled)
        return Rendered(tokens=tokens, sampled=tuple(sampled))

    def _text(self, completion: Sequence[int]) -> str:
        end = next((at for at, token in enumerate(completion) if token in self._stop_ids), len(completion))
        return self.decode(completion[:end])

    def _unmark_generation_prompts(self, tokens: Sequence[int], sampled: list[bool]) -> None:
        """The library counts a prefilled block (an empty thought) as sampled; in a live rollout the prompt holds it."""
        prefix = self._generation_prompt
        for start, token in enumerate(tokens):
            if prefix and token == prefix[0] and tuple(tokens[start : start + len(prefix)]) == prefix:
                sampled[start : start + len(prefix)] = [False] * len(prefix)


def _key(messages: Sequence[Message], tools: Sequence[ToolSpec], generation: bool) -> bytes | None:
    """Different for all that may render differently (1, 1.0 and True are); None for what has no bytes: an integer beyond
    64 bits, a lone surrogate, an argument that is no plain data."""
    try:
        return msgspec.msgpack.encode((tuple(messages), tuple(tools), generation))
    except (TypeError, ValueError, OverflowError):
        return None


def _call(number: int, parsed: Any) -> ToolCall:
    id = parsed.id or f"call_{number}"
    if parsed.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL):
        return tool_call(id, parsed.name, parsed.arguments, parsed.raw)
    return tool_call(id, parsed.name, None, parsed.raw)
