"""Kinds of instructions about words to use, to repeat or to avoid."""

from __future__ import annotations

from random import Random
from typing import Any

from sparring.envs.instructions.kind import InstructionKind, Params, ReplyPlan, Scope
from sparring.envs.instructions.reply import ReplyText, folded
from sparring.envs.instructions.vocabulary import NOUNS

LETTERS = "bjkpqvwxyz"
"""Letters that a text in common words can avoid."""

COMMON = ("very", "good", "many", "some", "people", "often", "like", "also", "important", "different", "great", "make")
"""Words that most texts use, so that avoiding one takes care."""


def _nouns(random: Random, scope: Scope, count: int) -> list[str]:
    return random.sample([noun for noun in NOUNS if noun not in scope.family], count)


def _draw_word(random: Random, scope: Scope) -> dict[str, Any]:
    return {"word": _nouns(random, scope, 1)[0]}


def _plan_word(plan: ReplyPlan, params: Params) -> None:
    plan.words.append(params["word"])


def _draw_two(random: Random, scope: Scope) -> dict[str, Any]:
    first, second = _nouns(random, scope, 2)
    return {"first": first, "second": second}


def _plan_two(plan: ReplyPlan, params: Params) -> None:
    plan.words += [params["first"], params["second"]]


def _draw_times(random: Random, scope: Scope) -> dict[str, Any]:
    return {"word": _nouns(random, scope, 1)[0], "n": random.randint(2, 3)}


def _plan_times(plan: ReplyPlan, params: Params) -> None:
    plan.words += [params["word"]] * params["n"]


def _in_order(reply: ReplyText, params: Params) -> bool:
    """Return True if both words occur, and the first occurrence of the one precedes that of the other."""
    first, second = params["first"], params["second"]
    both = reply.count(first) and reply.count(second)
    return bool(both) and reply.words.index(first) < reply.words.index(second)


def _draw_avoid(random: Random, scope: Scope) -> dict[str, Any]:
    """Draw a common word or one related to the topic, but never one of its first two, its own names."""
    return {"word": random.choice([*COMMON, *scope.family[2:]])}


def _plan_avoid(plan: ReplyPlan, params: Params) -> None:
    plan.avoid.add(params["word"])


def _draw_letter(random: Random, scope: Scope) -> dict[str, Any]:
    return {"letter": random.choice([letter for letter in LETTERS if letter not in scope.family[0]])}


def _plan_letter(plan: ReplyPlan, params: Params) -> None:
    plan.letter = params["letter"]


KINDS = (
    InstructionKind(
        name="use_word",
        says=('Use the word "{word}".', 'The word "{word}" must appear.', 'Mention the word "{word}" in your answer.'),
        kept=lambda reply, params: reply.count(params["word"]) >= 1,
        plan=_plan_word,
        draw=_draw_word,
    ),
    InstructionKind(
        name="use_two_words",
        says=(
            'Use the words "{first}" and "{second}".',
            'Both "{first}" and "{second}" must appear.',
            'Work in the word "{first}" and the word "{second}".',
        ),
        kept=lambda reply, params: bool(reply.count(params["first"]) and reply.count(params["second"])),
        plan=_plan_two,
        draw=_draw_two,
        claims=frozenset({"pairs"}),
    ),
    InstructionKind(
        name="word_times",
        says=(
            'Use the word "{word}" exactly {n} times.',
            'The word "{word}" must appear {n} times, no more and no fewer.',
        ),
        kept=lambda reply, params: reply.count(params["word"]) == params["n"],
        plan=_plan_times,
        draw=_draw_times,
        claims=frozenset({"pairs"}),
    ),
    InstructionKind(
        name="words_in_order",
        says=(
            'Use the word "{first}", and after it the word "{second}".',
            'The word "{first}" must come before the word "{second}"; use both.',
        ),
        kept=_in_order,
        plan=_plan_two,
        draw=_draw_two,
        claims=frozenset({"pairs"}),
    ),
    InstructionKind(
        name="avoid_word",
        says=('Do not use the word "{word}".', 'Leave out the word "{word}".', 'Never write the word "{word}".'),
        kept=lambda reply, params: params["word"] not in reply.appearing,
        plan=_plan_avoid,
        draw=_draw_avoid,
    ),
    InstructionKind(
        name="avoid_letter",
        says=(
            'Do not use the letter "{letter}".',
            'No word may contain the letter "{letter}".',
            'Write without the letter "{letter}".',
        ),
        kept=lambda reply, params: params["letter"] not in folded(reply.text),
        plan=_plan_letter,
        draw=_draw_letter,
    ),
)
