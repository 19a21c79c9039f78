"""Tags between the parts of a reply, of each format of the `renderers` library that says early what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sparring.render.hermes import CLOSE, OPEN, THINK, THINK_END

_DSML = "<｜DSML｜"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tags:
    """Tags that tell the parts of a reply apart: a thought, a text, calls.

    Attributes:
        think: around a thought; None where there is none.
        thinks_again: whether the end of a thought that nothing began is left out of a text. The library's parser knows
            thoughts behind the text there, which are text here, as they are in other formats.
        call: around a call; None where calls are known at the end alone.
        section: around all calls; None where nothing is.
        opens: tags that end a text, where these are not the beginning of the section, or of a call.
        middle: tag of a call without which it does not end; None where there is none.
        goes_on: whether text may follow a call, so that calls are known at the end alone.
        blanks: characters that do not count at both ends of a text: None for all blanks.
        spelled: what may be a tag though it is no id of its own; the first begins a call.
        undecided: beginnings of replies of which nothing is known before the end.
        heads: tags of a turn's head; one behind the beginning ends the reply.
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
"""Formats of the library whose replies are read while they are sampled."""


class Thought(NamedTuple):
    """Thought of a reply: where it begins and ends, its tags left out, and where the rest of the reply begins, which is
    behind the reply where nothing ends the thought."""

    begin: int
    end: int
    rest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Ids of the tags of a format, of one tokenizer; None for a tag that is no id, or that is not there.

    Attributes:
        tags: of the format.
        think: begins a thought.
        think_end: ends it.
        opens: those that end a text.
        head: stands before a call, wherever it is read alone.
        call: begins a call.
        middle: stands in a call, before its end.
        call_end: ends it.
        section_end: ends all calls.
        ends: those that end the reply, heads included.
        heads: those of a turn's head.
        control: every added token.
        undecided: beginnings of replies of which nothing is known before the end.
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
        """Return the marks of the same format where the tags of a thought are text."""
        return replace(self, think=None, think_end=None)

    def without_calls(self) -> Marks:
        """Return the marks of the same format where the tags of calls are text: of a reply to a request without
        tools."""
        tags = replace(self.tags, call=None, section=None, opens=(), middle=None, goes_on=False, spelled=())
        undecided = tuple(beginning for beginning in self.undecided if beginning not in self.tags.undecided)
        none: dict[str, Any] = {"head": (), "call": None, "middle": None, "call_end": None, "section_end": None}
        return replace(self, tags=tags, opens=frozenset(), undecided=undecided, **none)

    def thought(self, ids: Sequence[int], thinking: bool, decode: Callable[[Sequence[int]], str]) -> Thought | None:
        """Return the thought of a reply; None where it has none.

        Nothing but its own tag ends a thought: a call that is drafted in it is a part of it, and one that is never
        ended is all of the reply. Where the prompt began it, and the reply begins with a call, nothing was thought.
        (Of several formats, the `renderers` library takes the beginning of a call for the end of an open thought, as
        other servers do; of GLM and DeepSeek-V4 also where the thought's own end comes later, which
        PrimeIntellect-ai/renderers pull 80 mended for others.)

        Args:
            ids: of the reply, without the id that ended it.
            thinking: whether the prompt ended inside a thought.
            decode: ids to text.
        """
        if self.think is None:
            return None
        begin = 0
        if not thinking:
            if self.think not in ids:
                return None
            begin = ids.index(self.think) + 1
            before = [t for t in ids[: begin - 1] if not (self.tags.thinks_again and t == self.think_end)]
            if decode(before).strip():
                return None
        end = next((at for at in range(begin, len(ids)) if ids[at] == self.think_end), len(ids))
        if thinking and end == len(ids) and self.calls_at_once(ids, decode):
            return Thought(0, 0, 0)
        return Thought(begin, end, end + 1)

    def calls_at_once(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
        """Return whether a reply begins with a call."""
        first = next((at for at, token in enumerate(ids) if token in self.opens), None)
        if first is not None and not decode(ids[:first]).strip():
            return True
        return bool(self.tags.spelled) and decode(ids).lstrip().startswith(self.tags.spelled[0])

    def calls(self, ids: Sequence[int], first: int) -> Iterator[tuple[int, int, bool]]:
        """Yield the calls behind a text that ends at `first`: of each, where the ids between its tags begin and end,
        and whether the closing tag is there."""
        begin = None
        for at in range(first, len(ids)):
            if begin is None and ids[at] == self.call:
                begin = at + 1
            elif begin is not None and ids[at] == self.call_end:
                yield begin, at, True
                begin = None
        if begin is not None:
            yield begin, len(ids), False


def around_call(name: str) -> tuple[str, str]:
    """Return what a format writes around the text of a call; nothing where that is not known.

    Args:
        name: the library's own name of the format.
    """
    tags = FORMAT_TAGS.get(name)
    if tags is None or tags.call is None:
        return "", ""
    begin, end = tags.section or ("", "")
    blank = "" if tags.section else "\n"
    return f"{begin}{tags.call[0]}{blank}", f"{blank}{tags.call[1]}{end}"


def marks_of(name: str, added: Mapping[str, int], stop: Sequence[int]) -> Marks | None:
    """Return the marks of a format; None where it has none that are known, or its calls have no ids of their own.

    Args:
        name: the library's own name of it.
        added: added tokens of the tokenizer, text -> id.
        stop: ids that end a turn.
    """
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
"""Beginnings of calls in any format that is known, those included that no renderer here reads."""
