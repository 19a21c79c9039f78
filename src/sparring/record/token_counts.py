"""Token counts of sessions of text, for the policy that will imitate them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparring.errors import BadInput, LimitReached
from sparring.protocols import Renderer
from sparring.record.request import check_far, check_length
from sparring.record.text_tree import TextTurn
from sparring.types import Message, ToolSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Imitator:
    """Policy that will imitate replies of text.

    Attributes:
        reply_ids: function from a reply and the tools to its ids, as the policy would sample them; raises BadInput if
            the policy's format cannot express the reply.
        max_context: maximum number of ids of a prompt and its reply.
    """

    renderer: Renderer
    reply_ids: Callable[[Message, Sequence[ToolSpec]], tuple[int, ...]]
    max_context: int
    max_reply: int


class CountedPrompt(NamedTuple):
    """Prompt with its number of ids, and the ids that follow the earlier reply [T]."""

    length: int = 0
    added: tuple[int, ...] = ()


class CountedReply(NamedTuple):
    """Reply with the number of ids up to its end, the ids of its prompt as in `CountedPrompt` [T], and its own ids
    [T]."""

    length: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


class ImitatedIds:
    """Ids of a session of text for its imitator. The ids are built incrementally, as in a recorded session: a prompt
    that begins a branch is rendered whole; any other prompt bridges the reply that it continues. So a late turn takes
    as long as an early one."""

    def __init__(self, name: str, imitator: Imitator) -> None:
        self._name, self._imitator = name, imitator
        self._replies: dict[int, CountedReply] = {}

    def prompt(self, turn: TextTurn) -> CountedPrompt:
        """Count the ids of a turn's prompt. Raises LimitReached if the prompt leaves no room for a reply."""
        renderer, room = self._imitator.renderer, self._imitator.max_context
        check_far(self._name, turn.messages, renderer, room)
        before = None if turn.parent is None else self._replies.get(turn.parent)
        bridged = None
        if before is not None:
            bridged = renderer.bridge(before.prompt, before.tokens, turn.messages[turn.before :], turn.tools)
        if before is None or bridged is None:
            added = renderer.render(turn.messages, turn.tools).tokens
            length = len(added)
        else:
            added = bridged[len(before.prompt) + len(before.tokens) :]
            length = before.length + len(added)
        check_length(self._name, length, room)
        return CountedPrompt(length, added)

    def reply(self, turn: TextTurn, prompt: CountedPrompt, reply: Message) -> tuple[int, ...]:
        """Return the ids of a reply [T]; empty if the policy's format cannot express it. Raises LimitReached if the
        context has no room for the reply."""
        try:
            tokens = self._imitator.reply_ids(reply, turn.tools)
        except BadInput:
            return ()
        length, room = prompt.length + len(tokens), self._imitator.max_context
        if length > room:
            text = f"{self._name}: a prompt of {prompt.length} tokens and a reply of {len(tokens)}, room for {room}"
            raise LimitReached("context_length", text, (length, room))
        return tokens

    def add(self, index: int, prompt: CountedPrompt, tokens: tuple[int, ...]) -> None:
        """Keep the ids of a reply for the next turn. `index`: index of the reply's segment. After a reply without ids,
        the next prompt is rendered whole."""
        if tokens:
            self._replies[index] = CountedReply(prompt.length + len(tokens), prompt.added, tokens)
