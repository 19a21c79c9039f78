"""Tags between the parts of a reply, for formats of the `renderers` library whose replies can be parsed while
sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"
_DSML = "<｜DSML｜"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tags:
    """Tags that separate the parts of a reply: a thought, a text, calls.

    Attributes:
        think: tags around a thought; None for a format without thoughts.
        thinks_again: whether a lone closing tag of a thought is left out of the text. In these formats the library also
            parses thoughts after the text; here such thoughts are text, as in all other formats.
        call: tags around a call; None if calls are recognised only at the end of the reply.
        section: tags around all calls; None for a format without such a section.
        opens: tags that end a text; if empty, the opening tag of the section, or else of a call.
        middle: tag inside a call that must come before its end; None for a format without one.
        goes_on: whether text may follow a call, so that calls are recognised only at the end of the reply.
        blanks: characters stripped from both ends of a text; None for all whitespace.
        spelled: tags that the model may write as text, not as one id; the first begins a call.
        undecided: beginnings of replies that can only be parsed at the end.
        heads: tags at the beginning of a turn; after the first id of a reply, such a tag ends the reply.
    """

    think: tuple[str, str] | None = (THINK, THINK_END)
    thinks_again: bool = False
    call: tuple[str, str] | None = (OPEN, CLOSE)
    section: tuple[str, str] | None = None
    opens: tuple[str, ...] = ()
    middle: str | None = None
    goes_on: bool = False
    blanks: str | None = None
    spelled: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


_QWEN = Tags()
_DEEPSEEK = Tags(
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
)
_KIMI = Tags(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    middle="<|tool_call_argument_begin|>",
)
_GLM = Tags(thinks_again=True, goes_on=True)
_LAGUNA = Tags(blanks="")

FORMAT_TAGS: Mapping[str, Tags] = {
    **dict.fromkeys(("qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3"), _QWEN),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), _QWEN),
    "minimax-m2": Tags(call=("<minimax:tool_call>", "</minimax:tool_call>")),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), _DEEPSEEK),
    "deepseek-v4": Tags(thinks_again=True, call=None, blanks="", spelled=(_DSML, _DSML.replace("<", "</"))),
    "kimi-k2": _KIMI,
    "kimi-k2.5": replace(_KIMI, spelled=("<|tool_call",)),
    "hy3": Tags(
        think=("<think:opensource>", "</think:opensource>"),
        call=("<tool_call:opensource>", "</tool_call:opensource>"),
        opens=("<tool_calls:opensource>", "<tool_call:opensource>"),
    ),
    **dict.fromkeys(("laguna-s-2.1", "laguna-xs-2.1"), _LAGUNA),
    **dict.fromkeys(("laguna-m.1", "laguna-xs.2"), replace(_LAGUNA, blanks="\n")),
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), _GLM),
    "llama-3": Tags(think=None, call=None, undecided=("{",), heads=("<|start_header_id|>", "<|end_header_id|>")),
}
"""Formats of the library whose replies are parsed while they are sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Ids of a format's tags in one tokenizer; None for a tag that the format lacks or that is no single id.

    Attributes:
        think: opening tag of a thought.
        think_end: closing tag of a thought.
        opens: ids that end a text.
        head: ids to put before a call that is parsed alone.
        call: opening tag of a call.
        middle: tag inside a call, before its end.
        call_end: closing tag of a call.
        section_end: closing tag of the section of all calls.
        ends: ids that end the reply, heads included.
        heads: ids of `Tags.heads`.
        control: all added tokens.
        undecided: beginnings of replies that can only be parsed at the end.
    """

    tags: Tags
    think: int | None
    think_end: int | None
    opens: frozenset[int]
    head: tuple[int, ...]
    call: int | None
    middle: int | None
    call_end: int | None
    section_end: int | None
    ends: frozenset[int]
    heads: frozenset[int]
    control: frozenset[int]
    undecided: tuple[str, ...]

    def without_thoughts(self) -> Marks:
        """Return the marks with the tags of a thought as plain text."""
        return replace(self, think=None, think_end=None)


def around_call(name: str) -> tuple[str, str]:
    """Return the text that a format writes before and after a malformed call; empty texts for a format without known
    tags.
    """
    tags = FORMAT_TAGS.get(name)
    if tags is None or tags.call is None:
        return "", ""
    begin, end = tags.section or ("", "")
    blank = "" if tags.section else "\n"
    return f"{begin}{tags.call[0]}{blank}", f"{blank}{tags.call[1]}{end}"


def marks_of(name: str, added: Mapping[str, int], stop: Sequence[int]) -> Marks | None:
    """Return the marks of a format; None without an entry in `FORMAT_TAGS`, or a single id for each tag of calls."""
    tags = FORMAT_TAGS.get(name)
    if tags is None:
        return None
    call, section = tags.call or (None, None), tags.section or (None, None)
    first = section[0] or call[0]
    opens = tags.opens or ((first,) if first else ())
    wanted = {*call, *section, *opens, tags.middle, *tags.heads} - {None}
    if not wanted <= added.keys():
        return None
    think = tags.think if tags.think is not None and added.keys() >= set(tags.think) else None
    spelled = (tags.think[0],) if tags.think is not None and think is None else ()

    def id_of(text: str | None) -> int | None:
        return None if text is None else added[text]

    return Marks(
        tags=tags,
        think=think and added[think[0]],
        think_end=think and added[think[1]],
        opens=frozenset(added[text] for text in opens),
        head=(added[section[0]],) if section[0] else (),
        call=id_of(call[0]),
        middle=id_of(tags.middle),
        call_end=id_of(call[1]),
        section_end=id_of(section[1]),
        ends=frozenset((*stop, *(added[text] for text in tags.heads))),
        heads=frozenset(added[text] for text in tags.heads),
        control=frozenset(added.values()),
        undecided=(*tags.undecided, *spelled),
    )


CALL_TAGS = frozenset(
    (
        *(tag for tags in FORMAT_TAGS.values() for tag, _ in filter(None, (tags.call, tags.section))),
        *(tag for tags in FORMAT_TAGS.values() for tag in tags.opens if "call" in tag),
        *(_DSML, "<function=", "<function_calls>", "<invoke name=", "<|tool_call>", "<|python_tag|>", "[TOOL_CALLS]"),
    )
)
"""Beginnings of calls in all known formats, including formats that no renderer here parses."""
