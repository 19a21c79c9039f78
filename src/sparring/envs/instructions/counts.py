"""Kinds of instructions that count sentences, words, or words of a sentence."""

from __future__ import annotations

from random import Random
from typing import Any

from sparring.envs.instructions.kind import InstructionKind, Params, ReplyPlan, Scope
from sparring.envs.instructions.reply import ReplyText


def _num_finished(reply: ReplyText) -> int:
    """Count the sentences; 0 if the last is unfinished, because the reply may have been truncated."""
    return len(reply.sentences) if reply.sentences and reply.sentences[-1].closed else 0


def _draw_sentences(random: Random, scope: Scope) -> dict[str, Any]:
    return {"n": random.randint(1, scope.max_sentences)}


def _plan_sentences(plan: ReplyPlan, params: Params) -> None:
    plan.sentences = params["n"]


def _draw_at_least(random: Random, scope: Scope) -> dict[str, Any]:
    return {"n": random.randint(2, max(2, scope.max_sentences))}


def _plan_at_least(plan: ReplyPlan, params: Params) -> None:
    plan.min_sentences = max(plan.min_sentences, params["n"])


def _draw_max_words(random: Random, scope: Scope) -> dict[str, Any]:
    return {"n": random.choice((10, 12, 15, 20, 25, 30))}


def _plan_max_words(plan: ReplyPlan, params: Params) -> None:
    plan.max_words = params["n"]


def _draw_min_words(random: Random, scope: Scope) -> dict[str, Any]:
    return {"n": random.choice((10, 15, 20, 25, 30))}


def _plan_min_words(plan: ReplyPlan, params: Params) -> None:
    plan.min_words = params["n"]


def _draw_short(random: Random, scope: Scope) -> dict[str, Any]:
    return {"n": random.randint(7, 12)}


def _plan_short(plan: ReplyPlan, params: Params) -> None:
    plan.sentence_words = params["n"]
    plan.min_sentences = max(plan.min_sentences, 2)


def _is_short(reply: ReplyText, params: Params) -> bool:
    return len(reply.sentences) >= 2 and all(len(sentence.words) <= params["n"] for sentence in reply.sentences)


KINDS = (
    InstructionKind(
        name="sentences",
        says=(
            "Write exactly {n} sentence{s}.",
            "Your answer must have {n} sentence{s}, no more and no fewer.",
            "Use {n} sentence{s} in all.",
        ),
        kept=lambda reply, params: _num_finished(reply) == params["n"],
        plan=_plan_sentences,
        draw=_draw_sentences,
        claims=frozenset({"sentences"}),
    ),
    InstructionKind(
        name="at_least_sentences",
        says=(
            "Write at least {n} sentence{s}.",
            "There should be {n} sentence{s} or more.",
            "Do not write fewer than {n} sentences.",
        ),
        kept=lambda reply, params: _num_finished(reply) >= params["n"],
        plan=_plan_at_least,
        draw=_draw_at_least,
        claims=frozenset({"sentences"}),
    ),
    InstructionKind(
        name="at_most_words",
        says=(
            "Use at most {n} words.",
            "Stay within {n} words.",
            "Your answer must not be longer than {n} words.",
        ),
        kept=lambda reply, params: len(reply.words) <= params["n"],
        plan=_plan_max_words,
        draw=_draw_max_words,
        claims=frozenset({"length"}),
    ),
    InstructionKind(
        name="at_least_words",
        says=("Use at least {n} words.", "Write {n} words or more.", "Your answer needs no fewer than {n} words."),
        kept=lambda reply, params: len(reply.words) >= params["n"],
        plan=_plan_min_words,
        draw=_draw_min_words,
        claims=frozenset({"length"}),
    ),
    InstructionKind(
        name="short_sentences",
        says=(
            "Write several sentences, none with more than {n} words.",
            "Write two sentences or more, each of at most {n} words.",
            "Keep every sentence to {n} words or fewer, and write more than one.",
        ),
        kept=_is_short,
        plan=_plan_short,
        draw=_draw_short,
        claims=frozenset({"sentences"}),
    ),
)
