"""Chat template of an exported folder, which by default writes the same prompts as the run.

A session renders its first prompt as a whole; every later prompt extends the ids so far by what the format adds after a
reply (`Renderer.bridge`), so that thoughts stay where they were sampled. A checkpoint's own template renders every
conversation as a whole, and may drop thoughts. The exported template contains the checkpoint's own template as a macro,
calls this macro turn by turn as a session renders, and has the run's `thinking` as its default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sparring.errors import BadInput
from sparring.protocols import Renderer
from sparring.render.chat_template import ChatTemplate
from sparring.render.demonstrate import demonstration_tokens
from sparring.render.dialect import message_dicts, tool_dicts
from sparring.types import Message, ToolCall, ToolSpec

Form = Literal["own", "switched", "session", "mixed"]
FORMS: tuple[Form, ...] = ("own", "switched", "session", "mixed")
"""Forms of an exported template, simplest first. `own`: the checkpoint's own template. `switched`: the own template
with the run's `thinking` as the default. `session`: the own template, called turn by turn as a session renders.
`mixed`: as `session`, except in a conversation in which the own template would drop a thought."""

DECIDING = 32
"""Number of recorded prompts that decide the form."""
AROUND = 40
"""Number of characters shown before and after the first difference of two texts."""
SWITCH = "enable_thinking"
"""Variable that tells a template whether the model thinks."""
MARK = "sparring-mark-7f3b"
BEGIN, END = "{#+ sparring: the checkpoint's own template +#}", "{#+ sparring: its end +#}"
"""Comments around the checkpoint's own template; their plus signs keep adjacent blanks."""

_SESSION = """{%- macro sparring_cut(text, ends) -%}
    {%- set found = namespace(at=-1) -%}
    {%- for end in ends -%}
        {%- if text.rfind(end) >= 0 and text.rfind(end) + end | length > found.at -%}
            {%- set found.at = text.rfind(end) + end | length -%}
        {%- endif -%}
    {%- endfor -%}
    {{- found.at -}}
{%- endmacro -%}
{%- set sparring = namespace(replies=[], question=-1, thought=false, text='', whole=false) -%}
{%- set sparring_end = add_generation_prompt is defined and add_generation_prompt -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}{%- set sparring.replies = sparring.replies + [loop.index0] -%}{%- endif -%}
    {%- if message.role == 'user' -%}{%- set sparring.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for at in sparring.replies -%}
    {%- if at < sparring.question and messages[at].reasoning_content -%}{%- set sparring.thought = true -%}{%- endif -%}
{%- endfor -%}
{%- if not sparring.replies or sparring.replies[0] == 0 or (sparring.thought and @MIXED@) -%}
    {%- set sparring.whole = true -%}
{%- else -%}
    {%- set sparring_who = [{'role': 'user', 'content': '?'}] -%}
    {%- set sparring_cue = sparring_own(sparring_who, none, true, @SWITCH@) -%}
    {%- set sparring.text = sparring_own(messages[:sparring.replies[0]], tools, true, @SWITCH@) -%}
    {%- for at in sparring.replies -%}
        {%- set till = messages | length if loop.last else sparring.replies[loop.index] -%}
        {%- set reply = sparring_own(sparring_who + [messages[at]], none, false, @SWITCH@) -%}
        {%- set cut = sparring_cut(reply, @ENDS@) | int -%}
        {%- if not reply.startswith(sparring_cue) or cut < sparring_cue | length -%}
            {%- set sparring.whole = true -%}
        {%- elif at + 1 == messages | length and not sparring_end -%}
            {%- set sparring.text = sparring.text + reply[sparring_cue | length:] -%}
        {%- else -%}
            {%- set new = messages[at + 1:till] -%}
            {%- set calls = namespace(made=[]) -%}
            {%- for message in new -%}
                {%- if message.role == 'tool' and @CALLING@ -%}
                    {%- set function = {'name': message.name or 'tool', 'arguments': {'x': @MARK@}} -%}
                    {%- set id = message.tool_call_id or 'call00000' -%}
                    {%- set calls.made = calls.made + [{'type': 'function', 'id': id, 'function': function}] -%}
                {%- endif -%}
            {%- endfor -%}
            {%- if calls.made -%}
                {%- set stand_in = {'role': 'assistant', 'content': '', 'tool_calls': calls.made} -%}
            {%- else -%}
                {%- set stand_in = {'role': 'assistant', 'content': @MARK@} -%}
            {%- endif -%}
            {%- set prompted = sparring_end or not loop.last -%}
            {%- set follows = sparring_own(sparring_hi + [stand_in] + new, tools, prompted, @SWITCH@) -%}
            {%- set behind = namespace(text='', at=-1) -%}
            {%- set behind.text = follows[follows.find(@MARK@) + @MARK@ | length:] -%}
            {%- for end in @ENDS@ -%}
                {%- set found = behind.text.find(end) -%}
                {%- if found >= 0 and (behind.at < 0 or found + end | length < behind.at) -%}
                    {%- set behind.at = found + end | length -%}
                {%- endif -%}
            {%- endfor -%}
            {%- if @MARK@ not in follows or behind.at < 0 -%}{%- set sparring.whole = true -%}{%- endif -%}
            {%- set sparring.text = sparring.text + reply[sparring_cue | length:cut] + behind.text[behind.at:] -%}
        {%- endif -%}
    {%- endfor -%}
{%- endif -%}
{%- if sparring.whole -%}
    {{- sparring_own(messages, tools, sparring_end, @SWITCH@) -}}
{%- else -%}
    {{- sparring.text -}}
{%- endif -%}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt as the run wrote it.

    Attributes:
        name: name of the turn, for reports; empty for a made-up prompt.
    """

    name: str
    messages: Sequence[Message]
    tools: Sequence[ToolSpec]
    tokens: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateComparison:
    """Comparison of the prompts of a run with the prompts that a template writes by default.

    Attributes:
        same: number of prompts with the same ids.
        spelt: number of prompts with the same text in other ids: a sampled reply may be tokenised otherwise, and a
            message may quote the text of a control token.
        replies: number of prompts that differ only in an earlier reply, because a message does not preserve its sampled
            text (blanks, a malformed call).
        other: names of all other prompts.
        shown: recorded and written text of the first prompt in `other`, around their first difference.
    """

    same: int
    spelt: int
    replies: int
    other: tuple[str, ...]
    shown: tuple[str, str] = ("", "")

    @property
    def count(self) -> int:
        """Number of prompts."""
        return self.same + self.spelt + self.replies + len(self.other)


def own_source(source: str) -> str:
    """Return the checkpoint's own template from an exported one; any other template unchanged."""
    if BEGIN in source and END in source:
        return source.partition(BEGIN)[2].rpartition(END)[0]
    return source


def template_in(form: Form, source: str, *, thinking: bool, ends: Sequence[str], calling: bool = True) -> str:
    """Return a checkpoint's template in another form.

    Args:
        calling: whether the placeholder reply before a tool's answer is a call.
    """
    if form == "own":
        return source
    default = f"{{%- if {SWITCH} is not defined -%}}{{%- set {SWITCH} = {str(thinking).lower()} -%}}{{%- endif -%}}\n"
    own = source.removesuffix("\n")  # Jinja drops a newline at the end of a template, but keeps it before a tag
    if form == "switched":
        return f"{default}{BEGIN}{own}{END}"
    parameters = f"messages, tools, add_generation_prompt, {SWITCH}"
    macro = f"{{%- macro sparring_own({parameters}) +%}}{BEGIN}{own}{END}{{%+ endmacro -%}}\n"
    values = {
        "@MIXED@": str(form == "mixed").lower(),
        "@CALLING@": str(calling).lower(),
        "@SWITCH@": SWITCH,
        "@MARK@": f"'{MARK}'",
        "@ENDS@": json.dumps(list(ends), ensure_ascii=False),
    }
    session = _SESSION
    for name, value in values.items():
        session = session.replace(name, value)
    tools = "{%- if tools is not defined -%}{%- set tools = none -%}{%- endif -%}\n"
    hi = "{%- set sparring_hi = [{'role': 'user', 'content': 'hi'}] -%}\n"
    return f"{default}{tools}{hi}{macro}{session}"


def ends_of(renderer: Renderer) -> tuple[str, ...]:
    """Return the texts that end a reply of the format."""
    return tuple(dict.fromkeys(text for id in renderer.stop_ids if (text := renderer.decode([id]))))


def compare(
    template: ChatTemplate, prompts: Sequence[Prompt], encode: Callable[[str], Sequence[int]], renderer: Renderer
) -> TemplateComparison:
    """Compare what a template writes by default with the prompts of a run.

    Args:
        encode: function from a text to its ids, by the tokenizer of the exported folder.
    """
    same = spelt = replies = 0
    other: list[str] = []
    difference = ("", "")
    for prompt in prompts:
        text = written(template, prompt)
        tokens = None if text is None else tuple(encode(text))
        recorded = renderer.decode(prompt.tokens)
        if tokens == tuple(prompt.tokens):
            same += 1
        elif text == recorded:
            spelt += 1
        elif (
            text is not None
            and any(m.role == "assistant" for m in prompt.messages)
            and _render_whole(renderer, prompt) == text
        ):
            replies += 1
        else:
            difference = (
                difference if other else parting(recorded, text or "nothing: the template refuses the conversation")
            )
            other.append(prompt.name)
    return TemplateComparison(same=same, spelt=spelt, replies=replies, other=tuple(other), shown=difference)


def written(template: ChatTemplate, prompt: Prompt) -> str | None:
    """Return a prompt as a template writes it by default; None if the template refuses the conversation."""
    try:
        messages, tools = message_dicts(prompt.messages), tool_dicts(prompt.tools)
        return template.text(messages, tools, generation=True, thinking=None)
    except BadInput:
        return None


def parting(left: str, right: str) -> tuple[str, str]:
    """Return two texts around the first character in which they differ."""
    at = next((n for n, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), 0)
    start, end = max(0, min(at, len(left), len(right)) - AROUND), at + AROUND
    return left[start:end], right[start:end]


def _render_whole(renderer: Renderer, prompt: Prompt) -> str | None:
    try:
        return renderer.decode(renderer.render(prompt.messages, prompt.tools).tokens)
    except BadInput:
        return None


def tried_prompts(renderer: Renderer, tools: Sequence[ToolSpec], *, thinking: bool) -> Iterator[Prompt]:
    """Yield made-up prompts as a session writes them, to try a template: first prompts, prompts after replies, and
    after calls with one or several answers."""
    for messages in _conversations(tools, "I think." if thinking else None):
        last = Message(role="assistant", content="Well.", reasoning="So." if thinking else None)
        try:
            rendered = demonstration_tokens(renderer, [*messages, last], tools)
            tokens = rendered.tokens[: _start_of_last(rendered.sampled)]
        except BadInput:  # the format rewrites history or cannot write the reply: a session begins a new branch
            try:
                tokens = renderer.render(messages, tools).tokens
            except BadInput:
                continue
        yield Prompt(name="", messages=messages, tools=tools, tokens=tokens)


def _start_of_last(sampled: Sequence[bool]) -> int:
    """Return the index at which the last run of sampled ids begins."""
    end = max(at for at, own in enumerate(sampled) if own)
    return next((at + 1 for at in range(end, -1, -1) if not sampled[at]), 0)


def _conversations(tools: Sequence[ToolSpec], thought: str | None) -> Iterator[list[Message]]:
    question, next_question = Message(role="user", content="Who?"), Message(role="user", content="And then?")
    answer = Message(role="assistant", content="Me.", reasoning=thought)
    yield [question]
    yield [Message(role="system", content="Be brief."), question]
    yield [question, answer, next_question]
    yield [question, answer, next_question, answer, next_question]
    if not tools:
        return
    calls = [ToolCall(id=f"call0000{n}", name=tools[0].name, arguments={"at": f"it {n}"}) for n in range(2)]
    for made in (calls[:1], calls):
        reply = Message(role="assistant", reasoning=thought, tool_calls=tuple(made))
        answers = [Message(role="tool", content=f"{n}.", tool_call_id=c.id, name=c.name) for n, c in enumerate(made)]
        yield [question, reply, *answers]
        yield [question, reply, *answers, answer, next_question]


def settled(
    source: str,
    special: Mapping[str, str],
    prompts: Sequence[Prompt],
    renderer: Renderer,
    encode: Callable[[str], Sequence[int]],
    *,
    thinking: bool,
    tools: Sequence[ToolSpec],
) -> tuple[str, TemplateComparison]:
    """Return the simplest form of a checkpoint's template that writes the most prompts of the run, and its comparison
    with them.
    """
    own, ends = own_source(source), ends_of(renderer)
    first = prompts[:DECIDING]
    tried = list(tried_prompts(renderer, tools, thinking=thinking))
    best: tuple[tuple[int, int, int], ChatTemplate] | None = None
    for form in FORMS:
        for calling in (True, False) if form in ("session", "mixed") and tools else (True,):
            text = template_in(form, own, thinking=thinking, ends=ends, calling=calling)
            try:
                template = ChatTemplate(text, special, where=f"the exported chat template ({form})")
            except BadInput:  # a template that cannot stand in a macro
                continue
            of_run = compare(template, first, encode, renderer)
            of_tried = compare(template, tried, encode, renderer)
            rank = (-len(of_run.other), of_run.same + of_run.spelt, of_tried.same + of_tried.spelt)
            if best is None or rank > best[0]:
                best = rank, template
            if rank == (0, len(first), len(tried)):
                return text, compare(template, prompts, encode, renderer)
    assert best is not None, "the checkpoint's own template was read before"
    return best[1].source, compare(best[1], prompts, encode, renderer)
