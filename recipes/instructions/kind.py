"""`InstructionKind`: parameters, wording, check and plan of a kind of instruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from reply import ReplyText
from vocabulary import NOUNS

Params = Mapping[str, Any]
"""Parameters of one instruction, by name: plain data."""

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Context in which instructions are drawn: words of the topic, and the maximum number of sentences to ask for."""

    family: Sequence[str]
    max_sentences: int

    @property
    def nouns(self) -> list[str]:
        """Common nouns other than the topic's words."""
        return [noun for noun in NOUNS if noun not in self.family]


@dataclass(kw_only=True, slots=True)
class ReplyPlan:
    """Requirements on a reply, collected from its instructions, for `solve` to write one.

    Attributes:
        sentences: exact number of sentences.
        min_sentences: minimum number of sentences.
        min_words: minimum number of words.
        max_words: maximum number of words.
        sentence_words: maximum number of words of a sentence.
        words: words to use, in this order, each as often as it occurs here.
        avoid: words not to use.
        letter: letter not to use.
        initial: first letter of every sentence.
        opening: first words of the reply.
        closing: last words of the reply.
        forms: forms that one of the sentences must have: `question`, `brackets`, `semicolon`, `colon`, `number`.
        ends_asking: whether the last sentence is a question.
        mark: punctuation mark that ends sentences.
        layout: `prose`, `lines`, `paragraphs`, `bullets`, `numbered`.
        pieces: number of paragraphs or points.
        heading: whether the reply has a heading.
        postscript: whether the last line is a postscript.
        case: `lower`, `upper` or `title`; "" for the usual case of sentences.
        shout: word in capitals.
        quoted: whether the whole reply is in quotation marks.
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

    def require(self, requirements: Mapping[str, Any]) -> None:
        """Add requirements, by attribute: lists and sets grow, `min_sentences` only rises, other values are set."""
        for name, value in requirements.items():
            present = getattr(self, name)
            if isinstance(present, list):
                value = [*present, *value]
            elif isinstance(present, set):
                value = {*present, *value}
            elif name == "min_sentences":
                value = max(present, value)
            setattr(self, name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class InstructionKind:
    """One kind of instruction.

    Attributes:
        name: name of the kind, a tag of evaluations and a part of scores.
        says: wordings; `{...}` are parameters, `{s}` is the plural ending for `n`.
        kept: checks whether a reply follows the instruction.
        plan: returns the requirements of the instruction, by attribute of `ReplyPlan`.
        draw: draws the parameters.
        claims: features that the kind decides alone, such as the case of letters. Kinds that share a claim are never in
            one task.
    """

    name: str
    says: tuple[str, ...]
    kept: Callable[[ReplyText, Params], bool]
    plan: Callable[[Params], Mapping[str, Any]] = lambda params: {}
    draw: Callable[[Random, Scope], dict[str, Any]] = lambda random, scope: {}
    claims: frozenset[str] = frozenset()

    def say(self, params: Params, random: Random) -> str:
        """Return the instruction as a sentence in a random wording."""
        shown = {key: _number(value) if isinstance(value, int) else value for key, value in params.items()}
        return random.choice(self.says).format(**shown, s="" if params.get("n") == 1 else "s")


def _number(value: int) -> str:
    return NUMBERS[value] if value < len(NUMBERS) else str(value)
