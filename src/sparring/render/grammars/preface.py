"""Thoughts before a constrained text: derived from rendered replies and the ids of a format, and proved by parsing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparring.errors import BadInput, refusal
from sparring.generation import Preface
from sparring.protocols import Renderer
from sparring.render.demonstrate import reply_tokens
from sparring.render.tokenizer import FileTokenizer
from sparring.types import Message, ToolCall, ToolSpec

_THOUGHT, _CONTENT, _WORD = "sparring_thought_7f3a", "sparring_content_7f3a", "so"
_TOOL = ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {}})
_CALL = ToolCall(id="call_0", name="look", arguments={})

_Ids = tuple[int, ...]


def prompt_thinks(renderer: Renderer, tokenizer: FileTokenizer, prompt: Sequence[int]) -> bool:
    """Return whether a prompt ends inside a thought."""
    return renderer.parse(tokenizer.encode(_WORD), (), prompt=prompt).reasoning is not None


def find_preface(renderer: Renderer, tokenizer: FileTokenizer, prompt: Sequence[int]) -> Preface | None:
    """Return the ids before the text of a reply to a prompt; None if the format has no thought there.

    Raises:
        BadInput: the prompt ends inside a thought, and no token ends it.
    """
    word, begun = tuple(tokenizer.encode(_WORD)), prompt_thinks(renderer, tokenizer, prompt)
    ways = list(_written(renderer, tokenizer))
    if begun:  # some formats write no thought of an earlier reply
        ways = [*(((), *way[1:]) for way in ways), *(((), id, ()) for id in renderer.control_ids.values())]
    for begin, end, text in ways:
        if not begun and not begin:
            continue
        read = renderer.parse((*begin, *word, end, *text, *word), (), prompt=prompt)
        if read.reasoning == read.content == _WORD:
            plain = None if begun else _opening(renderer, tokenizer, begin)
            return Preface(plain=plain, begin=begin, end=end, text=text)
    if begun:
        got = f"{renderer.name!r}, which ends it with text"
        raise refusal("constraint", "a format that ends a thought with a token", got, "switch render.thinking off")
    return None


def _written(renderer: Renderer, tokenizer: FileTokenizer) -> Iterator[tuple[_Ids, int, _Ids]]:
    """Yield the ids before a thought, its end and the ids behind that, as replies are rendered. Blanks around a thought
    belong to it, except after a word."""
    for calls in ((), (_CALL,)):  # gpt-oss keeps a thought only in a reply with calls
        reply = Message(role="assistant", content=_CONTENT, reasoning=_THOUGHT, tool_calls=calls)
        try:
            text = renderer.decode(reply_tokens(renderer, reply, (_TOOL,) * len(calls)))
        except BadInput:
            continue
        before, _, rest = text.partition(_THOUGHT)
        between, found, _ = rest.partition(_CONTENT)
        begin, ids = tokenizer.encode(before.rstrip()), tokenizer.encode(between.lstrip())
        if begin and begin[-1] not in renderer.control_ids.values():
            begin = tokenizer.encode(before)
        if found and ids:
            yield tuple(begin), ids[0], tuple(ids[1:])


def _opening(renderer: Renderer, tokenizer: FileTokenizer, begin: _Ids) -> _Ids:
    """Return the ids that a format writes before a text without a thought, if they begin with a control token other
    than an empty thought's."""
    try:
        text = renderer.decode(reply_tokens(renderer, Message(role="assistant", content=_CONTENT)))
    except BadInput:
        return ()
    ids = tuple(tokenizer.encode(text.partition(_CONTENT)[0]))
    return ids if ids and ids[0] in renderer.control_ids.values() and ids[: len(begin)] != begin else ()
