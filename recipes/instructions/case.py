"""Kinds of instructions about upper and lower case."""

from __future__ import annotations

import re

from kind import InstructionKind, Params
from reply import ReplyText

_CASE = frozenset({"case"})


def _is_title(reply: ReplyText, params: Params) -> bool:
    """Return True if every word begins with a capital or a digit, and more than half of the longer words go on in lower
    case. The others may be names or abbreviations."""
    begin = all(word[0].isupper() or word[0].isdigit() for word in reply.spelled)
    longer = [word for word in reply.spelled if len(word) > 1]
    return begin and 2 * sum(word[1:].islower() for word in longer) > len(longer)


def _is_shouted(reply: ReplyText, params: Params) -> bool:
    """Return True if the word is in capitals, and no other word of more than one letter is, nor part of one, nor most
    letters of one."""
    parts = {part for word in reply.spelled for part in re.split("['’_-]", word)}
    capitals = {part for part in parts if 2 * sum(map(str.isupper, part)) > len(part) > 1}
    return params["word"] in reply.spelled and capitals == {params["word"]}


KINDS = (
    InstructionKind(
        name="lowercase",
        says=(
            "Use small letters only.",
            "Do not use any capital letters.",
            "Write everything in lower case.",
        ),
        kept=lambda reply, params: reply.plain.islower(),
        plan=lambda params: {"case": "lower"},
        claims=_CASE,
    ),
    InstructionKind(
        name="uppercase",
        says=(
            "Write everything in capital letters.",
            "Use capital letters only.",
            "Do not use any small letters.",
        ),
        kept=lambda reply, params: reply.plain.isupper(),
        plan=lambda params: {"case": "upper"},
        claims=_CASE,
    ),
    InstructionKind(
        name="title_case",
        says=(
            "Begin every word with a capital letter.",
            "Give each word a capital first letter, and small letters after it.",
            "Start each single word with a capital letter.",
        ),
        kept=_is_title,
        plan=lambda params: {"case": "title"},
        claims=_CASE,
    ),
    InstructionKind(
        name="shout_word",
        says=(
            'Use the word "{word}" in capital letters, and write no other word in capitals.',
            'Write "{word}" somewhere, all in capitals; it is the only word written so.',
        ),
        kept=_is_shouted,
        plan=lambda params: {"words": [params["word"].lower()], "shout": params["word"]},
        draw=lambda random, scope: {"word": random.choice(scope.nouns).upper()},
        claims=_CASE,
    ),
)
