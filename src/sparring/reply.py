"""Reply of a session: the message, and all that a client of an API wants to know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparring.errors import LimitReached
from sparring.generation import Constraint, FinishReason
from sparring.protocols import Session
from sparring.types import Label, Message, ToolSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledReply:
    """Reply that was sampled and recorded.

    Attributes:
        id: of the rollout's role and the place of the reply in its record: `rl/12/3#5`.
        message: what was said, and the calls.
        finish_reason: `length` where it was cut short.
        prompt_tokens: number of ids that it was sampled after.
        cached_tokens: number of these whose keys and values were there.
        tokens: the sampled ids.
        logprobs: of each, under what it was drawn from.
        limit: the limit of the rollout or the context that it hit; None where the client's own `max_tokens` cut it, or
            nothing did.
    """

    id: str
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    limit: LimitReached | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Evidence that a client gives of a request beside the conversation. It labels and links turns, and never decides
    whose rollout a request belongs to: the key does.

    Attributes:
        agent: id of the agent or sub-agent that asks; empty where the client gives none.
        parent: id of the agent that started it; empty where the client gives none.
        label: what the request is for, where the client says so.
        handle: id of the reply that the request continues (a response's, a call's, a signature), empty where it has
            none. It decides where equal conversations stand for several replies.
        wishes: fields of the request that have no effect on sampling.
    """

    agent: str = ""
    parent: str = ""
    label: Label | None = None
    handle: str = ""
    wishes: Mapping[str, Any] = field(default_factory=dict)


NO_EVIDENCE = Evidence()
"""Evidence of a client that says nothing of a request beside the conversation."""


class AnsweringSession(Session, Protocol):
    """A session that also returns replies that were cut short."""

    @property
    def max_context(self) -> int:
        """Most ids that a prompt and its reply may have together."""

    @property
    def max_reply(self) -> int:
        """Most ids of one reply."""

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        constraint: Constraint | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        evidence: Evidence = NO_EVIDENCE,
    ) -> SampledReply:
        """Sample and record the reply to a conversation.

        Args:
            messages: the whole conversation; the last one is no reply.
            tools: what may be called.
            constraint: what the reply's text must be, in the place of the run's.
            max_tokens: most tokens of this reply that the client wants.
            stop: strings that end this reply, beside those of the run.
            evidence: what the client says of the request beside the conversation.
        """

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Return the number of ids of a conversation."""

    def decode(self, token: int) -> str:
        """Return the text of one id."""
