"""`InstructionKind`: what a kind draws, what it says, how it is checked, and how it is met."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from sparring.envs.instructions.reply import ReplyText

Params = Mapping[str, Any]
"""Demands of one instruction, by name: plain data."""

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Setting in which instructions are drawn: the words of the topic, and the most sentences that may be asked for."""

    family: Sequence[str]
    max_sentences: int


@dataclass(kw_only=True, slots=True)
class ReplyPlan:
    """Demands on a reply, gathered from its instructions; `solve` writes one that meets them.

    Attributes:
        sentences: exactly so many.
        min_sentences: at least so many.
        min_words: of the whole.
        max_words: of the whole.
        sentence_words: of a sentence, at most.
        words: to use, in this order, each as often as it stands here.
        avoid: words that must not be used.
        letter: that must not be used.
        initial: letter that every sentence begins with.
        opening: words that come first.
        closing: words that come last.
        forms: turns of phrase that some sentence has: `question`, `brackets`, `semicolon`, `colon`, `number`.
        ends_asking: the last sentence is a question.
        mark: that ends sentences.
        layout: `prose`, `lines`, `paragraphs`, `bullets`, `numbered`.
        pieces: paragraphs or points.
        heading: whether it has one.
        postscript: whether its last line is one.
        case: `lower`, `upper` or `title`; "" for that of sentences.
        shout: word in capitals.
        quoted: whether all of it stands in quotation marks.
    """

    sentences: int | None = None
    min_sentences: int = 1
    min_words: int = 0
    max_words: int | None = None
    sentence_words: int | None = None
    words: list[str] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    letter: str = ""
    initial: str = ""
    opening: str = ""
    closing: str = ""
    forms: list[str] = field(default_factory=list)
    ends_asking: bool = False
    mark: str = "."
    layout: str = "prose"
    pieces: int = 1
    heading: bool = False
    postscript: bool = False
    case: str = ""
    shout: str = ""
    quoted: bool = False


def _nothing(random: Random, scope: Scope) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class InstructionKind:
    """One kind of instruction.

    Attributes:
        name: of the kind; a tag of evaluations and a part of scores.
        says: wordings; fields in braces are parameters, `{s}` is the plural of `n`.
        kept: whether a reply keeps it.
        plan: writes into a plan what the instruction asks for.
        draw: draws the parameters.
        claims: what the kind decides alone, such as the case of letters. Two kinds that claim the same thing never
            stand in one task.
    """

    name: str
    says: tuple[str, ...]
    kept: Callable[[ReplyText, Params], bool]
    plan: Callable[[ReplyPlan, Params], None]
    draw: Callable[[Random, Scope], dict[str, Any]] = _nothing
    claims: frozenset[str] = frozenset()

    def say(self, params: Params, random: Random) -> str:
        """Return the instruction as a sentence, in one of its wordings."""
        shown = {key: _number(value) if isinstance(value, int) else value for key, value in params.items()}
        return random.choice(self.says).format(**shown, s="" if params.get("n") == 1 else "s")


def _number(value: int) -> str:
    return NUMBERS[value] if value < len(NUMBERS) else str(value)
