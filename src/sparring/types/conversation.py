"""Tasks, and the messages and results that conversations about them consist of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sparring.generation import Constraint

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
    """Limits of one rollout. `max_tokens` counts the sampled tokens of all its turns; `timeout_s` is wall-clock
    time."""

    max_turns: int = 8
    max_tokens: int = 1024
    max_tool_calls: int = 8
    timeout_s: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxSpec:
    """Box that a task needs: image, user, limits, network. `timeout_s` and `output_bytes` are per command."""

    image: str = "python"
    user: int = 1000
    timeout_s: float = 2.0
    memory_bytes: int = 256 << 20
    disk_bytes: int = 16 << 20
    output_bytes: int = 4096
    processes: int = 16
    network: bool = False


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


EntryKind = Literal["file", "folder", "link", "other"]
"""Kinds of entries in a box's folder; other: a pipe, a socket, a device."""

MOST_BYTES = 16 << 20
"""Default limit on the bytes read from a box's file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeEntry:
    """File, folder or link of a tree, by its path in it.

    Attributes:
        kind: what it is; the bytes of what is neither (a pipe, a socket) are not carried.
        data: content of a file.
        executable: whether its owner may run it.
        target: where a link leads.
    """

    kind: EntryKind = "file"
    data: bytes = b""
    executable: bool = False
    target: str = ""


CommandEnd = Literal["exited", "signalled", "timed out", "out of memory", "out of disk", "killed", "lost", "running"]
"""How a command ended. Out of disk: it failed while nothing more could be written; killed: by its caller, or with what
holds it together; lost: its box ended; running: it has not ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """Result of a command. Limits are the policy's command's doing, not failures.

    Attributes:
        exit_code: the command's status; 128 + n after signal n; 137 if the box ended it; -1 while it runs.
        stdout: standard output, of which a long one keeps head and tail, with a line between that counts what is
            missing.
        stderr: standard error, likewise.
        wall_s: seconds from its start to its end.
        timed_out: whether `end` is "timed out".
        out_of_memory: whether `end` is "out of memory".
        truncated: whether bytes are missing.
        end: how the command ended, by what the box saw.
        missing_bytes: number of bytes that are missing from both streams.
    """

    exit_code: int
    stdout: str
    stderr: str
    wall_s: float
    timed_out: bool = False
    out_of_memory: bool = False
    truncated: bool = False
    end: CommandEnd = "exited"
    missing_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """World's answer to a reply.

    Attributes:
        reward: part of the score's reward that the reply earned; None if the world assigns none.
        state_key: name of the state in which the next reply is made; turns taken in equal states can be compared.
        constraint: constraint on the text of the next reply, which replaces the run's.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    state_key: str | None = None
    constraint: Constraint | None = None
