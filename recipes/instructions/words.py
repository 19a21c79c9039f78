"""Kinds of instructions about words to use, to repeat or to avoid."""

from __future__ import annotations

from random import Random

from kind import InstructionKind, Params, Scope
from reply import ReplyText

LETTERS = "bjkpqvwxyz"
"""Letters that a text in common words can avoid."""

COMMON = ("very", "good", "many", "some", "people", "often", "like", "also", "important", "different", "great", "make")
"""Words that most texts use, so that avoiding one takes care."""


def _two_nouns(random: Random, scope: Scope) -> dict[str, str]:
    return dict(zip(("first", "second"), random.sample(scope.nouns, 2), strict=True))


def _in_order(reply: ReplyText, params: Params) -> bool:
    """Return True if both words occur, and `first` occurs before `second` does for the first time."""
    first, second = params["first"], params["second"]
    both = reply.count(first) and reply.count(second)
    return bool(both) and reply.words.index(first) < reply.words.index(second)


KINDS = (
    InstructionKind(
        name="use_word",
        says=('Use the word "{word}".', 'The word "{word}" must appear.', 'Mention the word "{word}" in your answer.'),
        kept=lambda reply, params: reply.count(params["word"]) >= 1,
        plan=lambda params: {"words": [params["word"]]},
        draw=lambda random, scope: {"word": random.sample(scope.nouns, 1)[0]},
    ),
    InstructionKind(
        name="use_two_words",
        says=(
            'Use the words "{first}" and "{second}".',
            'Both "{first}" and "{second}" must appear.',
            'Work in the word "{first}" and the word "{second}".',
        ),
        kept=lambda reply, params: bool(reply.count(params["first"]) and reply.count(params["second"])),
        plan=lambda params: {"words": [params["first"], params["second"]]},
        draw=_two_nouns,
        claims=frozenset({"pairs"}),
    ),
    InstructionKind(
        name="word_times",
        says=(
            'Use the word "{word}" exactly {n} times.',
            'The word "{word}" must appear {n} times, no more and no fewer.',
        ),
        kept=lambda reply, params: reply.count(params["word"]) == params["n"],
        plan=lambda params: {"words": [params["word"]] * params["n"]},
        draw=lambda random, scope: {"word": random.sample(scope.nouns, 1)[0], "n": random.randint(2, 3)},
        claims=frozenset({"pairs"}),
    ),
    InstructionKind(
        name="words_in_order",
        says=(
            'Use the word "{first}", and after it the word "{second}".',
            'The word "{first}" must come before the word "{second}"; use both.',
        ),
        kept=_in_order,
        plan=lambda params: {"words": [params["first"], params["second"]]},
        draw=_two_nouns,
        claims=frozenset({"pairs"}),
    ),
    InstructionKind(
        name="avoid_word",
        says=('Do not use the word "{word}".', 'Leave out the word "{word}".', 'Never write the word "{word}".'),
        kept=lambda reply, params: not reply.shows(params["word"]),
        plan=lambda params: {"avoid": {params["word"]}},
        # never the first two words of the topic, which are its plural and its singular
        draw=lambda random, scope: {"word": random.choice([*COMMON, *scope.family[2:]])},
    ),
    InstructionKind(
        name="avoid_letter",
        says=(
            'Do not use the letter "{letter}".',
            'No word may contain the letter "{letter}".',
            'Write without the letter "{letter}".',
        ),
        kept=lambda reply, params: not reply.has_letter(params["letter"]),
        plan=lambda params: {"letter": params["letter"]},
        draw=lambda random, scope: {"letter": random.choice([x for x in LETTERS if x not in scope.family[0]])},
    ),
)
