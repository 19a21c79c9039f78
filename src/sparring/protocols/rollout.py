"""Protocols of a rollout: tasks, boxes, environments, conversations and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sparring.errors import LimitReached
from sparring.generation import Constraint, GenerateRequest, Rendered
from sparring.reply import ReplyRequest, ReplyStream, SessionLayer
from sparring.types import (
    MOST_BYTES,
    BoxSpec,
    EntryKind,
    ExecResult,
    Group,
    Message,
    Observation,
    ReplyPiece,
    Rollout,
    Score,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
)


class TaskSource(Protocol):
    """Stream of tasks: a function of its state and of the order of `next` and `observe`, so that it can be resumed."""

    def next(self) -> Task | None:
        """Return the next task, or None at the end of a finite stream."""

    def observe(self, group: Group) -> None:
        """Take note of a scored group, such as for a curriculum."""

    def state(self) -> Mapping[str, Any]:
        """Return what `restore` needs to go on at the same task."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to where `state` was taken."""


class Sandbox(Protocol):
    """One isolated box.

    Raises:
        SandboxError: the box itself failed; never for what the program inside does.
    """

    async def exec(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float | None = None) -> ExecResult:
        """Run a command to its end, or to the end of its time."""

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run a Python program as the main module."""

    async def fresh(self) -> Sandbox:
        """Open another box of the same spec, in which nothing has run. The caller closes it."""

    async def converse(self, code: str, other: str) -> ExecResult:
        """Run two Python programs, each in a fresh box: what one writes to file descriptor 201 the other reads from
        200. Return the result of `code`, with which the other ends."""

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Read a file. Raises `SpoiltFile`, a `PolicyFailure`, where a command left something else in its place, or
        more bytes."""

    async def entries(self, path: str = ".") -> Mapping[str, EntryKind]:
        """List a folder: what each name in it is, links unfollowed. No program of the box has a part in the answer.
        Raises `SpoiltFile` as `read` does."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a file. Raises `SpoiltFile` as `read` does."""

    async def close(self) -> None:
        """End the box and everything in it."""


class Boxes(Protocol):
    """The pool; nobody else makes a box."""

    async def take(self, spec: BoxSpec) -> Sandbox:
        """Open a box of this spec. Waits where all are taken."""

    async def close(self) -> None:
        """End every box."""


class OpenedEnv(Protocol):
    """An environment for one rollout: opened once, never reset."""

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools that the policy may call."""

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        """Begin the task and return the first observation."""


class SingleEnv(OpenedEnv, Protocol):
    """An environment of one role: `policy`, or the one in its attribute `roles` if it has that."""

    async def step(self, reply: Message) -> Observation:
        """Take a reply and return what the environment says to it."""

    async def score(self, trajectory: Trajectory) -> Score | None:
        """Score a finished trajectory while the environment is still open; None where only the group's scorer can."""

    async def close(self) -> None:
        """End the environment."""


class RolesEnv(OpenedEnv, Protocol):
    """An environment of several roles."""

    roles: tuple[str, ...]

    async def step_of(self, role: str, reply: Message) -> Observation:
        """Take a role's reply and return what the environment says to it."""

    async def score_all(self, trajectories: Mapping[str, Trajectory]) -> Score | None:
        """Score the finished trajectories of the roles that were asked, by role."""

    async def close(self) -> None:
        """End the environment."""


AnyEnv = SingleEnv | RolesEnv


class World(OpenedEnv, Protocol):
    """An environment as a harness sees it, whatever its number of roles. Whoever made it scores and closes it.

    Raises:
        EnvError: the environment's code raised, or answered with what is no observation.
        BadInput: the environment does not name the role.
    """

    @property
    def roles(self) -> tuple[str, ...]:
        """The names of its roles."""

    async def step(self, reply: Message, role: str | None = None, *, of: Message | None = None) -> Observation:
        """Take the reply of a role, which may be left out where there is one. `of` is the policy's reply that it was
        made of, in other words than these; what the world says of it belongs to that one's turn."""


class ToolHost(Protocol):
    """A world's tools, as a program that works in another process calls them."""

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools as they are now."""

    async def call(self, call: ToolCall) -> str:
        """Run a tool and return its answer. Raises `EnvError` where the world breaks, and a `PolicyFailure` where the
        program may not call it."""


Expert = Callable[[Sequence[Message]], Message]
"""A scripted demonstration: the next reply to the messages so far."""


class EnvFactory(Protocol):
    """Maker of environments, with their tasks and their expert.

    `scorer` is the second pass over its groups, None where rewards stand by themselves.
    """

    name: str
    scorer: Scorer | None

    def make(self) -> AnyEnv:
        """Make one environment, not yet opened."""

    def tasks(self, split: str, seed: int) -> TaskSource:
        """Return a deterministic stream: endless for `train`, else finite. No eval prompt occurs in train."""

    def expert(self, task: Task) -> Expert | Mapping[str, Expert] | None:
        """Return the scripted demonstration; one for each role, by name, where there are several; None without one."""

    async def prove(self, boxes: Boxes) -> tuple[int, int]:
        """Score the right answers that rows of a file bring along; return how many have one, of how many. Raises
        `BadInput` for one that is not right."""


class ReplyReader(Protocol):
    """Reader of one reply while it is sampled."""

    def read(self, tokens: Sequence[int]) -> Sequence[ReplyPiece]:
        """Take the next tokens; return the pieces of the reply that no later token can change."""


class Renderer(Protocol):
    """Messages to tokens and back. Where a prompt is given to `bridge` or `parse`, its end behind the reply before is
    enough."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply."""

    @property
    def control_ids(self) -> Mapping[str, int]:
        """Tokens, by text, that the format may write and that no text of a message or a tool becomes."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool = True) -> Rendered:
        """Render a conversation; with `generation`, up to where the next reply begins."""

    def bridge(
        self, prompt: Sequence[int], completion: Sequence[int], new: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[int, ...] | None:
        """Extend prompt + completion by new messages, token for token; None where the format cannot."""

    def parse(self, completion: Sequence[int], tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> Message:
        """Read a reply: its text, reasoning and tool calls."""

    def reader(self, tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> ReplyReader:
        """Open the reader of one reply that is sampled now."""

    def thought_length(self, completion: Sequence[int]) -> int | None:
        """Count the tokens of a reply's thought, up to and including its end; the reply has one. None where the format
        does not tell."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Write tokens as text, special ones included."""

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token of the vocabulary, at most."""

    def bytes_of(self, token: int) -> bytes:
        """Write one token as bytes, which may be a part of a character."""

    def bind(self, request: GenerateRequest) -> GenerateRequest:
        """Say in token ids what the sampling of a request says in text: `ends` for its stop strings, `allowed` for its
        constraint. Raises `BadInput` where one does not compile."""


class Session(Protocol):
    """A recorded conversation of one role: the only writer of segments.

    Attributes:
        max_context: maximum number of ids of a prompt and its reply together.
        max_prompt_bytes: maximum number of bytes of a text of that many ids.
        max_reply: maximum number of ids of one reply.
        rewards: rewards of the rollout from outside; None if the run takes none.
    """

    rewards: Any

    @property
    def max_context(self) -> int:
        """Maximum number of ids of a prompt and its reply together."""

    @property
    def max_prompt_bytes(self) -> int:
        """Maximum number of bytes of a text of `max_context` ids."""

    @property
    def max_reply(self) -> int:
        """Maximum number of ids of one reply."""

    def reply(self, request: ReplyRequest) -> ReplyStream:
        """Sample and record the reply to a conversation; every other way to a reply is a call of this one.

        A consumer that closes the stream ends the sampling, and the reply is recorded as lost. A consumer that is
        cancelled drops the request: nothing of the turn is recorded, and the same request samples the same tokens.

        Raises:
            BadInput: the constraint does not compile, or a stop string is empty; nothing was sampled.
            LimitReached: a limit of the task or the context leaves no token to sample.
            EngineError: the engine failed, or gave up.
            RequestEnded: `abort` ended the reply.
            StoreError: the turn could not be made durable.
        """

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, constraint: Constraint | None = None
    ) -> Message:
        """Return the whole reply to a conversation.

        Args:
            messages: the whole conversation.
            tools: tools that the prompt shows.
            constraint: form of the reply's text, instead of the run's constraint.

        Raises:
            LimitReached: a limit of the task or the context was hit; a reply that it cut short is in the record.
            EngineError: the engine failed.
        """

    def layered(self, layer: SessionLayer) -> AbstractContextManager[None]:
        """Put a layer around all replies while the context lasts."""

    async def abort(self, reply: str) -> None:
        """End a reply that is being sampled, by its id, with what was sampled so far."""

    def deliver(self, reply: str, delivered: bool) -> None:
        """Record whether a client received a reply whole, by its id. The latest call counts; a reply without one was
        delivered, unless the conversation shows otherwise."""

    def overflow(self, limit: LimitReached) -> None:
        """Count a request that was refused unread, because its prompt is too long."""

    def refuse(self, reason: str) -> None:
        """Count a request that was refused before it came here."""

    @property
    def has_turn(self) -> bool:
        """True once a client received a turn of the rollout: a reply that is no title."""

    @property
    def limit(self) -> LimitReached | None:
        """Limit that the latest request hit, of those that were answered or hit one; None if it was answered whole.
        The session ended by it."""

    @property
    def silence(self) -> str:
        """Fate of the requests, in words, if none was answered with a turn."""

    @property
    def last_words(self) -> Message | None:
        """The main agent's last reply without a call; None before the first."""

    def conversation(self, reply: str) -> tuple[Message, ...] | None:
        """Return all messages up to and including a reply, by its id; None if it is no reply of this session."""

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Return the number of ids of a conversation."""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one id, which may be part of a character."""


class Episode(Protocol):
    """One rollout, as its harness sees it. `id` is that of the attempt."""

    id: str
    task: Task
    env: World
    box: Sandbox | None

    def session(self, role: str | None = None) -> Session:
        """Return the conversation of a role, the same one however often it is asked for. Where the environment has one
        role, that may be left out. Raises `BadInput` for a role that the environment does not name."""

    def queue(self) -> AbstractContextManager[object]:
        """Return the context in which the harness waits for whoever plays the rollout: no limit of time holds."""

    def note(self, kind: str, data: Mapping[str, Any]) -> None:
        """Take note of an event for whoever reads the run. It decides nothing."""


class Harness(Protocol):
    """Holds conversations. One harness serves many episodes at once."""

    async def run(self, episode: Episode) -> None:
        """Hold the conversation of one episode, from the environment's opening to its end."""


class Scorer(Protocol):
    """Second pass over a whole group, after Env.score."""

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        """Return a new score for each rollout, in order; `scores` are the environment's."""
