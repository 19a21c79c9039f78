"""Kinds of instructions about the beginning and end of a reply and its sentences."""

from __future__ import annotations

from kind import InstructionKind, Params
from reply import ReplyText, lowered, words_of
from vocabulary import ADVERBS, CLOSINGS, FIRST_WORDS, OPENINGS

_START, _END = frozenset({"start"}), frozenset({"end"})


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
    first = [s.words[0] if s.words else "" for s in reply.sentences]
    return len(first) >= 2 and all(word[:1] == letter and (len(word) > 1 or word in "ai") for word in first)


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
        plan=lambda params: {"opening": params["word"]},
        draw=lambda random, scope: {"word": random.choice(FIRST_WORDS)},
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
        plan=lambda params: {"opening": params["phrase"]},
        draw=lambda random, scope: {"phrase": random.choice(OPENINGS)},
        claims=_START,
    ),
    InstructionKind(
        name="end_with",
        says=(
            'Let your last sentence end with the words "{phrase}".',
            'The last words of your last sentence must be "{phrase}".',
        ),
        kept=_ends_with_phrase,
        plan=lambda params: {"closing": params["phrase"]},
        draw=lambda random, scope: {"phrase": random.choice(CLOSINGS)},
        claims=_END,
    ),
    InstructionKind(
        name="end_question",
        says=("End with a question.", "Your last sentence must be a question.", "Close your answer with a question."),
        kept=_asks_last,
        plan=lambda params: {"ends_asking": True},
        claims=_END | {"marks"},
    ),
    InstructionKind(
        name="same_letter",
        says=(
            'Write two sentences or more, each beginning with the letter "{letter}".',
            'Write several sentences, and begin every one with the letter "{letter}".',
        ),
        kept=_has_initial,
        plan=lambda params: {"initial": params["letter"].lower(), "min_sentences": 2},
        draw=lambda random, scope: {"letter": random.choice(sorted(ADVERBS)).upper()},
        claims=_START,
    ),
    InstructionKind(
        name="postscript",
        says=(
            'Add a postscript at the end, on a line of its own that begins with "P.S.".',
            'Let the last line be a postscript that begins with "P.S.".',
        ),
        kept=_has_postscript,
        plan=lambda params: {"postscript": True, "min_sentences": 2},
        claims=_END | {"start", "layout"},
    ),
)
