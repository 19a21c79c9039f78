"""The verbs of the path: one Protocol per part. Parts meet only here and in `types`.

Whoever implements a protocol passes its contract suite in `tests/contract`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from sparring.generation import Completion, Constraint, Delta, GenerateRequest, Rendered, ScoreRequest, Scores
from sparring.log import LogEntry, LogKind
from sparring.types import (
    Batch,
    BoxSpec,
    CheckpointRef,
    ExecResult,
    Group,
    Message,
    Observation,
    Rollout,
    Sample,
    Score,
    Segment,
    StepResult,
    Task,
    ToolSpec,
    Trajectory,
    WeightRef,
)

if TYPE_CHECKING:
    import torch


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

    async def read(self, path: str) -> bytes:
        """Read a file. Raises `SpoiltFile`, a `PolicyFailure`, where a command left something else in its place."""

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

    async def step(self, reply: Message, role: str | None = None) -> Observation:
        """Take the reply of a role, which may be left out where there is one."""


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

    def decode(self, tokens: Sequence[int]) -> str:
        """Write tokens as text, special ones included."""

    def bind(self, request: GenerateRequest) -> GenerateRequest:
        """Say in token ids what the sampling of a request says in text: `ends` for its stop strings, `allowed` for its
        constraint. Raises `BadInput` where one does not compile."""


class Session(Protocol):
    """A recorded conversation of one role: the only writer of segments. A `constraint` holds for the one reply, in the
    place of the run's.

    Raises:
        LimitReached: a limit of the task was hit; the record up to there is kept.
        EngineError: the engine failed.
    """

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, constraint: Constraint | None = None
    ) -> Message:
        """Sample the reply to a conversation and record it."""


class Episode(Protocol):
    """One rollout, as its harness sees it."""

    task: Task
    env: World
    box: Sandbox | None

    def session(self, role: str | None = None) -> Session:
        """Return the conversation of a role, the same one however often it is asked for. Where the environment has one
        role, that may be left out. Raises `BadInput` for a role that the environment does not name."""


class Harness(Protocol):
    """Holds conversations. One harness serves many episodes at once."""

    async def run(self, episode: Episode) -> None:
        """Hold the conversation of one episode, from the environment's opening to its end."""


class Scorer(Protocol):
    """Second pass over a whole group, after Env.score."""

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        """Return a new score for each rollout, in order; `scores` are the environment's."""


class ValueModel(Protocol):
    """A served model with a scalar head."""

    async def values(self, texts: Sequence[Sequence[int]]) -> Sequence[float]:
        """Return the value behind the last token of each text, given as token ids."""

    async def close(self) -> None:
        """End its thread."""


class Annotator(Protocol):
    """Adds per-token values (reference, teacher, value) to flattened samples."""

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the same samples, in order, with more annotations."""


class Credit(Protocol):
    """Turns scores into advantages, over all groups of one update."""

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> Sequence[Sequence[Sample]]:
        """Set advantages and weights. `samples[i]` are the branches of `groups[i]`; return them per group, an empty
        sequence where the group leaves the update (zero variance)."""

    def denominator(self, rows: Iterable[Sample]) -> float | None:
        """Return the denominator of the policy term over some of these rows; None for the sum of their weights."""

    def state(self) -> Mapping[str, Any]:
        """Return what it remembers of earlier updates."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned before the run was stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """Divergence of the model's distribution q from a teacher's p. `reverse` is KL(q || p), `forward` KL(p
    || q); `jensen_shannon` is beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q. `top_k`: over the
    teacher's likeliest tokens (`Sample.tops`), all others being one; `vocabulary`: over all tokens, the teacher
    (`Sample.teacher`) computed beside the model."""

    kind: Literal["reverse", "forward", "jensen_shannon"] = "reverse"
    over: Literal["top_k", "vocabulary"] = "vocabulary"
    beta: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Needs of a loss. A declared unit is never split across micro-batches. `survey` costs a
    gradient-free first pass, in which the loss is asked for `survey(quantities, micro_batch)`, of all the step's tokens
    at once: name -> [M] of what it then finds as annotations. `idle_tokens`: the policy's tokens of zero advantage
    matter too; else they are not computed. `divergence` is what the quantity of that name is."""

    quantities: frozenset[str] = frozenset({"logprob"})
    unit: str = "token"
    survey: bool = False
    idle_tokens: bool = False
    divergence: Divergence | None = None


@dataclass(kw_only=True, slots=True)
class LossResult:
    """`loss` is a scalar to call backward on, already divided by the global denominators; `metrics` map a name to
    (sum, count) so that micro-batches add up."""

    loss: torch.Tensor
    metrics: dict[str, tuple[float, float]]


class Loss(Protocol):
    """One loss term."""

    term: str
    needs: Needs

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term. `quantities` maps each needed name to a tensor [N] of the micro-batch's weighted tokens."""


class Trainer(Protocol):
    """Trains one model. It knows loss terms, not algorithms."""

    @property
    def version(self) -> int:
        """Updates that its weights have had."""

    async def forward(self, rows: Sequence[Sample], needs: Set[str]) -> Sequence[Mapping[str, tuple[float, ...]]]:
        """Compute quantities of the tokens that some term weighs, without gradients: per row, one value per token."""

    async def score(self, teacher: str, request: ScoreRequest) -> Scores:
        """Score given tokens under one of the teachers that the trainer holds, as an engine of it would."""

    async def forward_backward(self, batch: Batch) -> Mapping[str, float]:
        """Add the gradients of a batch and return its metrics."""

    async def step(self, *, ends_update: bool = True) -> StepResult:
        """Apply the gradients, once per batch. The version counts up where the step ends its update."""

    async def push(self) -> WeightRef:
        """Publish a copy of the weights."""

    async def save(self, path: str, *, stage: str, metrics: Mapping[str, float]) -> CheckpointRef:
        """Write a checkpoint from which training goes on to the same bits."""

    async def restore(self, ref: CheckpointRef) -> None:
        """Go back to a checkpoint."""


@runtime_checkable
class Engine(Protocol):
    """Serves one model: token ids in, token ids out. Cancelling the awaiting task drops its request."""

    @property
    def version(self) -> int:
        """The weight version that is served."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Counts since the start and levels of now; empty where the engine reports none."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample a completion."""

    def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Sample in pieces: deltas while tokens are made, then the `Completion`. Leaving the iterator drops the
        request."""

    async def abort(self, request: str) -> None:
        """End a request with what was sampled so far (finish reason "abort"). A request for its tokens followed by
        those, with the same seed, continues it."""

    async def score(self, request: ScoreRequest) -> Scores:
        """Score given tokens instead of sampling new ones."""

    async def fork(self, request: str, seeds: Mapping[str, int]) -> tuple[GenerateRequest, ...]:
        """Return requests, one per name in `seeds`, that continue a running one from where it is. Its KV is kept for
        them until their conversations are released."""

    async def release(self, conversation: str) -> None:
        """Give up the KV that is kept for a conversation."""

    async def pull(self, ref: WeightRef) -> None:
        """Serve published weights (law 9). Raises `WeightsError` and serves the old ones where they fail."""

    async def close(self) -> None:
        """Fail what is under way and end."""


class Store(Protocol):
    """Durable record of a run. Every method is atomic: after a crash it happened or it did not."""

    def append_turns(self, turns: Sequence[tuple[str, Sequence[Segment]]], entries: Sequence[LogEntry] = ()) -> None:
        """Record turns, each with the id of its trajectory, while their rollouts go on, and entries of the log."""

    def turns(self, rollout: str) -> list[Segment]:
        """Return the recorded segments of a trajectory whose group has not been appended."""

    def trajectories(self, rollout: str) -> list[str]:
        """Return the ids of trajectories that have turns: a rollout's own, and those that begin with it and a slash."""

    def record(self, *entries: LogEntry) -> None:
        """Record entries of the log, in this order."""

    def entries(
        self, stage: str, *, after: int = 0, kinds: Collection[LogKind] | None = None, name: str | None = None
    ) -> Iterator[tuple[int, LogEntry]]:
        """Yield the entries of a stage, in the order they were recorded, each with its row: those behind row `after`,
        of these kinds and about this id."""

    def append(self, *groups: Group, stage: str) -> None:
        """Record scored groups."""

    def forget(self, rollout: str) -> int:
        """Drop the turns and entries of an unfinished rollout, which starts over; return how many there were."""

    def groups(self, *, stage: str | None = None, first: int = 0, end: int | None = None) -> Iterable[Group]:
        """Yield the recorded groups in admission order: of all stages, or of one those from `first` to before `end`."""

    def load(self, rollout: str) -> Rollout:
        """Return a recorded rollout. Raises `BadInput` where there is none."""

    def metric(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def metrics(self, stage: str, *, after: int = -1) -> list[tuple[int, dict[str, float]]]:
        """Return the recorded metrics of a stage, by step, those above `after`."""

    def put(self, key: str, value: Any) -> None:
        """Record plain data under a key, in the place of what was there."""

    def get(self, key: str) -> Any | None:
        """Return what is recorded under a key, or None."""

    def checkpoint(self, ref: CheckpointRef, state: Mapping[str, Any]) -> None:
        """Record that a checkpoint is complete, and the state that a resume needs beside it."""

    def last_checkpoint(self, stage: str) -> tuple[CheckpointRef, Mapping[str, Any]] | None:
        """Return the newest checkpoint of a stage and its state, or None."""

    def checkpoints(self, stage: str) -> Sequence[CheckpointRef]:
        """Return all checkpoints of a stage, oldest first."""

    def retire(self, stage: str, steps: Collection[int]) -> None:
        """Stop counting checkpoints of a stage whose folders were deleted."""

    def truncate(self, stage: str, step: int, *, first_group: int | None = None) -> None:
        """Forget the metrics and checkpoints of a stage after `step`; its groups from `first_group` on, with the turns
        and the log of them and of later steps, if that is given."""

    def supersede(self, stage: str, number: int) -> None:
        """Stop counting a group that is rolled out again; it stays in the record."""

    def close(self) -> None:
        """Write what is waiting, and close the files."""


class Cluster(Protocol):
    """Placement of the parts of a run in processes. A stage asks for parts and never builds them.

    `path` is a Hugging Face checkpoint folder. A trainer and an engine of one name start from equal weights at version
    0 and never share storage (law 9).
    """

    def trainer(self, name: str, *, path: str, plan: TrainPlan) -> Trainer:
        """Open a trainer of model `name`."""

    def engine(self, name: str, *, path: str) -> Engine:
        """Open an engine of model `name`."""

    def value_model(self, name: str, *, path: str) -> ValueModel:
        """Open a model with a scalar head, in the numerics of model `name`; one, however often it is asked for."""

    async def close(self) -> None:
        """End every part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """Plan of a stage for its trainer: its loss terms, how many steps the schedule spans, the keys of `[train]` that
    this stage replaces, and the head it trains (as `model.load` has it). `teachers`, the checkpoint folders of models
    by name, are computed beside it, without gradients; None is where what is trained begins, and a name that is no
    model of the recipe has the settings of that one. `averages` says with which decay some of these follow what is
    trained (see `train.average`). `role` names its batches and checkpoints where the model's name does not."""

    losses: Sequence[Loss]
    total_steps: int
    overrides: Mapping[str, Any]
    head: str = "tokens"
    teachers: Mapping[str, str | None] = field(default_factory=dict)
    averages: Mapping[str, float] = field(default_factory=dict)
    role: str = ""
