"""Tasks, and the conversations that they lead to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sparring.generation import Constraint

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call the model asked for. `arguments` is None when its JSON did not parse; `raw` is then what it wrote."""

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    raw: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation in our own neutral form."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyPiece:
    """Piece of a reply, shown before the reply is whole. No later token changes it. `text` goes on where the piece of
    its kind before ended; a `call` is whole."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec:
    """A tool as the model sees it. `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one rollout. `max_tokens` counts sampled tokens over all its turns; `timeout_s` is wall clock."""

    max_turns: int = 8
    max_tokens: int = 1024
    max_tool_calls: int = 8
    timeout_s: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxSpec:
    """The box a task needs: image, limits, network. `timeout_s` and `output_bytes` are per command."""

    image: str = "python"
    timeout_s: float = 2.0
    memory_bytes: int = 256 << 20
    disk_bytes: int = 16 << 20
    output_bytes: int = 4096
    processes: int = 16
    network: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One piece of work: which world, how it opens, what scores it.

    `id` is unique in a run and stable between runs. `seed` makes everything random about the task repeatable.
    `tag` names the mixture component (for a reasoning-gym task, the dataset) that reports are split by. `key` is what
    tells the task from others where its prompt does not, as in a game with one prompt and many seeds: tasks of one key
    are the same task, none is trained on where another is held out. Empty: the prompt's text tells it.
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


EntryKind = Literal["file", "folder", "link", "other"]
"""Kinds of what a folder of a box has; other: a pipe, a socket, a device."""

MOST_BYTES = 16 << 20
"""Bytes of a file of a box that are read unless more are asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """Result of a command. `timed_out`, `out_of_memory` and `truncated` are the policy's own limits, not failures."""

    exit_code: int
    stdout: str
    stderr: str
    wall_s: float
    timed_out: bool = False
    out_of_memory: bool = False
    truncated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Observation of the world after a reply. `reward` is what that reply earned of the score's reward, None for
    nothing to say; `state_key` names the state that the next reply is made in, so that turns taken in equal states can
    be compared. `constraint` is what the text of the next reply must be, in the place of the run's."""

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    state_key: str | None = None
    constraint: Constraint | None = None
