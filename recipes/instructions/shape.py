"""Kinds of instructions about layout: lists, paragraphs, lines, a heading."""

from __future__ import annotations

from random import Random
from typing import Any

from kind import InstructionKind, Params, Scope
from reply import ReplyText

_LIST = frozenset({"layout", "start", "sentences"})


def _draw_points(random: Random, scope: Scope) -> dict[str, Any]:
    return {"n": random.randint(2, max(2, scope.max_sentences))}


def _has_paragraphs(reply: ReplyText, params: Params) -> bool:
    """Return True if there are n paragraphs, not counting a heading, and each contains a finished sentence."""
    texts = list(reply.paragraphs)
    if reply.heading and texts and texts[0] == f"[{reply.heading}]":
        del texts[0]
    read = [ReplyText(text).sentences for text in texts]
    return len(texts) == params["n"] and all(any(s.closed for s in sentences) for sentences in read)


def _has_own_lines(reply: ReplyText, params: Params) -> bool:
    """Return True if there are at least two lines, not counting a heading, with one finished sentence each."""
    lines = reply.lines[bool(reply.heading) :]
    return len(lines) >= 2 and len(reply.sentences) == len(lines) and all(s.closed for s in reply.sentences)


KINDS = (
    InstructionKind(
        name="bullets",
        says=(
            'Answer with a list of {n} points, each on a line that begins with "- ".',
            'Write {n} bullet points and nothing else; begin each with "- ".',
        ),
        kept=lambda reply, params: [line[:2] for line in reply.lines] == ["- "] * params["n"],
        plan=lambda params: {"layout": "bullets", "pieces": params["n"], "sentences": params["n"]},
        draw=_draw_points,
        claims=_LIST,
    ),
    InstructionKind(
        name="numbered",
        says=(
            "Answer with a numbered list of {n} points, each on its own line, and nothing else.",
            'Write {n} points, one on each line, numbered "1.", "2." and so on, and nothing else.',
        ),
        kept=lambda reply, params: reply.numbers == tuple(range(1, params["n"] + 1)),
        plan=lambda params: {"layout": "numbered", "pieces": params["n"], "sentences": params["n"]},
        draw=_draw_points,
        claims=_LIST,
    ),
    InstructionKind(
        name="paragraphs",
        says=(
            "Write {n} paragraphs with a blank line between them.",
            "Divide your answer into {n} paragraphs, with an empty line between.",
        ),
        kept=_has_paragraphs,
        plan=lambda params: {"layout": "paragraphs", "pieces": params["n"], "min_sentences": params["n"]},
        draw=lambda random, scope: {"n": random.randint(2, max(2, min(3, scope.max_sentences)))},
        claims=frozenset({"layout"}),
    ),
    InstructionKind(
        name="own_lines",
        says=(
            "Write several sentences, each on a line of its own.",
            "Begin a new line after every sentence, and write two or more.",
        ),
        kept=_has_own_lines,
        plan=lambda params: {"layout": "lines", "min_sentences": 2},
        claims=frozenset({"layout"}),
    ),
    InstructionKind(
        name="heading",
        says=(
            "Put a heading in square brackets on the first line, and your text below it.",
            "Give your text a title in square brackets, on a line of its own above it.",
        ),
        kept=lambda reply, params: bool(reply.heading and reply.sentences),
        plan=lambda params: {"heading": True},
        claims=frozenset({"start"}),
    ),
)
