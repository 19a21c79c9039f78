"""Kinds of instructions about upper and lower case."""

from __future__ import annotations

from random import Random
from typing import Any

from sparring.envs.instructions.kind import InstructionKind, Params, ReplyPlan, Scope
from sparring.envs.instructions.reply import ReplyText
from sparring.envs.instructions.vocabulary import NOUNS

_CASE = frozenset({"case"})


def _plan_lower(plan: ReplyPlan, params: Params) -> None:
    plan.case = "lower"


def _plan_upper(plan: ReplyPlan, params: Params) -> None:
    plan.case = "upper"


def _plan_title(plan: ReplyPlan, params: Params) -> None:
    plan.case = "title"


def _is_title(reply: ReplyText, params: Params) -> bool:
    """Return True if every word begins with a capital, and most of longer ones go on in small letters: a name or a
    short form may not."""
    begin = all(word[0].isupper() or word[0].isdigit() for word in reply.spelled)
    longer = [word for word in reply.spelled if len(word) > 1]
    return begin and 2 * sum(word[1:].islower() for word in longer) > len(longer)


def _draw_shout(random: Random, scope: Scope) -> dict[str, Any]:
    return {"word": random.choice([noun for noun in NOUNS if noun not in scope.family]).upper()}


def _plan_shout(plan: ReplyPlan, params: Params) -> None:
    plan.words.append(params["word"].lower())
    plan.shout = params["word"]


def _is_shouted(reply: ReplyText, params: Params) -> bool:
    """Return True if the word is in capitals, and no other word of more than one letter is."""
    capitals = {word for word in reply.spelled if len(word) > 1 and word.isupper()}
    return capitals == {params["word"]}


KINDS = (
    InstructionKind(
        name="lowercase",
        says=(
            "Use small letters only.",
            "Do not use any capital letters.",
            "Write everything in lower case.",
        ),
        kept=lambda reply, params: reply.plain.islower(),
        plan=_plan_lower,
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
        plan=_plan_upper,
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
        plan=_plan_title,
        claims=_CASE,
    ),
    InstructionKind(
        name="shout_word",
        says=(
            'Use the word "{word}" in capital letters, and write no other word in capitals.',
            'Write "{word}" somewhere, all in capitals; it is the only word written so.',
        ),
        kept=_is_shouted,
        plan=_plan_shout,
        draw=_draw_shout,
        claims=_CASE,
    ),
)
