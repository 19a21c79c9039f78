"""Text that a format writes around the calls of a reply: derived from rendered calls, and proved by parsing it back.

`WRITINGS` has the traits that rendered calls do not show. A format without an entry must write JSON, or is refused.
"""

from __future__ import annotations

import itertools
import json
import os.path
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparring.errors import BadInput, refusal
from sparring.protocols import Renderer
from sparring.render.demonstrate import reply_tokens
from sparring.render.tags import CLOSE, OPEN
from sparring.render.tokenizer import FileTokenizer
from sparring.types import Message, ToolCall, ToolSpec

NAME, NUMBER = "sparring_mark_7f3a", "sparring_number_7f3a"
"""Placeholders for the name and the number of a call in the texts of a `CallFormat`."""

CONTROL = 0x100000
"""First of the characters that stand for control tokens in a text; no text of a format contains such characters."""

_THOUGHT, _CONTENT = "sparring_thought_7f3a", "sparring_content_7f3a"
_FIRST, _SECOND = "sparring_first", "sparring_second"
_ARGUMENTS: dict[str, Any] = {_FIRST: "sparring_value", _SECOND: ["x"]}
_SEPARATORS = ((", ", ": "), (",", ":"))
_QUESTION = Message(role="user", content="?")
_LONGEST_HEAD = 16
"""Number of ids at the end of a prompt that are searched for the beginning of a thought."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    """Traits of a format and of its parser that rendered calls do not show.

    Attributes:
        tagged: whether each argument stands between tags; otherwise all arguments are one JSON object.
        ends: tags that the parser finds in text, not by their ids; no value may contain such a tag.
        id: id of a call, for a format that writes the id instead of the tool's name.
        words: whether the format writes Python's True, False and None between tags.
        sorts: whether the format sorts keys in JSON.
        quote: control token around texts, in a format whose arguments are a dialect of JSON.
        stops: stop tokens after a call and after a text; None if the parser requires no stop tokens.
        other: texts that models write before and after a call's name, if they differ from the rendered texts.
    """

    tagged: bool = False
    ends: tuple[str, ...] = ()
    id: str = "call_{number}"
    words: bool = False
    sorts: bool = False
    quote: str = ""
    stops: tuple[str, str] | None = None
    other: tuple[str, str] | None = None


_PARAMETER = Writing(tagged=True, ends=("</parameter>",))
_PYTHON_PARAMETER = replace(_PARAMETER, words=True)
_ARGUMENT_IDS = Writing(tagged=True)
_ARGUMENT = Writing(tagged=True, ends=("</arg_value>",))
_KIMI = Writing(id="functions.{name}:{number}")
_COMMENTARY = (
    "<|end|><|start|>assistant<|channel|>commentary to=functions.",
    " <|constrain|>json<|message|>",
)

WRITINGS: Mapping[str, Writing] = {
    "template": Writing(ends=(OPEN, CLOSE)),
    **dict.fromkeys(("qwen3.6", "qwen3.8"), _PARAMETER),
    **dict.fromkeys(("qwen3.5", "prime-qwen3", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), _PYTHON_PARAMETER),
    "minimax-m2": Writing(tagged=True, ends=("</parameter>", "</invoke>")),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "hy3"), _ARGUMENT_IDS),
    **dict.fromkeys(("laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2"), _ARGUMENT),
    "deepseek-v4": Writing(tagged=True, ends=("</｜DSML｜",)),
    **dict.fromkeys(("kimi-k2", "kimi-k2.5"), _KIMI),
    "inkling": Writing(sorts=True),
    "gemma4": Writing(ends=('<|"|>',), quote='<|"|>'),
    "gpt-oss": Writing(stops=("<|call|>", "<|return|>"), other=_COMMENTARY),
}
"""Formats of the library, and a checkpoint's own template, that do not write calls as JSON between control tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArgumentTags:
    """Text around the arguments of a call, in a format with tags around each.

    Attributes:
        none: text after the head of a call without arguments.
        first: text before the name of the first argument.
        text: text between a name and a value that is text.
        json: text between a name and a value that is JSON.
        close: text after a value.
        more: text between `close` and the name of the next argument.
    """

    none: str
    first: str
    text: str
    json: str
    close: str
    more: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFormat:
    """Text around the calls of a reply. A control token is one character from `CONTROL` on.

    Attributes:
        openings: texts that may come before the name of the first call.
        thought: texts before a thought, and between it and the name of the first call; None without thoughts.
        call: text that begins the first call after a text; None if this text begins with no control token.
        thinks: texts before a thought, and between it and a text; None without thoughts.
        closing: text after a text without calls.
        head: text after the name of a call.
        tags: text around the arguments; None if the arguments are one object after the head.
        quote: text around each text of that object; None for JSON.
        between: texts that may come between the arguments of a call and the name of the next call; empty if a reply has
            at most one call.
        end: text after the arguments of the last call.
        separators: separators of items and of keys in JSON.
        trails: whether text may follow the calls of a reply; text may always precede the calls.
        other: texts before the name of a call (after a thought or a text) and after it, as an alternative to what the
            format renders; None without an alternative.
        ends: tags that no value may contain.
        words: whether Python's True, False and None may stand between tags.
        sorts: whether keys are sorted in JSON.
        control: text and id of the control tokens, in the order of their characters.
    """

    openings: tuple[str, ...]
    thought: tuple[str, str] | None
    call: str | None
    thinks: tuple[str, str] | None
    closing: str
    head: str
    tags: ArgumentTags | None
    quote: str | None
    between: tuple[str, ...]
    end: str
    separators: tuple[str, str]
    trails: bool
    other: tuple[str, str] | None
    ends: tuple[str, ...]
    words: bool
    sorts: bool
    control: tuple[tuple[str, int], ...]

    def begun(self) -> CallFormat:
        """Return the format after a prompt that ends inside a thought: the reply begins with the rest of the
        thought."""
        if self.thought is None:
            return self
        thinks = None if self.thinks is None else ("", self.thinks[1])
        return replace(self, openings=(), thought=("", self.thought[1]), thinks=thinks)

    def otherwise(self) -> CallFormat | None:
        """Return the format with its alternative writing of a call; None without one."""
        if self.other is None or self.thought is None:
            return None
        before, head = self.other
        return replace(self, thought=(self.thought[0], before), call=before, head=head, other=None)

    def begins(self, renderer: Renderer, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with the text that this format writes before a thought."""
        before = "" if self.thought is None else self.spelled(self.thought[0])
        return bool(before) and renderer.decode(prompt[-_LONGEST_HEAD:]).endswith(before)

    def spelled(self, text: str) -> str:
        """Replace the characters of control tokens by the tokens' text."""
        return "".join(char if ord(char) < CONTROL else self.control[ord(char) - CONTROL][0] for char in text)


def call_id(format: str, name: str, number: int) -> str:
    """Return the id that a format writes for a call of a tool; a default for a format that writes no ids."""
    return WRITINGS.get(format, Writing()).id.format(name=name, number=number)


def call_format(renderer: Renderer, tokenizer: FileTokenizer) -> CallFormat:
    """Derive the format of calls from a renderer.

    Raises:
        BadInput: the format of arguments is unknown, or rendered calls are not parsed back.
    """
    try:
        format = _derive(renderer, WRITINGS.get(renderer.name, Writing()))
        other = format and format.otherwise()
        proven = all(way is None or _reads_back(renderer, tokenizer, way) for way in (format, other))
    except BadInput:
        proven = False
    if not proven or format is None:
        expected, got = "a format whose calls are known and read back", repr(renderer.name)
        raise refusal("tool call", expected, got, "leave the tool choice to the policy")
    return format


def reads_back(
    renderer: Renderer,
    tokenizer: FileTokenizer,
    format: CallFormat,
    calls: Sequence[tuple[str, Mapping[str, Any]]],
    tools: Sequence[ToolSpec],
    begun: tuple[str, str | None] | None = None,
    between: str = "",
) -> bool:
    """Write calls in a format, parse the text, and return whether this gives calls with the same names and arguments.

    Args:
        begun: text before the name of the first call, and the thought that this text contains; None: the first opening
            of the format.
    """
    opening, reasoning = begun or _leads(format)[0]
    written = between.join(
        f"{tokenizer.control.marked(name)}{_arguments(tokenizer, format, name, arguments)}".replace(NUMBER, str(at))
        for at, (name, arguments) in enumerate(calls)
    )
    text = format.spelled(f"{opening}{written}{format.end}")
    prompt = renderer.render([_QUESTION], tools).tokens
    parsed = renderer.parse(tokenizer.encode(text), tools, prompt=prompt)
    read = [(call.name, call.arguments) for call in parsed.tool_calls]
    return read == list(calls) and not parsed.content and parsed.reasoning == reasoning


def _arguments(tokenizer: FileTokenizer, format: CallFormat, name: str, arguments: Mapping[str, Any]) -> str:
    marked, tags = tokenizer.control.marked, format.tags
    head = format.head.replace(NAME, marked(name))

    def dumped(value: Any) -> str:
        return marked(json.dumps(value, ensure_ascii=False, separators=format.separators))

    if format.quote is not None:
        return head + quoted(arguments, format.quote, marked)
    if tags is None:
        return head + dumped(arguments)
    written = [
        f"{marked(key)}{f'{tags.text}{marked(value)}' if isinstance(value, str) else f'{tags.json}{dumped(value)}'}"
        for key, value in arguments.items()
    ]
    return head + (f"{tags.first}{f'{tags.close}{tags.more}'.join(written)}{tags.close}" if written else tags.none)


def _leads(format: CallFormat) -> list[tuple[str, str | None]]:
    leads: list[tuple[str, str | None]] = [(opening, None) for opening in format.openings]
    return leads if format.thought is None else [*leads, (f"{format.thought[0]}so{format.thought[1]}", "so")]


def _reads_back(renderer: Renderer, tokenizer: FileTokenizer, format: CallFormat) -> bool:
    """Return whether calls are parsed back even if their texts contain tags and quotes."""
    written = (*renderer.control_ids, "</parameter>", "</arg_value>")
    tags = " ".join(tag for tag in written if not any(end in tag for end in format.ends))
    arguments = {_FIRST: f'{tags} "\n\\ é {{}}', _SECOND: [f"{tags} <", 1]}
    for lead, between, made in itertools.product(_leads(format), ("", *format.between), (arguments, {})):
        calls = [(NAME, made)] * (2 if between else 1)
        if not reads_back(renderer, tokenizer, format, calls, [_spec()], lead, between):
            return False
    return True


def _derive(renderer: Renderer, writing: Writing) -> CallFormat | None:
    """Return the format as calls are rendered; None if the arguments are not found in the rendered calls."""

    def text(calls: int, reasoning: str | None, content: str = "") -> str | None:
        return _text(renderer, writing, _reply(writing, [_ARGUMENTS] * calls, reasoning, content))

    def read(spelled: str) -> str:
        for tag, character in _characters(renderer).items():
            spelled = spelled.replace(tag, character)
        return spelled

    plain, thoughtful = text(1, None), text(1, _THOUGHT)
    single, reasoning = (plain, None) if plain is not None else (thoughtful or "", _THOUGHT)
    opening, _, rest = single.partition(NAME)
    quote = _characters(renderer).get(writing.quote)
    parts = _from_tags(renderer, writing, rest, reasoning) if writing.tagged else _from_object(rest, quote)
    if parts is None or bool(quote) != bool(writing.quote):
        return None
    head, tags, behind, end, separators = parts
    between: dict[str, Any] = {}
    for content in ("", _CONTENT):
        several, first = text(2, reasoning, content), (text(1, reasoning, content) or "").removesuffix(end)
        last = f"{NAME}{behind}{end}"
        around = len(first) + len(last)
        if several is not None and len(several) >= around and several.startswith(first) and several.endswith(last):
            between[several[len(first) : len(several) - len(last)]] = None
    thought, answer, beside = _thought(thoughtful, NAME), text(0, reasoning, _CONTENT), text(1, reasoning, _CONTENT)
    answered = text(0, _THOUGHT, _CONTENT)
    if writing.stops is not None:  # such a format keeps a thought only in a reply with calls
        begun, content, _ = (beside or "").partition(_CONTENT)
        answer = answered = f"{begun}{content}{_characters(renderer)[writing.stops[1]]}"
    subsumed = thought is not None and plain is not None and _holds_blanks(opening, thought)
    trails = bool(beside) and f"{beside}".endswith(f"{end}{_CONTENT}")
    call = _call(_CONTENT + opening + NAME if trails else beside, opening)
    return CallFormat(
        openings=() if plain is None or subsumed else (opening,),
        thought=thought,
        call=None if answer is None else call,
        thinks=_thought(answered, _CONTENT),
        closing=(answer or "").partition(_CONTENT)[2].strip(),
        head=head,
        tags=tags,
        quote=quote,
        between=tuple(between),
        end=end,
        separators=separators,
        trails=trails,
        other=None if writing.other is None else (read(writing.other[0]), read(writing.other[1])),
        ends=writing.ends,
        words=writing.words,
        sorts=writing.sorts,
        control=_control(renderer),
    )


def quoted(value: Any, quote: str, marked: Callable[[str], str] = str) -> str:
    """Write a value in a dialect of JSON: texts between the given quotes, bare keys in alphabetical order.

    Args:
        quote: text before and after each text.
        marked: function applied to texts and keys.
    """
    if isinstance(value, str):
        return f"{quote}{marked(value)}{quote}"
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: item[0].lower())
        return "{" + ",".join(f"{marked(key)}:{quoted(part, quote, marked)}" for key, part in items) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(quoted(part, quote, marked) for part in value) + "]"
    return json.dumps(value)


def _from_object(rest: str, quote: str | None) -> tuple[str, None, str, str, tuple[str, str]] | None:
    """Return the parts of a call whose arguments are one object: head, None for the tags, text after a name, end and
    separators."""
    for pair in _SEPARATORS:
        written = json.dumps(_ARGUMENTS, separators=pair) if quote is None else quoted(_ARGUMENTS, quote)
        head, arguments, end = rest.partition(written)
        if arguments:
            return head, None, head + arguments, end, pair
    return None


def _from_tags(
    renderer: Renderer, writing: Writing, rest: str, reasoning: str | None
) -> tuple[str, ArgumentTags, str, str, tuple[str, str]] | None:
    """Return the parts of a call with tags around each argument: head, tags, text after a name, end and separators."""
    empty = (_text(renderer, writing, _reply(writing, [{}], reasoning)) or "").partition(NAME)[2]
    pieces = []
    for mark in (_FIRST, _ARGUMENTS[_FIRST], _SECOND, json.dumps(_ARGUMENTS[_SECOND])):
        before, marked, rest = rest.partition(mark)
        if not marked:
            return None
        pieces.append(before)
    first, text, more, as_json = pieces
    named = next((text for text in writing.ends if text in rest), None)
    end = os.path.commonprefix([rest[::-1], empty[::-1]])[::-1] if named is None else rest.partition(named)[2]
    none, close = empty.removesuffix(end), rest.removesuffix(end)
    head = os.path.commonprefix([first, none])
    if not close or not more.startswith(close) or not empty.endswith(end):
        return None
    tags = ArgumentTags(
        none=none[len(head) :],
        first=first[len(head) :],
        text=text,
        json=as_json,
        close=close,
        more=more[len(close) :],
    )
    behind = "".join((first, _FIRST, text, _ARGUMENTS[_FIRST], more, _SECOND, as_json))
    return head, tags, f"{behind}{json.dumps(_ARGUMENTS[_SECOND])}{close}", end, _SEPARATORS[0]


def _thought(text: str | None, mark: str) -> tuple[str, str] | None:
    """Return the text before a thought, and the text between the thought and `mark`. Blanks around the thought are part
    of the thought. None if there is no thought, or no control token between it and `mark`."""
    if text is None or _THOUGHT not in text:
        return None
    before, _, after = text.partition(mark)[0].partition(_THOUGHT)
    first = next((at for at, character in enumerate(after) if ord(character) >= CONTROL), None)
    token, head = before.rstrip(), before
    if not token or ord(token[-1]) >= CONTROL:
        head = token  # a blank after a word ends the word
    return None if first is None else (head, after[first:])


def _holds_blanks(opening: str, thought: tuple[str, str]) -> bool:
    before, after = thought
    inside = opening[len(before) : len(opening) - len(after)]
    return opening.startswith(before) and opening.endswith(after) and not inside.strip()


def _call(text: str | None, opening: str) -> str | None:
    """Return the part of `text` between the content of the reply and the name of its call. None unless this part begins
    with a control token and `opening` ends with the part."""
    call = (text or "").partition(NAME)[0].partition(_CONTENT)[2].lstrip()
    return call if call and ord(call[0]) >= CONTROL and opening.endswith(call) else None


def _reply(
    writing: Writing, calls: Sequence[Mapping[str, Any]], reasoning: str | None = None, content: str = ""
) -> Message:
    made = (ToolCall(id=_id(writing, at), name=NAME, arguments=arguments) for at, arguments in enumerate(calls))
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(made))


def _id(writing: Writing, at: int) -> str:
    number = at if "{name}" not in writing.id else NUMBER
    return writing.id.format(name=NAME, number=number)


def _spec() -> ToolSpec:
    properties = {_FIRST: {"type": "string"}, _SECOND: {"type": "array"}}
    return ToolSpec(name=NAME, description="x", parameters={"type": "object", "properties": properties})


def _text(renderer: Renderer, writing: Writing, reply: Message) -> str | None:
    """Return the text that a model would sample for a reply, without its end of turn, with one character for each
    control token; None if the format does not write this reply after a prompt."""
    try:
        tokens = reply_tokens(renderer, reply, [_spec()])
    except BadInput:
        return None
    places = {id: place for place, (_, id) in enumerate(_control(renderer))}
    parts: list[str] = []
    plain: list[int] = []
    for token in tokens:
        ends = token in renderer.stop_ids
        if ends and not writing.stops:
            break
        if token not in places:
            plain.append(token)
            continue
        parts += [renderer.decode(plain), chr(CONTROL + places[token])]
        plain = []
        if ends:
            break
    return "".join((*parts, renderer.decode(plain)))


def _characters(renderer: Renderer) -> dict[str, str]:
    """Return the character of each control token, by its text."""
    return {text: chr(CONTROL + place) for place, (text, _) in enumerate(_control(renderer))}


def _control(renderer: Renderer) -> tuple[tuple[str, int], ...]:
    return tuple(renderer.control_ids.items())
