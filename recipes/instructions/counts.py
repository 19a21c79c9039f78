"""Kinds of instructions that count sentences, words, or words of a sentence."""

from __future__ import annotations

from kind import InstructionKind, Params
from reply import ReplyText, most_words


def _num_finished(reply: ReplyText) -> int:
    """Count the sentences; 0 if the last is unfinished, because the reply may have been truncated. A point of a list
    with two words is none."""
    finished = bool(reply.sentences) and reply.sentences[-1].closed
    return sum(not sentence.item or len(sentence.words) > 2 for sentence in reply.sentences) if finished else 0


def _is_short(reply: ReplyText, params: Params) -> bool:
    return len(reply.sentences) >= 2 and all(most_words(sentence.text) <= params["n"] for sentence in reply.sentences)


KINDS = (
    InstructionKind(
        name="sentences",
        says=(
            "Write exactly {n} sentence{s}.",
            "Your answer must have {n} sentence{s}, no more and no fewer.",
            "Use {n} sentence{s} in all.",
        ),
        kept=lambda reply, params: _num_finished(reply) == params["n"],
        plan=lambda params: {"sentences": params["n"]},
        draw=lambda random, scope: {"n": random.randint(1, scope.max_sentences)},
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
        plan=lambda params: {"min_sentences": params["n"]},
        draw=lambda random, scope: {"n": random.randint(2, max(2, scope.max_sentences))},
        claims=frozenset({"sentences"}),
    ),
    InstructionKind(
        name="at_most_words",
        says=(
            "Use at most {n} words.",
            "Stay within {n} words.",
            "Your answer must not be longer than {n} words.",
        ),
        kept=lambda reply, params: most_words(reply.plain) <= params["n"],
        plan=lambda params: {"max_words": params["n"]},
        draw=lambda random, scope: {"n": random.choice((10, 12, 15, 20, 25, 30))},
        claims=frozenset({"length"}),
    ),
    InstructionKind(
        name="at_least_words",
        says=("Use at least {n} words.", "Write {n} words or more.", "Your answer needs no fewer than {n} words."),
        kept=lambda reply, params: reply.fewest_words >= params["n"],
        plan=lambda params: {"min_words": params["n"]},
        draw=lambda random, scope: {"n": random.choice((10, 15, 20, 25, 30))},
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
        plan=lambda params: {"sentence_words": params["n"], "min_sentences": 2},
        draw=lambda random, scope: {"n": random.randint(7, 12)},
        claims=frozenset({"sentences"}),
    ),
)
