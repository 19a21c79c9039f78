"""Sessions of text as the policy has them that is to imitate them: how many ids their prompts are."""

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
    """The policy that is to imitate what is said in text.

    Attributes:
        renderer: messages <-> ids.
        reply_ids: returns the ids of a reply, with these tools, as the policy would sample it; raises BadInput where
            its format cannot say it.
        max_context: most ids that a prompt and its reply may have together.
        max_reply: most ids of one reply.
    """

    renderer: Renderer
    reply_ids: Callable[[Message, Sequence[ToolSpec]], tuple[int, ...]]
    max_context: int
    max_reply: int


class CountedPrompt(NamedTuple):
    """A prompt: the number of its ids, and those that it adds to the reply that it continues [T]."""

    length: int = 0
    added: tuple[int, ...] = ()


class CountedReply(NamedTuple):
    """A reply: the number of ids up to its last, those of the prompt as in `CountedPrompt`, and its own [T]."""

    length: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


class ImitatedIds:
    """Ids that a session of text has for its imitator, built as a recorded session builds them and as demonstrations
    are rendered: a prompt that begins a branch is rendered whole, any other bridges the reply that it continues. So a
    late turn takes the time of an early one.

    Args:
        name: of the session.
        imitator: has the ids.
    """

    def __init__(self, name: str, imitator: Imitator) -> None:
        self._name, self._imitator = name, imitator
        self._replies: dict[int, CountedReply] = {}

    def prompt(self, turn: TextTurn) -> CountedPrompt:
        """Count the ids of a turn's prompt.

        Raises:
            LimitReached: they leave no room for a reply.
            BadInput: the format refuses the conversation.
        """
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
        """Return the ids of a reply [T]; none where the format cannot say it.

        Args:
            turn: that it answers.
            prompt: of the turn.
            reply: what was said.

        Raises:
            LimitReached: the prompt leaves no room for it.
        """
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
        """Take note of the ids of a reply, by the index of its segment. What continues one that has none is rendered
        whole."""
        if tokens:
            self._replies[index] = CountedReply(prompt.length + len(tokens), prompt.added, tokens)
