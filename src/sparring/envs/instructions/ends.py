"""Kinds of instructions about the beginning and end of a reply and its sentences."""

from __future__ import annotations

from random import Random
from typing import Any

from sparring.envs.instructions.kind import InstructionKind, Params, ReplyPlan, Scope
from sparring.envs.instructions.reply import ReplyText, lowered, words_of
from sparring.envs.instructions.vocabulary import ADVERBS, CLOSINGS, FIRST_WORDS, OPENINGS

_START, _END = frozenset({"start"}), frozenset({"end"})


def _draw_first(random: Random, scope: Scope) -> dict[str, Any]:
    return {"word": random.choice(FIRST_WORDS)}


def _plan_first(plan: ReplyPlan, params: Params) -> None:
    plan.opening = params["word"]


def _draw_opening(random: Random, scope: Scope) -> dict[str, Any]:
    return {"phrase": random.choice(OPENINGS)}


def _plan_opening(plan: ReplyPlan, params: Params) -> None:
    plan.opening = params["phrase"]


def _draw_closing(random: Random, scope: Scope) -> dict[str, Any]:
    return {"phrase": random.choice(CLOSINGS)}


def _plan_closing(plan: ReplyPlan, params: Params) -> None:
    plan.closing = params["phrase"]


def _plan_asking(plan: ReplyPlan, params: Params) -> None:
    plan.ends_asking = True


def _draw_initial(random: Random, scope: Scope) -> dict[str, Any]:
    return {"letter": random.choice(sorted(ADVERBS)).upper()}


def _plan_initial(plan: ReplyPlan, params: Params) -> None:
    plan.initial = params["letter"].lower()
    plan.min_sentences = max(plan.min_sentences, 2)


def _plan_postscript(plan: ReplyPlan, params: Params) -> None:
    plan.postscript = True
    plan.min_sentences = max(plan.min_sentences, 2)


def _starts_with_phrase(reply: ReplyText, params: Params) -> bool:
    """Return True if the reply begins with the phrase, and its first sentence has more words."""
    phrase = lowered(params["phrase"] if "phrase" in params else params["word"])
    first = reply.sentences[0].words if reply.sentences else ()
    return reply.words[: len(phrase)] == phrase == first[: len(phrase)] and len(first) > len(phrase)


def _ends_with_phrase(reply: ReplyText, params: Params) -> bool:
    """Return True if the reply ends with the phrase, and its last sentence has more words."""
    phrase = lowered(params["phrase"])
    last = reply.sentences[-1].words if reply.sentences else ()
    return last[-len(phrase) :] == phrase and len(last) > len(phrase)


def _asks_last(reply: ReplyText, params: Params) -> bool:
    return bool(reply.sentences) and reply.sentences[-1].text.rstrip("\"”’')]").endswith("?")


def _has_initial(reply: ReplyText, params: Params) -> bool:
    """Return True if there are at least two sentences, all beginning with the letter."""
    letter = params["letter"].lower()
    return len(reply.sentences) >= 2 and all(s.words and s.words[0][0] == letter for s in reply.sentences)


def _has_postscript(reply: ReplyText, params: Params) -> bool:
    """Return True if the last line is a postscript: "P.S." and more words, below other text."""
    last = reply.lines[-1].casefold() if reply.lines else ""
    return len(reply.lines) >= 2 and last.startswith("p.s.") and len(words_of(last)) > 4


KINDS = (
    InstructionKind(
        name="first_word",
        says=(
            'Begin with the word "{word}".',
            'The first word must be "{word}".',
            'Start your answer with "{word}".',
        ),
        kept=_starts_with_phrase,
        plan=_plan_first,
        draw=_draw_first,
        claims=_START,
    ),
    InstructionKind(
        name="begin_with",
        says=(
            'Begin with the words "{phrase}".',
            'Your answer must start with "{phrase}".',
            'Let the first words be "{phrase}".',
        ),
        kept=_starts_with_phrase,
        plan=_plan_opening,
        draw=_draw_opening,
        claims=_START,
    ),
    InstructionKind(
        name="end_with",
        says=(
            'Let your last sentence end with the words "{phrase}".',
            'The last words of your last sentence must be "{phrase}".',
        ),
        kept=_ends_with_phrase,
        plan=_plan_closing,
        draw=_draw_closing,
        claims=_END,
    ),
    InstructionKind(
        name="end_question",
        says=("End with a question.", "Your last sentence must be a question.", "Close your answer with a question."),
        kept=_asks_last,
        plan=_plan_asking,
        claims=_END | {"marks"},
    ),
    InstructionKind(
        name="same_letter",
        says=(
            'Write two sentences or more, each beginning with the letter "{letter}".',
            'Write several sentences, and begin every one with the letter "{letter}".',
        ),
        kept=_has_initial,
        plan=_plan_initial,
        draw=_draw_initial,
        claims=_START,
    ),
    InstructionKind(
        name="postscript",
        says=(
            'Add a postscript at the end, on a line of its own that begins with "P.S.".',
            'Let the last line be a postscript that begins with "P.S.".',
        ),
        kept=_has_postscript,
        plan=_plan_postscript,
        claims=_END | {"start", "layout"},
    ),
)
