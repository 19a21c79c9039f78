"""Limits, sampling settings, seeds and ids of requests for replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import xxhash

from sparring.errors import LimitReached
from sparring.generation import Sampling
from sparring.protocols import Renderer
from sparring.record.lines import Turn
from sparring.reply import ReplyRequest
from sparring.types import Message, StopReason

CHARACTERS_PER_TOKEN = 8
"""Characters per token of the context up to which a prompt is rendered without a check; usual text has about 4."""


def check_length(name: str, length: int, room: int) -> None:
    """Refuse a prompt that leaves no room for a reply.

    Args:
        length: number of ids of the prompt.
        room: maximum number of ids of a prompt and its reply.

    Raises:
        LimitReached: the prompt is too long; the error has both numbers.
    """
    if length >= room:
        text = f"{name}: a prompt of {length} tokens, room for {room}"
        raise LimitReached("context_length", text, (length, room))


def check_far(name: str, messages: Sequence[Message], renderer: Renderer, room: int) -> None:
    """Refuse messages that are far too long for a context of `room` tokens, before they are rendered whole.

    Only a beginning of the text is rendered, four times longer in each step until it does not fit, because rendering a
    megabyte takes seconds and 300 MB. Raises the errors of `check_length`.
    """
    if not is_far(messages, room):
        return
    text = "".join(message.content for message in messages)
    length = CHARACTERS_PER_TOKEN * room
    while length < len(text):
        beginning = Message(role="user", content=text[:length])
        if len(renderer.render([beginning], ()).tokens) > 2 * room:
            error = f"{name}: a prompt of more than {2 * room} tokens, room for {room}"
            raise LimitReached("context_length", error, far(room))
        length *= 4


def far(room: int) -> tuple[int, int]:
    """Return the length to report for a prompt that is far too long, and the room. The length is one more than twice
    the room, because no more tokens were counted."""
    return 2 * room + 1, room


def cut_reason(base: int, context: int, request: ReplyRequest, granted: int) -> StopReason | None:
    """Return the limit that truncated a reply; None if the client's own limit did.

    Args:
        base: maximum number of tokens of a reply in the run.
        granted: maximum number of tokens of the reply.
    """
    if granted == request.max_tokens and granted < min(base, context):
        return None
    return "context_length" if granted == context < base else "max_tokens"


def is_far(messages: Sequence[Message], room: int) -> bool:
    """Return whether messages are so long that their beginning must be rendered to know whether they fit a context of
    `room` tokens."""
    return sum([len(message.content) for message in messages]) > CHARACTERS_PER_TOKEN * room


def sampling_of(request: ReplyRequest, of_run: Sampling, *, stop_ids: Sequence[int], seed: int) -> Sampling:
    """Return the sampling settings of a reply, before the limit of its context. `stop_ids`: ids that end a turn, if the
    run sets none."""
    new_stops = (string for string in request.stop if string not in of_run.stop_strings)
    sampling = replace(
        of_run,
        min_tokens=0 if request.constraint else of_run.min_tokens,
        constraint=request.constraint or of_run.constraint,
        stop=of_run.stop or tuple(stop_ids),
        stop_strings=of_run.stop_strings + tuple(dict.fromkeys(new_stops)),
        seed=seed,
    )
    most = of_run.max_tokens
    return at_most(sampling, most if request.max_tokens is None else min(most, request.max_tokens))


def at_most(sampling: Sampling, most: int) -> Sampling:
    """Return sampling settings with a maximum of `most` tokens."""
    if most == sampling.max_tokens:
        return sampling
    return replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))


def request_id(session: str, turn: Turn) -> str:
    """Return the unique id of a turn's request at the engine."""
    return f"{session}#{turn.place}" + (f".{turn.attempt}" if turn.attempt else "")


def derived_seed(seed: int, *names: object) -> int:
    """Return a seed within a session: xxh3-64 of the names and the session's seed."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, (*names, seed))).encode())
