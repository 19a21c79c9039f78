"""Limits, sampling settings, seeds and ids of a request for a reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import xxhash

from sparring.errors import LimitReached
from sparring.generation import Sampling
from sparring.protocols import Renderer
from sparring.record.lines import Turn
from sparring.reply import ReplyRequest
from sparring.types import Message

CHARACTERS_PER_TOKEN = 8
"""Characters for each token of the context up to which a prompt is rendered unseen; text has some 4."""


def joined_stop(of_run: tuple[str, ...], of_client: Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings of a run and, behind them, those that only a client has, each once."""
    if not of_client:
        return of_run
    return of_run + tuple(dict.fromkeys(string for string in of_client if string not in of_run))


def check_length(name: str, length: int, room: int) -> None:
    """Refuse a prompt that leaves no room for a reply.

    Args:
        name: of the session.
        length: ids of the prompt.
        room: most ids that a prompt and its reply may have together.

    Raises:
        LimitReached: it does; says by how much.
    """
    if length >= room:
        text = f"{name}: a prompt of {length} tokens, room for {room}"
        raise LimitReached("context_length", text, (length, room))


def check_far(name: str, messages: Sequence[Message], renderer: Renderer, room: int) -> None:
    """Refuse messages that are too long by far before they are rendered. Raises as `check_length` does."""
    if overflows(messages, renderer, room):
        text = f"{name}: a prompt of more than {2 * room} tokens, room for {room}"
        raise LimitReached("context_length", text, far(room))


def far_check(name: str, messages: Sequence[Message], renderer: Renderer, room: int) -> Callable[[], None] | None:
    """Return what checks messages as `check_far` does, which takes long; None where they are short enough to fit."""
    return partial(check_far, name, messages, renderer, room) if is_far(messages, room) else None


def far(room: int) -> tuple[int, int]:
    """Return the length that is told of a prompt too long by far, and its room: one more than twice the room, since
    nobody has counted further."""
    return 2 * room + 1, room


def cut_reason(base: int, context: int, request: ReplyRequest, granted: int) -> str:
    """Return the limit that a reply hit which is cut short; empty where that is its client's.

    Args:
        base: most tokens of a reply of the run.
        context: tokens that the context has room for.
        request: of the client.
        granted: tokens that the reply had.
    """
    if granted == request.max_tokens and granted < min(base, context):
        return ""
    return "context_length" if granted == context < base else "max_tokens"


def is_far(messages: Sequence[Message], room: int) -> bool:
    """Return whether messages have so many characters that a beginning of them has to be rendered to know whether they
    fit a context of `room` tokens."""
    return sum([len(message.content) for message in messages]) > CHARACTERS_PER_TOKEN * room


def overflows(messages: Sequence[Message], renderer: Renderer, room: int) -> bool:
    """Return True if messages are too long for a context of `room` tokens by far. Of an environment that returned too
    much, only a beginning is rendered, four times as long each time until it does not fit: a megabyte of text takes
    seconds and 300 MB."""
    if not is_far(messages, room):
        return False
    text = "".join(message.content for message in messages)
    characters, length = len(text), CHARACTERS_PER_TOKEN * room
    while length < characters:
        beginning = Message(role="user", content=text[:length])
        if len(renderer.render([beginning], ()).tokens) > 2 * room:
            return True
        length *= 4
    return False


def sampling_of(request: ReplyRequest, of_run: Sampling, *, stop_ids: Sequence[int], seed: int) -> Sampling:
    """Return how a reply is drawn, whatever room its context leaves.

    Args:
        request: of the client.
        of_run: how tokens are drawn where the client says nothing.
        stop_ids: that end a turn where the run names none.
        seed: of this turn.
    """
    sampling = replace(
        of_run,
        min_tokens=0 if request.constraint else of_run.min_tokens,
        constraint=request.constraint or of_run.constraint,
        stop=of_run.stop or tuple(stop_ids),
        stop_strings=joined_stop(of_run.stop_strings, request.stop),
        seed=seed,
    )
    most = of_run.max_tokens
    return at_most(sampling, most if request.max_tokens is None else min(most, request.max_tokens))


def at_most(sampling: Sampling, most: int) -> Sampling:
    """Return settings of sampling for a reply of at most so many tokens."""
    if most == sampling.max_tokens:
        return sampling
    return replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))


def request_id(session: str, turn: Turn) -> str:
    """Return the id of a turn's request at the engine; no other request has it."""
    return f"{session}#{turn.place}" + (f".{turn.attempt}" if turn.attempt else "")


def derived_seed(seed: int, *names: object) -> int:
    """Return a seed for something within a session: xxh3-64 of its names and the session's seed."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, (*names, seed))).encode())
