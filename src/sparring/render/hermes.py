"""Parsing of a reply in the Hermes format, for models without a library renderer: a thought, text, tool calls.

<think> ... </think> text <tool_call>{"name": ..., "arguments": {...}}</tool_call>
"""

from __future__ import annotations

import re
from typing import Any

from sparring.render.dialect import tool_call
from sparring.types import Message, ToolCall
from sparring.validation import read_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"
_BLOCK = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)


def parse_reply(text: str, *, thinking: bool, calls: bool = True) -> Message:
    """Parse a reply's text as a message; every text parses.

    Args:
        text: sampled text, without the token that ended it.
        thinking: whether the prompt ended inside a thought.
        calls: whether there are tools to call; otherwise text that looks like a call stays text.
    """
    reasoning, text = _thought(text, thinking)
    content, *blocks = text.split(OPEN) if calls else [text]
    tool_calls = tuple(call_in(number, block) for number, block in enumerate(blocks))
    return Message(role="assistant", content=content.strip(), reasoning=reasoning or None, tool_calls=tool_calls)


def plain_parts(text: str) -> list[tuple[str, bool]]:
    """Split the text of a reply into parts, each with whether it is plain text. The tags of a complete thought at the
    beginning, and of complete calls, are not plain: data sets write them into the text of a message."""
    parts = []
    if text.lstrip().startswith(THINK) and THINK_END in text:
        thought, _, text = text.partition(THINK_END)
        before, _, thought = thought.partition(THINK)
        parts += [(before + THINK, False), (thought, True), (THINK_END, False)]
    position = 0
    for block in _BLOCK.finditer(text):
        if call_in(0, block[1] + CLOSE).arguments is not None:
            parts += [(text[position : block.start()], True), (OPEN, False), (block[1], True), (CLOSE, False)]
            position = block.end()
    return [*parts, (text[position:], True)]


def _thought(text: str, thinking: bool) -> tuple[str, str]:
    opened = text.lstrip().startswith(THINK)
    if not (opened or thinking):
        return "", text
    inside, _, rest = text.partition(THINK_END)
    return inside.lstrip().removeprefix(THINK).strip(), rest


def call_in(number: int, block: str) -> ToolCall:
    """Parse the text after an opening tag as a call. Text after the closing tag is left out."""
    body, closed, _ = block.partition(CLOSE)
    raw = body.strip()
    parsed: Any = None
    if closed:
        try:
            parsed = read_json(raw)
        except ValueError:
            parsed = None
    fields = parsed if isinstance(parsed, dict) else {}
    return tool_call(f"call_{number}", fields.get("name"), fields.get("arguments", {} if fields else None), raw)
