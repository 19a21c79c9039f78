"""Grammars of replies that have to call a tool, of formats that write a call's arguments as JSON.

What a format writes around the name and the arguments of a call is found by rendering calls, and read back as proof.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparring.errors import BadInput, refusal
from sparring.protocols import Renderer
from sparring.render.demonstrate import reply_tokens
from sparring.render.tokenizer import FileTokenizer
from sparring.types import Message, ToolCall, ToolSpec

_NAME, _THOUGHT = "sparring_mark_7f3a", "sparring_thought_7f3a"
_ARGUMENTS = {"first": "sparring_value", "second": "x"}
_SEPARATORS = ((", ", ": "), (",", ":"))
"""Separators of items and of keys, as formats write them in JSON."""

_CONTROL = 0x100000
"""First character of those that stand for control tokens in a text; no text of a format has such characters."""

_QUESTION = Message(role="user", content="?")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFormat:
    """Text around the calls of a reply. A control token is one character.

    Attributes:
        openings: what may stand before the name of the first call.
        thought: what stands before a thought and between it and the name of the first call; None where the format has
            no thoughts.
        middle: between the name and the arguments.
        between: between the arguments of a call and the name of the next; None where a reply has one call at most.
        end: behind the arguments of the last call.
        separators: of items and of keys in the arguments.
        control: the control tokens, as text and id, in the order of their characters.
    """

    openings: tuple[str, ...]
    thought: tuple[str, str] | None
    middle: str
    between: str | None
    end: str
    separators: tuple[str, str]
    control: tuple[tuple[str, int], ...]


def call_grammar(format: CallFormat, source: str) -> str:
    """Return the grammar, in Lark's notation, of a reply that calls: a thought where the format has one, then calls.

    Args:
        format: of the calls.
        source: JSON with `tools`, each with `name` and `parameters`, and `parallel`, whether there may be several
            calls.

    Raises:
        BadInput: no tool, or a name that the format would escape.
    """
    wanted = json.loads(source)
    rules = []
    for number, tool in enumerate(wanted["tools"]):
        name = tool["name"]
        if json.dumps(name) != f'"{name}"':
            raise refusal("tool call", "tools with plain names", repr(name), "rename the tool")
        rules.append(f"call_{number}: {_terms(format, name + format.middle)} json_{number}")
        rules.append(f"json_{number}: %json {json.dumps(_schema(tool['parameters'], format.separators))}")
    if not rules:
        raise refusal("tool call", "a tool to call", "none", "name one")
    openings = [_terms(format, opening) for opening in format.openings]
    if format.thought is not None:
        before, after = (_terms(format, text) for text in format.thought)
        openings.append(f"{before} THOUGHT {after}")
        tags = "|".join(re.escape(text).replace("/", "\\/") for text, _ in format.control if text)
        rules.append(f"THOUGHT: /(?s:.)*/ & ~/(?s:.)*({tags})(?s:.)*/")
    more = f"({_terms(format, format.between)} call)*" if format.between is not None and wanted["parallel"] else ""
    return "\n".join(
        (
            f"start: opening call {more} {_terms(format, format.end)}",
            f"opening: {' | '.join(openings)}",
            f"call: {' | '.join(f'call_{number}' for number in range(len(wanted['tools'])))}",
            *rules,
        )
    )


def call_format(renderer: Renderer, tokenizer: FileTokenizer) -> CallFormat:
    """Return what a renderer's format writes around calls.

    Args:
        renderer: of the format.
        tokenizer: of the renderer.

    Raises:
        BadInput: it does not write arguments as JSON, or does not read back what stands in them.
    """
    try:
        format = _rendered(renderer)
        proven = format is not None and _reads_back(renderer, tokenizer, format)
    except BadInput:
        proven = False
    if not proven or format is None:
        expected, got = "a format whose calls are JSON between tokens of their own", repr(renderer.name)
        raise refusal("tool call", expected, got, "leave the tool choice to the policy")
    return format


def _rendered(renderer: Renderer) -> CallFormat | None:
    """Return the format as calls are rendered; None where no arguments in JSON are found."""
    single, thoughtful = _text(renderer, _reply(1)), _text(renderer, _reply(1, _THOUGHT))
    text = single or thoughtful or ""
    separators = next((pair for pair in _SEPARATORS if text.count(_written(pair)) == 1), None)
    if separators is None or text.count(_NAME) != 1:
        return None
    arguments = _written(separators)
    opening, _, rest = text.partition(_NAME)
    middle, _, end = rest.partition(arguments)
    several, between = _text(renderer, _reply(2)), None
    first, last = f"{opening}{_NAME}{middle}{arguments}", f"{_NAME}{middle}{arguments}{end}"
    if several is not None and several.startswith(first) and several.endswith(last):
        between = several[len(first) : len(several) - len(last)]
    thought = _thought(thoughtful)
    subsumed = thought is not None and thought[0] and opening.startswith(thought[0])  # a thought of nothing
    openings = () if single is None or subsumed else (opening,)
    if not openings and thought is None:
        return None
    return CallFormat(
        openings=openings,
        thought=thought,
        middle=middle,
        between=between,
        end=end,
        separators=separators,
        control=_control(renderer),
    )


def _thought(thoughtful: str | None) -> tuple[str, str] | None:
    """Return the tokens before a thought, and what stands between it and the name: the blanks at its ends are its
    own."""
    if thoughtful is None or _THOUGHT not in thoughtful:
        return None
    before, _, after = thoughtful.partition(_NAME)[0].partition(_THOUGHT)
    first = next((at for at, character in enumerate(after) if ord(character) >= _CONTROL), None)
    return None if first is None else (before.rstrip(), after[first:])


def _reads_back(renderer: Renderer, tokenizer: FileTokenizer, format: CallFormat) -> bool:
    """Return whether calls parse as they were made, whatever text stands in them."""
    tags = " ".join(renderer.control_ids)
    arguments = {"first": f'{tags} "\n\\ é </parameter> {{}}', "second": [1]}
    written = tokenizer.control.marked(json.dumps(arguments, ensure_ascii=False, separators=format.separators))
    prompt = renderer.render([_QUESTION], [_spec()]).tokens
    leads = [(opening, None) for opening in format.openings]
    if format.thought is not None:
        leads.append((f"{format.thought[0]}so{format.thought[1]}", "so"))
    for opening, reasoning in leads:
        for count in (1,) if format.between is None else (1, 2):
            calls = (format.between or "").join([f"{_NAME}{format.middle}{written}"] * count)
            text = "".join(
                character if ord(character) < _CONTROL else format.control[ord(character) - _CONTROL][0]
                for character in f"{opening}{calls}{format.end}"
            )
            parsed = renderer.parse(tokenizer.encode(text), [_spec()], prompt=prompt)
            read = [(call.name, call.arguments) for call in parsed.tool_calls]
            if read != [(_NAME, arguments)] * count or parsed.content or parsed.reasoning != reasoning:
                return False
    return True


def _reply(count: int, reasoning: str | None = None) -> Message:
    calls = tuple(ToolCall(id=f"call_{n}", name=_NAME, arguments=_ARGUMENTS) for n in range(count))
    return Message(role="assistant", reasoning=reasoning, tool_calls=calls)


def _spec() -> ToolSpec:
    properties = {"first": {"type": "string"}, "second": {"type": "string"}}
    return ToolSpec(name=_NAME, description="x", parameters={"type": "object", "properties": properties})


def _text(renderer: Renderer, reply: Message) -> str | None:
    """Return what a model would sample for a reply, without its end of turn, each control token as one character; None
    where the format does not continue a prompt with it."""
    try:
        tokens: Sequence[int] = reply_tokens(renderer, reply, [_spec()])
    except BadInput:
        return None
    if tokens[-1] in renderer.stop_ids:
        tokens = tokens[:-1]
    places = {id: place for place, (_, id) in enumerate(_control(renderer))}
    parts: list[str] = []
    plain: list[int] = []
    for token in tokens:
        if token not in places:
            plain.append(token)
            continue
        parts += [renderer.decode(plain), chr(_CONTROL + places[token])]
        plain = []
    return "".join((*parts, renderer.decode(plain)))


def _control(renderer: Renderer) -> tuple[tuple[str, int], ...]:
    return tuple(renderer.control_ids.items())


def _written(separators: tuple[str, str]) -> str:
    return json.dumps(_ARGUMENTS, separators=separators)


def _terms(format: CallFormat, text: str) -> str:
    """Return a text as terms of a grammar."""
    terms = []
    for part in re.split(r"([\U00100000-\U0010ffff])", text):
        if part and ord(part[0]) >= _CONTROL:
            terms.append(f"<[{format.control[ord(part) - _CONTROL][1]}]>")
        elif part:
            terms.append(json.dumps(part, ensure_ascii=False))
    return " ".join(terms)


def _schema(parameters: Mapping[str, Any], separators: tuple[str, str]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, written as the format writes JSON. Arguments are an object."""
    items, keys = separators
    written = {"whitespace_flexible": False, "item_separator": items, "key_separator": keys}
    return {**parameters, "type": "object", "x-guidance": written}
