"""Kinds of instructions about punctuation and numbers in digits."""

from __future__ import annotations

import re

from kind import InstructionKind, Params
from reply import ReplyText, words_of

_OPEN, _CLOSE = '"“', '"”'
_BRACKETS = re.compile(r"\(([^()]*)\)")
_BETWEEN = r"[^\W_]['\"”)]*{}['\"“(]*\s+['\"“(]*[^\W_]"
_COLON, _SEMICOLON = re.compile(_BETWEEN.format(":")), re.compile(_BETWEEN.format(";"))
_FIGURE = re.compile(r"(?<![^\W_])\d+(?:[.,]\d+)*(?![^\W_])")
_LABEL = re.compile(r"[(\[#]*\d+[.):\]]+\s|#\d+\s")  # of a point, in whatever form


def _ends(mark: str, text: str) -> bool:
    return text.rstrip("\"”’')]").endswith(mark)


def _has_letters(inside: str) -> bool:
    return any(len(word) > 1 and not word.isdigit() for word in words_of(inside))


def _is_quoted(reply: ReplyText, params: Params) -> bool:
    """Return True if one pair of quotation marks encloses the whole text."""
    text = reply.plain
    inside = text[1:-1]
    is_enclosed = len(text) > 2 and text[0] in _OPEN and text[-1] in _CLOSE
    return is_enclosed and not set(inside) & {*_OPEN, *_CLOSE} and bool(words_of(inside))


def _has_figure(reply: ReplyText, params: Params) -> bool:
    """Return True if a sentence contains a number in digits, list numbers aside."""
    return any(_FIGURE.search(_LABEL.sub("", sentence.text, count=1)) for sentence in reply.sentences)


KINDS = (
    InstructionKind(
        name="no_commas",
        says=("Do not use commas.", "Write without any commas.", "Your answer must not contain a comma."),
        kept=lambda reply, params: "," not in reply.text,
        # nothing to plan: planned replies have no commas
    ),
    InstructionKind(
        name="ask_question",
        says=("Ask a question somewhere.", "One of your sentences must be a question.", "Include a question."),
        kept=lambda reply, params: any(_ends("?", sentence.text) for sentence in reply.sentences),
        plan=lambda params: {"forms": ["question"]},
        claims=frozenset({"marks"}),
    ),
    InstructionKind(
        name="exclaim",
        says=(
            "End every sentence with an exclamation mark.",
            "Each sentence must end with an exclamation mark.",
            "Put an exclamation mark at the end of all sentences.",
        ),
        kept=lambda reply, params: all(_ends("!", sentence.text) for sentence in reply.sentences),
        plan=lambda params: {"mark": "!"},
        claims=frozenset({"marks"}),
    ),
    InstructionKind(
        name="brackets",
        says=(
            "Put some words in round brackets.",
            "Include a remark in round brackets.",
            "Use round brackets around a part of a sentence.",
        ),
        kept=lambda reply, params: any(map(_has_letters, _BRACKETS.findall(reply.plain))),
        plan=lambda params: {"forms": ["brackets"]},
    ),
    InstructionKind(
        name="semicolon",
        says=("Use a semicolon.", "Join two statements by a semicolon.", "Your answer must contain a semicolon."),
        kept=lambda reply, params: bool(_SEMICOLON.search(reply.plain)),
        plan=lambda params: {"forms": ["semicolon"]},
    ),
    InstructionKind(
        name="colon",
        says=("Use a colon.", "Your answer must contain a colon.", "Put a colon between two words somewhere."),
        kept=lambda reply, params: bool(_COLON.search(reply.plain)),
        plan=lambda params: {"forms": ["colon"]},
    ),
    InstructionKind(
        name="quoted",
        says=(
            "Put your whole answer in double quotation marks.",
            "Begin and end with a double quotation mark, and use no others between.",
        ),
        kept=_is_quoted,
        plan=lambda params: {"quoted": True},
        claims=frozenset({"start", "end"}),
    ),
    InstructionKind(
        name="use_number",
        says=("Use a number in digits.", "Mention a number, written in digits.", "Include a number such as 7 or 25."),
        kept=_has_figure,
        plan=lambda params: {"forms": ["number"]},
    ),
)
