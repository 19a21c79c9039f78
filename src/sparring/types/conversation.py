"""Tasks, and the messages and results that conversations about them consist of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sparring.generation import Constraint
from sparring.types.boxes import LEAST_S, BoxSpec, check_count, check_seconds

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """Tool call of a model. `arguments` is None for JSON that did not parse; `raw` is then its text."""

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    raw: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Message of a conversation, in a form neutral between vendors."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyPiece:
    """Part of a reply, streamed before the reply is complete. No later token changes it.

    Attributes:
        text: text that follows the previous piece of the same kind.
        call: complete tool call.
    """

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec:
    """Tool in the form that the model sees. `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """`[env.limits]`: limits of one rollout.

    Raises:
        BadInput: a limit that no rollout can have.
    """

    max_turns: int = 8
    """Maximum number of assistant messages."""

    max_tokens: int = 1024
    """Maximum number of sampled tokens over all turns."""

    max_tool_calls: int = 8
    """Maximum number of tool calls over all turns."""

    timeout_s: float = 120.0
    """Maximum wall-clock time of the rollout, in seconds."""

    def __post_init__(self) -> None:
        for name, least in (("max_turns", 1), ("max_tokens", 1), ("max_tool_calls", 0)):
            check_count(f"limits.{name}", getattr(self, name), least)
        check_seconds("limits.timeout_s", self.timeout_s, LEAST_S, math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Problem for an agent: its environment, first messages, data for the reward, limits and seed.

    Attributes:
        id: unique within a run and equal in all runs.
        seed: seed of everything random about the task.
        tag: component of a mixture (for a reasoning-gym task, the dataset), by which reports are split.
        key: deduplication key for tasks with identical prompts, such as a game with many seeds. Tasks with one key are
            the same task, which is never both trained and held out. Empty: the prompt's text is the key.
    """

    id: str
    env: str
    messages: tuple[Message, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = Limits()
    box: BoxSpec | None = None
    seed: int = 0
    tag: str = ""
    key: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """World's answer to a reply.

    Attributes:
        reward: part of the score's reward that the reply earned; None if the world assigns none.
        state_key: name of the state in which the next reply is made; turns taken in equal states can be compared.
        constraint: constraint on the text of the next reply, which replaces the run's.
        role: role that replies next, in a world of several roles that the harness `chat` plays.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    state_key: str | None = None
    constraint: Constraint | None = None
    role: str | None = None
