"""Thoughts before a constrained text: derived from rendered replies and the ids of a format, and proved by parsing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparring.errors import BadInput, refusal
from sparring.generation import Preface
from sparring.protocols import Renderer
from sparring.render.demonstrate import reply_tokens
from sparring.render.tokenizer import FileTokenizer
from sparring.types import Message, ToolCall, ToolSpec

WORD = "so"  # a thought or a text, as the prompt says
_THOUGHT, _CONTENT = "sparring_thought_7f3a", "sparring_content_7f3a"
_TOOL = ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {}})
_CALL = ToolCall(id="call_0", name="look", arguments={})


def find_preface(renderer: Renderer, tokenizer: FileTokenizer, prompt: Sequence[int]) -> Preface | None:
    """Return the ids before the text of a reply to a prompt; None if the format has no thought there.

    Raises:
        BadInput: the prompt ends inside a thought, and no single token ends a thought.
    """
    word = tokenizer.encode(WORD)
    thinks = renderer.parse(word, (), prompt=prompt).reasoning is not None
    found = [way for way in _written(renderer, tokenizer) if way.begin or thinks]
    if thinks:  # some formats write no thought of an earlier reply
        found += [Preface(end=id) for id in renderer.control_ids.values()]
    for way in found:
        begin = () if thinks else way.begin
        read = renderer.parse((*begin, *word, way.end, *way.text, *word), (), prompt=prompt)
        if read.reasoning == read.content == WORD:
            return Preface(begin=begin, end=way.end, text=way.text)
    if thinks:
        got, do = f"{renderer.name!r}, which ends it with text", "switch its thinking off"
        raise refusal("constraint", "a format that ends a thought with a token", got, do)
    return None


def _written(renderer: Renderer, tokenizer: FileTokenizer) -> Iterator[Preface]:
    """Yield the ids around a thought in rendered replies. Blanks belong to the thought, except after a word."""
    for calls in ((), (_CALL,)):  # gpt-oss keeps a thought only in a reply with calls
        reply = Message(role="assistant", content=_CONTENT, reasoning=_THOUGHT, tool_calls=calls)
        try:
            before, _, rest = renderer.decode(reply_tokens(renderer, reply, (_TOOL,) * len(calls))).partition(_THOUGHT)
        except BadInput:
            continue
        between, found, _ = rest.partition(_CONTENT)
        begin, after = tokenizer.encode(before.rstrip()), tokenizer.encode(between.lstrip())
        if begin and begin[-1] not in renderer.control_ids.values():
            begin = tokenizer.encode(before)
        if found and after:
            yield Preface(begin=tuple(begin), end=after[0], text=tuple(after[1:]))
