"""Parsing of calls whose arguments stand between tags, with one layout for each family of formats.

The `renderers` library (0.1.12) strips the ends of a value, cuts a value at a closing tag inside it, and knows neither
the Python literals that its own templates write nor a list of types. Here a value is everything between its tags except
the newlines that the template adds, and a call that deviates from the format is malformed. Other servers had the same
faults: vllm-project/vllm issue 48753, fixed by pull 48846; raullenchai/Rapid-MLX issue 3401.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparring.errors import BadInput
from sparring.render.calls.kinds import PYTHON_WORDS, value_of
from sparring.render.calls.schemas import Schema, schema_of
from sparring.render.dialect import tool_call
from sparring.types import ToolCall, ToolSpec

_ID = 0x100000
"""First of the characters that stand for single-id tags in the text of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Text of the calls of one family of formats, as regular expressions.

    Attributes:
        head: text before the first argument; its group is the name of the tool.
        key: text before a value; its group is the name of the argument.
        close: text after a value.
        tail: text after the last value.
        ids: tags that are single token ids; the same characters as ordinary text are not the tag. In the
            expressions, the n-th of these tags is the character `_ID` + n.
        newlines: whether the template writes a newline before and after each value.
        several: whether one pair of call tags may hold several calls.
        words: literals that the template writes instead of JSON's, with their values.
    """

    head: str
    key: str
    close: str
    tail: str
    ids: tuple[str, ...] = ()
    newlines: bool = False
    several: bool = False
    words: Mapping[str, Any] = field(default_factory=dict)


_PARAMETER = Layout(
    head=r"\s*<function=([^>]+)>",
    key=r"\s*<parameter=([^>]+)>",
    close="</parameter>",
    tail=r"\s*(?:</function>)?\s*",
    newlines=True,
)
_PYTHON_PARAMETER = replace(_PARAMETER, words=PYTHON_WORDS)
_INVOKE = Layout(
    head=r'\s*<invoke name="([^"]+)">',
    key=r'\s*<parameter name="([^"]+)">',
    close="</parameter>",
    tail=r"\s*</invoke>\s*",
    several=True,
)
_ARGUMENT = Layout(
    head=r"((?:(?!</?arg_(?:key|value)>).)+)(?=<arg_key>|\Z)",
    key=r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>",
    close="</arg_value>",
    tail=r"\s*",
)
_KEY, _KEY_END, _VALUE, _VALUE_END, _SEP = (chr(_ID + place) for place in range(5))
_ANY = f"{_KEY}-{_SEP}"
_ARGUMENT_IDS = Layout(
    head=rf"([^{_ANY}]+)",
    key=rf"\s*{_KEY}([^{_ANY}]*){_KEY_END}\s*{_VALUE}",
    close=_VALUE_END,
    tail=r"\s*",
    ids=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_HUNYUAN = Layout(
    head=rf"([^{_ANY}]+){_SEP}?",
    key=_ARGUMENT_IDS.key,
    close=_VALUE_END,
    tail=r"\s*",
    ids=(*(tag.replace(">", ":opensource>") for tag in _ARGUMENT_IDS.ids), "<tool_sep:opensource>"),
)

LAYOUTS: Mapping[str, Layout] = {
    **dict.fromkeys(("qwen3.6", "qwen3.8"), _PARAMETER),
    **dict.fromkeys(("qwen3.5", "prime-qwen3", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), _PYTHON_PARAMETER),
    "minimax-m2": _INVOKE,
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), _ARGUMENT_IDS),
    "hy3": _HUNYUAN,
    **dict.fromkeys(("laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2"), _ARGUMENT),
}
"""Formats of the library whose arguments stand between tags. `deepseek-v4` is missing: its tags mark which values are
text, and the library parses its calls correctly."""


class TaggedCalls:
    """Parser of the calls of one format."""

    def __init__(self, layout: Layout, added: Mapping[str, int], decode: Callable[[Sequence[int]], str]) -> None:
        self._layout, self._decode = layout, decode
        self._chars = {added[tag]: chr(_ID + place) for place, tag in enumerate(layout.ids) if tag in added}
        self._head = re.compile(layout.head, re.DOTALL)
        self._key = re.compile(layout.key, re.DOTALL)
        self._tail = re.compile(layout.tail, re.DOTALL)

    def read(self, ids: Sequence[int], tools: Sequence[ToolSpec], before: int, *, closed: bool) -> list[ToolCall]:
        """Parse the ids between the tags of a call: one call, or several if the layout allows.

        Args:
            before: number of earlier calls of the reply.
            closed: whether the closing tag follows; a call without it is malformed.
        """
        text = self._text(ids)
        calls: list[ToolCall] = []
        at = 0
        while True:
            number = before + len(calls)
            name, arguments, end = self._call(text, at, tools)
            parsed = closed and arguments is not None and (end == len(text) or self._layout.several)
            raw = self._spell_out(text[at:]).strip()
            calls.append(tool_call(f"call_{number}", name or None, arguments if parsed else None, raw))
            if not parsed or end == len(text):
                return calls
            at = end

    def _call(self, text: str, at: int, tools: Sequence[ToolSpec]) -> tuple[str, dict[str, Any] | None, int]:
        """Parse the call at a position: return its name, its arguments (None if malformed), and the position after
        it."""
        head = self._head.match(text, at)
        if head is None:
            return "", None, at
        name, arguments = head[1].strip(), dict[str, Any]()
        schema = next((tool.parameters for tool in tools if tool.name == name), {})
        root = _readable(schema)
        at = head.end()
        while key := self._key.match(text, at):
            end = text.find(self._layout.close, key.end())
            argument = key[1].strip()
            if end < 0 or argument in arguments:
                return name, None, at
            try:
                written = self._spell_out(self._inner(text[key.end() : end]))
                inner = root.member(root.top, argument)
                arguments[argument] = value_of(written, inner, root, self._layout.words)
            except ValueError:
                return name, None, at
            at = end + len(self._layout.close)
        tail = self._tail.match(text, at)
        return (name, None, at) if tail is None else (name, arguments, tail.end())

    def _inner(self, written: str) -> str:
        return written.removeprefix("\n").removesuffix("\n") if self._layout.newlines else written

    def _text(self, ids: Sequence[int]) -> str:
        """Decode the ids of a call, with one character for each single-id tag."""
        if not self._chars:
            return self._decode(ids)
        parts, plain = [], list[int]()
        for token in ids:
            if token in self._chars:
                parts += [self._decode(plain), self._chars[token]]
                plain = []
            else:
                plain.append(token)
        return "".join((*parts, self._decode(plain)))

    def _spell_out(self, text: str) -> str:
        """Replace the characters of single-id tags by the tags' text."""
        for place, tag in enumerate(self._layout.ids):
            text = text.replace(chr(_ID + place), tag)
        return text


def _readable(parameters: Mapping[str, Any]) -> Schema:
    """Resolve a schema; return a schema of all values if a reference cannot be resolved."""
    try:
        return schema_of(parameters)
    except BadInput:
        return schema_of({})
