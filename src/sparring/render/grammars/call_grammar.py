"""Grammars of replies that must call a tool, or may call only certain tools, in a known format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sparring.errors import refusal
from sparring.protocols import Renderer
from sparring.render.calls.schemas import Schema, schema_of
from sparring.render.grammars.call_format import CONTROL, NAME, NUMBER, ArgumentTags, CallFormat, reads_back
from sparring.render.grammars.quoted_grammar import QuotedValues
from sparring.render.grammars.value_grammar import (
    either_json,
    either_terminal,
    is_limited,
    json_schema,
    may_be_empty,
    python_words,
    reads_as,
    text_terminal,
    texts_of,
    without,
)
from sparring.render.tokenizer import FileTokenizer
from sparring.types import ToolSpec

_RELATIONS = ("oneOf", "allOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies")
"""Keywords that relate arguments to one another. If an alternative of a schema still has such a keyword, its arguments
cannot be constrained one by one."""


def call_grammar(format: CallFormat, source: str) -> str:
    """Return the grammar of a reply in Lark's notation: a thought if the format has thoughts, then calls. If the reply
    may be text, the grammar also allows text before the calls or instead of them.

    Args:
        source: JSON with `tools` (each with `name` and `parameters`), `parallel` (whether several calls are allowed)
            and `text` (whether the reply may be text).

    Raises:
        BadInput: there is no tool; a name needs escaping; the schema relates arguments to one another, and the format
            writes each argument between tags; or text is allowed in a format in which no control token begins a call.
    """
    wanted = json.loads(source)
    tools = wanted["tools"]
    rules: list[str] = []
    other = format.otherwise()
    for number, tool in enumerate(tools):
        if json.dumps(tool["name"]) != f'"{tool["name"]}"':
            raise refusal("tool call", "tools with plain names", repr(tool["name"]), "rename the tool")
        rules += _Call(format, number, tool["name"], tool["parameters"]).rules()
        if other is not None:
            rules.append(f"other_{number}: {_terms(format, tool['name'] + other.head)} json_{number}")
    if not tools:
        raise refusal("tool call", "a tool to call", "none", "name one")
    between = " | ".join(_terms(format, text) for text in format.between)
    more = f"(({between}) call)*" if between and wanted["parallel"] else ""
    end = _terms(format, format.end)
    ways = [(format, f"call {more} {end}")]
    if other is not None:
        ways.append((other, f"other {end}"))
        rules.append(f"other: {' | '.join(f'other_{number}' for number in range(len(tools)))}")
    if _thoughts(format):
        tags = "|".join(re.escape(text).replace("/", "\\/") for text, _ in format.control if text)
        rules.append(f"THOUGHT: /(?s:.)+/ & ~/(?s:.)*({tags})(?s:.)*/")
    start = _text_or(format, ways, rules) if wanted.get("text") else _calls_alone(ways)
    return "\n".join((start, f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}", *rules))


def check_calls(renderer: Renderer, tokenizer: FileTokenizer, format: CallFormat, source: str) -> None:
    """Check that a format reads back the names of the tools and of their arguments.

    Args:
        source: JSON, as for `call_grammar`.

    Raises:
        BadInput: a tool or an argument is parsed under another name.
    """
    for tool in json.loads(source)["tools"]:
        spec = ToolSpec(name=tool["name"], description="", parameters=tool["parameters"])
        root = schema_of(tool["parameters"])
        flagged = format.tags is not None and format.tags.text != format.tags.json
        for values in _ways(root) if format.tags is not None else [({}, ())]:
            made = {key: 1 if reads_as(schema, root, flagged) == "json" else "x" for key, schema in values[0].items()}
            if not reads_back(renderer, tokenizer, format, [(spec.name, made)], [spec]):
                got = repr([spec.name, *made])
                raise refusal("tool call", "names that the format reads as they are written", got, "rename them")


class _Call:
    def __init__(self, format: CallFormat, number: int, name: str, parameters: Mapping[str, Any]) -> None:
        self._format, self._number, self._name, self._root = format, number, name, schema_of(parameters)

    def rules(self) -> list[str]:
        """Return the rule `call_<number>` and the rules that it uses. Arguments stand in the order of the schema."""
        format, number = self._format, self._number
        head = _terms(format, self._name + format.head.replace(NAME, self._name))
        if format.quote is not None:
            quoted = QuotedValues(format, self._root, f"value_{number}", partial(_terms, format))
            made = quoted.rule(_of_objects(self._root))
            return [f"call_{number}: {head} {made}", *quoted.rules]
        if format.tags is None:
            written = json_schema(format, _of_objects(self._root), self._root)
            return [f"call_{number}: {head} json_{number}", f"json_{number}: %json {written}"]
        ways = _ways(self._root)
        names = [f"{number}" if len(ways) == 1 else f"{number}or{way}" for way in range(len(ways))]
        rules = [f"call_{number}: {head} ({' | '.join(f'first_{name}_0' for name in names)})"]
        for name, (properties, required) in zip(names, ways, strict=True):
            rules += self._arguments(format.tags, name, properties, required)
        return rules

    def _arguments(
        self, tags: ArgumentTags, name: str, properties: Mapping[str, Any], required: Sequence[str]
    ) -> list[str]:
        """Return the rule `first_<name>_0` and the rules that it uses, for arguments between tags."""
        rules = []
        for at, (key, schema) in enumerate(properties.items()):
            for rule, before in (("first", tags.first), ("more", tags.more)):
                values, needed = self._value(f"{name}_{at}_{rule}", before + key, schema)
                skipped = [] if key in required else [f"{rule}_{name}_{at + 1}"]
                followed = [f"({' | '.join(values)}) more_{name}_{at + 1}", *skipped]
                rules += [f"{rule}_{name}_{at}: {' | '.join(followed)}", *needed]
        last = len(properties)
        return [*rules, f"first_{name}_{last}: {_terms(self._format, tags.none)}", f'more_{name}_{last}: ""']

    def _value(self, name: str, before: str, schema: Any) -> tuple[list[str], list[str]]:
        """Return the alternatives of an argument, from its name to the end of its value, and the rules that they
        use."""
        tags, ends = self._format.tags, self._format.ends
        assert tags is not None
        root = self._root
        kind = reads_as(schema, root, tags.text != tags.json)
        values: list[str] = []
        rules: list[str] = []
        if kind != "json":
            texts = texts_of(schema, root)
            terminal = either_terminal(schema, root, ends)
            if kind == "text":
                terminal = " | ".join(f"({text_terminal(branch, ends)})" for branch in texts)
            loose = kind == "text" and not any(map(is_limited, texts))
            body, rules = self._text(name, terminal, loose=loose, empty=any(map(may_be_empty, texts)))
            values.append(f"{_terms(self._format, before + tags.text)} {body}")
        if kind != "text" and self._format.words and (words := python_words(schema, root)):
            written = " | ".join(_terms(self._format, f"{word}{tags.close}") for word in words)
            values.append(f"{_terms(self._format, before + tags.json)} ({written})")
        in_json = schema if kind == "json" else either_json(schema, root) if kind == "either" else None
        if in_json is not None:
            written = json_schema(self._format, in_json, root)
            rules.append(f"json_{name}: %json {written}")
            values.append(f"{_terms(self._format, before + tags.json)} json_{name} {_terms(self._format, tags.close)}")
        return values, rules

    def _text(self, name: str, terminal: str, *, loose: bool, empty: bool) -> tuple[str, list[str]]:
        """Return an expression of a text with its end, and the rules that it uses.

        An end that is a control token ends the value wherever it occurs. An end that is text ends the value at its
        first occurrence. For an end that is text followed by a control token, `loose` decides: if true, only both
        together end the value; if false, the text alone does.
        """
        assert self._format.tags is not None
        close = self._format.tags.close
        at = next((at for at, character in enumerate(close) if ord(character) >= CONTROL), len(close))
        spelled, rest = json.dumps(close[:at], ensure_ascii=False), _terms(self._format, close[at:])
        upper = name.upper()
        if at == 0:
            return f"TEXT_{upper}{'?' if empty else ''} {rest}", [f"TEXT_{upper}: ({terminal}) & /(?s:.)+/"]
        ending = [f"text_{name}[lazy]: VALUE_{upper}", f"VALUE_{upper}: TEXT_{upper} {spelled}"]
        ending.append(f"TEXT_{upper}: {terminal}")
        if at == len(close) or not loose:
            return f"text_{name} {rest}", ending
        token = re.escape(self._format.control[ord(close[at]) - CONTROL][0])
        following = [f"again_{name}[lazy]: AGAIN_{upper}", f"AGAIN_{upper}: AFTER_{upper} {spelled}"]
        following.append(f"AFTER_{upper}: /(?s:.)*/ & ~/{token}(?s:.)*/")
        return f"text_{name} again_{name}* {rest}", [*ending, *following]


def _of_objects(root: Schema) -> dict[str, Any]:
    return {**root.top, "type": "object"}


def _ways(root: Schema) -> list[tuple[dict[str, Any], Sequence[str]]]:
    """Return for each alternative of a tool's parameters the schemas of its arguments, in order, and the names of the
    required arguments.

    Raises:
        BadInput: the schema relates arguments to one another, names no argument, or allows no call.
    """
    ways = [(branch, _properties(root, branch)) for branch in root.branches(_of_objects(root))]
    if not ways:
        raise refusal("tool call", "parameters that allow a call", "a schema that allows none", "correct the schema")
    return [(properties, branch.get("required", ())) for branch, properties in ways]


def _properties(root: Schema, branch: Mapping[str, Any]) -> dict[str, Any]:
    required = branch.get("required", ())
    properties = dict.fromkeys((*(branch.get("properties") or {}), *required))
    relation = next((key for key in _RELATIONS if key in branch), None)
    if branch.get("minProperties", 0) > len(required):
        relation = "minProperties"
    unnamed = next((key for key in ("patternProperties", "additionalProperties") if branch.get(key)), None)
    if relation is None and not properties and branch.get(unnamed or "") not in (None, True):
        relation = unnamed
    if relation is not None:
        expected = "parameters that are told apart by their names"
        raise refusal("tool call", expected, relation, "leave the tool choice to the policy")
    values = {key: root.member(branch, key) for key in properties}
    return {key: value for key, value in values.items() if key in required or root.branches(value)}


def _calls_alone(ways: Sequence[tuple[CallFormat, str]]) -> str:
    """Return the rule of a reply of calls alone: one alternative for each way to write calls, with its openings."""
    written = [
        f"({_openings(way, way.openings, [] if way.thought is None else [way.thought])}) {calls}" for way, calls in ways
    ]
    return f"start: {' | '.join(written)}"


def _text_or(format: CallFormat, ways: Sequence[tuple[CallFormat, str]], rules: list[str]) -> str:
    """Return the rule of a reply of text, of calls, or of both.

    Args:
        ways: ways to write the calls: pairs of a format and an expression of the calls without their opening.
        rules: list to which the rules used by the returned rule are added.
    """
    if format.call is None:
        expected = "a format in which a token of its own begins a call"
        raise refusal("tool call", expected, "one in which text can", "allow all tools, or require a call")
    openings = [opening.removesuffix(format.call).rstrip() for opening in format.openings]
    thoughts = [(before, after.removesuffix(format.call).rstrip()) for before, after in _thoughts(format)]
    spelled = "" if format.tags is not None or format.quote is not None else without(format.ends)
    closed = [around for around in thoughts if around[1]]
    rules += [f"TEXT: /(?s:.)+/{spelled}", f"before: {_openings(format, openings, closed)}"]
    rules.append(f"calls: {' | '.join(f'{_terms(format, way.call or str())} {calls}' for way, calls in ways)}")
    start = f"start: before TEXT? ({_terms(format, format.closing)} | calls{' TEXT?' if format.trails else ''})"
    apart = [around for around in thoughts if not around[1]]  # formats in which a call ends the thought
    return f"{start} | ({_openings(format, (), apart)}) calls" if apart else start


def _thoughts(format: CallFormat) -> list[tuple[str, str]]:
    return [around for around in (format.thought, format.thinks) if around is not None]


def _openings(format: CallFormat, openings: Sequence[str], thoughts: Sequence[tuple[str, str]]) -> str:
    """Return the alternatives before a text or before the name of a call, thoughts included."""
    thinking = [f"{_terms(format, before)} THOUGHT? {_terms(format, after)}" for before, after in thoughts]
    return " | ".join(dict.fromkeys((*(_terms(format, opening) for opening in openings), *thinking)))


def _terms(format: CallFormat, text: str) -> str:
    terms = []
    for part in re.split(rf"([\U00100000-\U0010ffff]|{NUMBER})", text):
        if part == NUMBER:
            terms.append("/0|[1-9][0-9]{0,3}/")
        elif part and ord(part[0]) >= CONTROL:
            terms.append(f"<[{format.control[ord(part) - CONTROL][1]}]>")
        elif part:
            terms.append(json.dumps(part, ensure_ascii=False))
    return " ".join(terms) or '""'
