"""Protocols of a rollout: tasks, environments, conversations and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sparring.errors import LimitReached
from sparring.generation import Constraint, GenerateRequest, Rendered
from sparring.protocols.boxes import Boxes, Sandbox
from sparring.reply import ReplyRequest, ReplyStream, SessionLayer
from sparring.types import (
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
    """Stream of tasks that can be resumed: its output depends only on its state and on the order of calls of `next` and
    `observe`."""

    def next(self) -> Task | None:
        """Return the next task, or None at the end of a finite stream."""

    def observe(self, group: Group) -> None:
        """Update the source with a scored group, for example in a curriculum."""

    def state(self) -> Mapping[str, Any]:
        """Return the state with which `restore` continues at the same task."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""


class OpenedEnv(Protocol):
    """Environment of one rollout: opened once, never reset."""

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """Tools that the policy may call."""

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        """Begin the task and return the first observation."""


class SingleEnv(OpenedEnv, Protocol):
    """Environment of one role: `policy`, or the single name in its attribute `roles`."""

    async def step(self, reply: Message) -> Observation:
        """Process a reply and return the environment's answer."""

    async def score(self, trajectory: Trajectory) -> Score | None:
        """Score a finished trajectory while the environment is still open; None leaves it to the group's scorer."""

    async def close(self) -> None:
        """End the environment."""


class RolesEnv(OpenedEnv, Protocol):
    """Environment of several roles."""

    roles: tuple[str, ...]

    async def step_of(self, role: str, reply: Message) -> Observation:
        """Process a role's reply and return the environment's answer."""

    async def score_all(self, trajectories: Mapping[str, Trajectory]) -> Score | None:
        """Score the finished trajectories of all roles that got a request, given by role."""

    async def close(self) -> None:
        """End the environment."""


AnyEnv = SingleEnv | RolesEnv


class World(OpenedEnv, Protocol):
    """Environment as a harness sees it, with any number of roles. The caller of the harness scores and closes it.

    Raises:
        EnvError: the environment's code raised, or did not return an observation.
        BadInput: the environment has no such role.
    """

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of its roles."""

    async def step(self, reply: Message, role: str | None = None, *, of: Message | None = None) -> Observation:
        """Process a role's reply, in the form that the world gets, and return the environment's answer. `role` may be
        omitted if there is only one.

        Args:
            of: policy's reply that `reply` was made from, if they differ; the observation belongs to its turn.
        """


class ToolHost(Protocol):
    """Tools of a world, for programs in another process."""

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """Current tools."""

    async def call(self, call: ToolCall) -> str:
        """Run a tool and return its answer.

        Raises:
            EnvError: the world failed.
            PolicyFailure: the program may not make this call.
        """


Expert = Callable[[Sequence[Message]], Message]
"""Scripted demonstration: messages so far -> next reply."""


class EnvFactory(Protocol):
    """Maker of environments, with their tasks and their expert.

    Attributes:
        scorer: second scoring pass, over whole groups; None if rewards are final.
    """

    name: str
    scorer: Scorer | None

    def make(self) -> AnyEnv:
        """Make an environment, not yet opened."""

    def tasks(self, split: str, seed: int) -> TaskSource:
        """Return a deterministic stream of tasks: endless for `train`, else finite. No prompt of another split occurs
        in train."""

    def expert(self, task: Task) -> Expert | Mapping[str, Expert] | None:
        """Return the scripted demonstration of a task, by role if there are several roles, or None."""

    async def prove(self, boxes: Boxes) -> tuple[int, int]:
        """Score the reference answers in tasks from a file, and return the number of tasks with an answer and of all
        tasks.

        Raises:
            BadInput: a reference answer is scored as wrong.
        """


class ReplyReader(Protocol):
    """Incremental reader of a reply while it is sampled."""

    def read(self, tokens: Sequence[int]) -> Sequence[ReplyPiece]:
        """Process the next tokens, and return the pieces of the reply that no later token can change."""


class Renderer(Protocol):
    """Conversion between messages and tokens. `bridge` and `parse` may be given only the end of a prompt, after the
    previous reply."""

    @property
    def name(self) -> str:
        """Name of the format, for error messages and for rules that hold for one format."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply."""

    @property
    def control_ids(self) -> Mapping[str, int]:
        """Special tokens of the format by their text. Text of messages and tools is never encoded as a special
        token."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool = True) -> Rendered:
        """Render a conversation; with `generation`, up to the position where the next reply begins."""

    def bridge(
        self, prompt: Sequence[int], completion: Sequence[int], new: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[int, ...] | None:
        """Extend prompt + completion by new messages without changing their tokens; None if the format cannot."""

    def parse(self, completion: Sequence[int], tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> Message:
        """Parse a reply into text, reasoning and tool calls."""

    def reader(self, tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> ReplyReader:
        """Return a reader for one reply, which is about to be sampled."""

    def thought_length(self, completion: Sequence[int]) -> int | None:
        """Count the tokens of a reply's reasoning, including its end marker; None if the format has no marker."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, including special tokens."""

    @property
    def longest_token(self) -> int:
        """Upper bound on the bytes of one token of the vocabulary."""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one token, which may be part of a character."""

    def bind(self, request: GenerateRequest) -> GenerateRequest:
        """Translate the text settings of a request's sampling to token ids: stop strings to `ends`, the constraint to
        `allowed`.

        Raises:
            BadInput: a constraint does not compile.
        """


class Session(Protocol):
    """A recorded conversation of one role: the only writer of segments.

    Attributes:
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
        """Sample and record the reply to a conversation; all other methods that return a reply call this method.

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
        """Return the whole reply to `messages`, the whole conversation.

        Args:
            tools: tools that the prompt shows.
            constraint: form of the reply's text, instead of the run's constraint.

        Raises:
            LimitReached: a limit of the task or the context was hit; a truncated reply is recorded.
            EngineError: the engine failed.
        """

    def layered(self, layer: SessionLayer) -> AbstractContextManager[None]:
        """Put a layer around all replies while the context lasts."""

    async def abort(self, reply: str) -> None:
        """End a reply that is being sampled, given its id; the tokens sampled so far are the reply."""

    def deliver(self, reply: str, delivered: bool | None) -> None:
        """Record whether a client received the whole reply with this id. The latest True or False counts; None
        (unknown) undoes only True. Unreported replies were delivered, unless the conversation shows otherwise."""

    def overflow(self, limit: LimitReached) -> None:
        """Count a request that was refused unread, because its prompt is too long."""

    def refuse(self, reason: str) -> None:
        """Count a request that was refused before it reached the session."""

    @property
    def has_turn(self) -> bool:
        """True once a client received a turn of the rollout. Auxiliary replies, such as a title, are not turns."""

    @property
    def limit(self) -> LimitReached | None:
        """Limit that ended the session: the limit that the latest request hit; None if that request was answered
        completely. Refused requests do not count."""

    @property
    def silence(self) -> str:
        """Description of what happened to the requests, for a session in which none was answered with a turn."""

    @property
    def last_words(self) -> Message | None:
        """The main agent's last reply without a tool call; None before the first such reply."""

    def conversation(self, reply: str) -> tuple[Message, ...] | None:
        """Return all messages up to and including a reply, by its id; None if it is no reply of this session."""

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Return the number of ids of a conversation."""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one id, which may be part of a character."""


class Episode(Protocol):
    """One rollout, as its harness sees it. `id` is the id of the attempt."""

    id: str
    task: Task
    env: World
    box: Sandbox | None

    def session(self, role: str | None = None) -> Session:
        """Return the conversation of a role, the same object at each call. The role may be omitted if there is only
        one.

        Raises:
            BadInput: the environment has no such role.
        """

    def queue(self) -> AbstractContextManager[object]:
        """Return the context in which the harness waits for a player of the rollout; time limits are suspended in
        it."""

    def note(self, kind: str, data: Mapping[str, Any]) -> None:
        """Record an event for readers of the run. It has no other effect."""


class Harness(Protocol):
    """Program that holds conversations. One harness serves many episodes concurrently."""

    async def run(self, episode: Episode) -> None:
        """Hold the conversation of one episode, from opening the environment to its end."""


class Scorer(Protocol):
    """Second pass over a whole group, after the environment's score."""

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        """Return a new score for each rollout, in order, given the environment's `scores`."""
