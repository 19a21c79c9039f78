"""Whole renders that keep the thoughts of earlier replies, for formats that drop thoughts before a user's message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from sparring.errors import BadInput
from sparring.generation import Rendered
from sparring.protocols import Renderer
from sparring.types import Message, ToolCall, ToolSpec

_QUESTION = Message(role="user", content="?")
_THOUGHT = "sparring thinks 7f3a"


class Format(Renderer, Protocol):
    """Renderer that can also render a conversation without keeping thoughts."""

    def plain(self, messages: Sequence[Message], tools: Sequence[ToolSpec], generation: bool) -> Rendered:
        """Render a conversation as the format does, without keeping thoughts. Raises the errors of `render`."""


def drops_thoughts(format: Format) -> bool:
    """Return whether a format drops the thought of a reply (a text or a call) before the next user message."""
    spoken = Message(role="assistant", content="hi", reasoning=_THOUGHT)
    call = ToolCall(id="call_0", name="look", arguments={"at": "it"})
    answer = Message(role="tool", content="it", tool_call_id=call.id, name=call.name)
    called = replace(spoken, content="", tool_calls=(call,))
    for reply, later in ((spoken, []), (called, [answer, replace(spoken, reasoning=None)])):
        try:
            before, after = (format.plain([_QUESTION, reply, *new], (), False) for new in ([], [*later, _QUESTION]))
        except BadInput:
            continue
        if _THOUGHT in format.decode(before.tokens) and _THOUGHT not in format.decode(after.tokens):
            return True
    return False


def followers(reply: Message) -> list[Message]:
    """Return messages that may follow a reply: an answer to each of its calls, or else a user's message."""
    calls = reply.tool_calls
    answers = [Message(role="tool", content="?", tool_call_id=call.id, name=call.name) for call in calls]
    return answers or [_QUESTION]


def last_stop(tokens: Sequence[int], stop_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the last id in `tokens` that ends a turn, as a tuple; empty if no id ends a turn. For formats such as
    GLM's, in which the head of the next message ends a reply.

    Args:
        tokens: ids of the reply and of the messages after it.
    """
    return tuple([token for token in tokens if token in stop_ids][-1:])


def has_dropped(messages: Sequence[Message]) -> bool:
    """Return whether a reply before the last user message has a thought."""
    last = max((at for at, message in enumerate(messages) if message.role == "user"), default=0)
    return any(message.reasoning for message in messages[:last])


def with_thoughts(
    format: Format, messages: Sequence[Message], tools: Sequence[ToolSpec], generation: bool
) -> Rendered | None:
    """Render a conversation as a session that keeps thoughts builds it: the first prompt, then each reply as it is
    sampled and a bridge over the messages after it.

    Returns:
        The ids; None if the format does not write one of the replies after its generation prompt, or cannot bridge the
            messages after a reply.
    """
    replies = [at for at, message in enumerate(messages) if message.role == "assistant"]
    if not replies or replies[0] == 0:
        return None
    added = format.plain(messages[: replies[0]], tools, True).tokens
    tokens, sampled = list(added), [False] * len(added)
    question_ids = format.plain([_QUESTION], (), True).tokens
    for at, end in zip(replies, [*replies[1:], len(messages)], strict=True):
        try:
            reply = format.plain([_QUESTION, messages[at]], (), False)
        except BadInput:
            return None
        ends = [place for place, own in enumerate(reply.sampled) if own and place >= len(question_ids)]
        if reply.tokens[: len(question_ids)] != question_ids or not ends:
            return None
        reply_ids = reply.tokens[len(question_ids) : ends[-1] + 1]
        if not set(reply_ids) & set(format.stop_ids):
            followed = format.plain([_QUESTION, messages[at], *followers(messages[at])], (), False).tokens
            reply_ids += last_stop(followed, format.stop_ids)
        tokens += reply_ids
        sampled += [True] * len(reply_ids)
        if at + 1 == len(messages) and not generation:
            break
        bridged = format.bridge(added, reply_ids, messages[at + 1 : end], tools)
        if bridged is None:
            return None
        added = bridged[len(added) + len(reply_ids) :]
        tokens += added
        sampled += [False] * len(added)
    return Rendered(tokens=tuple(tokens), sampled=tuple(sampled))
