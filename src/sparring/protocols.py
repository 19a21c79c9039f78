"""The verbs of the path: one Protocol per part. Parts meet only here and in `types`.

Whoever implements a protocol passes its contract suite in `tests/contract`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from sparring.generation import Completion, Constraint, Delta, GenerateRequest, ScoreRequest, Scores
from sparring.types import (
    Batch,
    BoxSpec,
    CheckpointRef,
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
    """A stream of tasks that can be resumed at the exact task. `next` returns None at the end of a finite stream."""

    def next(self) -> Task | None: ...
    def observe(self, group: Group) -> None: ...
    def state(self) -> Mapping[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """What a command did. `timed_out`, `out_of_memory` and `truncated` are the policy's own limits, not failures."""

    exit_code: int
    stdout: str
    stderr: str
    wall_s: float
    timed_out: bool = False
    out_of_memory: bool = False
    truncated: bool = False


class Sandbox(Protocol):
    """One isolated box. Raises `SandboxError` when the box itself fails, never for what the program inside does. `read`
    and `write` raise `SpoiltFile`, a `PolicyFailure`, for what a command has left in their way. `fresh` is another box
    of the same spec, in which nothing has run; the caller closes it. `converse` runs two programs as `python` does,
    each in a fresh box of its own: what one writes to file descriptor 201 the other reads from 200. It answers for the
    first, with which the other ends.
    """

    async def exec(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float | None = None) -> ExecResult: ...
    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult: ...
    async def fresh(self) -> Sandbox: ...
    async def converse(self, code: str, other: str) -> ExecResult: ...
    async def read(self, path: str) -> bytes: ...
    async def write(self, path: str, data: bytes) -> None: ...
    async def close(self) -> None: ...


class Boxes(Protocol):
    """The pool; nobody else makes a box."""

    async def take(self, spec: BoxSpec) -> Sandbox: ...
    async def close(self) -> None: ...


class Env(Protocol):
    """One world for one rollout: opened once, never reset. It has one role: `policy`, or the one in its attribute
    `roles` if it has that."""

    @property
    def tools(self) -> tuple[ToolSpec, ...]: ...
    async def open(self, task: Task, box: Sandbox | None) -> Observation: ...
    async def step(self, reply: Message) -> Observation: ...
    async def score(self, trajectory: Trajectory) -> Score | None: ...
    async def close(self) -> None: ...


class RolesEnv(Protocol):
    """A world of several roles, for one rollout. `step_of` answers what a role said; `score_all` is given the
    trajectories of the roles that were asked, by role."""

    roles: tuple[str, ...]

    @property
    def tools(self) -> tuple[ToolSpec, ...]: ...
    async def open(self, task: Task, box: Sandbox | None) -> Observation: ...
    async def step_of(self, role: str, reply: Message) -> Observation: ...
    async def score_all(self, trajectories: Mapping[str, Trajectory]) -> Score | None: ...
    async def close(self) -> None: ...


AnyEnv = Env | RolesEnv


class World(Protocol):
    """A world as a harness sees it, whatever its number of roles. `step` is told who speaks; where a world has one
    role, that may be left out. Whoever made the world scores and closes it.

    Raises:
        EnvError: the world's code raised, or answered with what is no observation.
        BadInput: the world does not name the role.
    """

    @property
    def roles(self) -> tuple[str, ...]: ...
    @property
    def tools(self) -> tuple[ToolSpec, ...]: ...
    async def open(self, task: Task, box: Sandbox | None) -> Observation: ...
    async def step(self, reply: Message, role: str | None = None) -> Observation: ...


Expert = Callable[[Sequence[Message]], Message]
"""A scripted demonstration: the next reply to the messages so far."""


class EnvFactory(Protocol):
    """What stands beside a world: its tasks, its expert, and how one instance is made.

    `tasks(split, seed)` is an endless (train) or finite (eval) deterministic stream; no eval prompt occurs in train.
    `expert(task)` is the scripted demonstration as replies, each a function of the messages so far; such a function for
    each role, by name, where there are several; None where a world has no expert. `scorer` is the second pass over its
    groups, None where rewards stand by themselves. `prove` scores the right answers that rows of a file have
    themselves: how many have one, of how many; BadInput for one that is not right.
    """

    name: str
    scorer: Scorer | None

    def make(self) -> AnyEnv: ...
    def tasks(self, split: str, seed: int) -> TaskSource: ...
    def expert(self, task: Task) -> Expert | Mapping[str, Expert] | None: ...
    async def prove(self, boxes: Boxes) -> tuple[int, int]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """Tokens with, for each, whether the model would have sampled it (assistant body and its end token)."""

    tokens: tuple[int, ...]
    sampled: tuple[bool, ...]


class Renderer(Protocol):
    """Messages <-> tokens. `bridge` extends prompt + completion byte for byte or returns None; of the prompt, and for
    `parse`, it may be given the end alone, beginning behind the reply before. `bind` says in ids what a request's
    sampling says in text: `ends` of its stop strings, `allowed` of its constraint; BadInput where one does not compile.
    `control_ids` are the tokens, text -> id, that the format may write and that no text of a message or a tool becomes.
    """

    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    @property
    def control_ids(self) -> Mapping[str, int]: ...
    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool = True
    ) -> Rendered: ...
    def bridge(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> tuple[int, ...] | None: ...
    def parse(self, completion: Sequence[int], tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> Message: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def bind(self, request: GenerateRequest) -> GenerateRequest: ...


class Session(Protocol):
    """A recorded conversation of one role: the only writer of segments. A `constraint` holds for the one reply, in the
    place of the run's.

    Raises:
        LimitReached: a limit of the task was hit; the record up to there is kept.
        EngineError: the engine failed.
    """

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, constraint: Constraint | None = None
    ) -> Message: ...


class Episode(Protocol):
    """One rollout as its harness sees it. `session(role)` is the conversation of a role, the same one however often it
    is asked for; where the world has one role, that may be left out.

    Raises:
        BadInput: the world does not name the role.
    """

    task: Task
    env: World
    box: Sandbox | None

    def session(self, role: str | None = None) -> Session: ...


class Harness(Protocol):
    """A holder of conversations: `run` plays one episode from the world's opening to its end. One harness serves many
    episodes at once."""

    async def run(self, episode: Episode) -> None: ...


class Scorer(Protocol):
    """Second pass over a whole group, after Env.score."""

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]: ...


class Worth(Protocol):
    """A model with a scalar head, served: what texts, as token ids, are worth."""

    async def worth(self, texts: Sequence[Sequence[int]]) -> Sequence[float]: ...
    async def close(self) -> None: ...


class Annotator(Protocol):
    """Adds per-token values (reference, teacher, value) to flattened samples."""

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]: ...


class Credit(Protocol):
    """Turns scores into advantages, over all groups of one update.

    `samples[i]` are the branches of groups[i]. `credit` returns, per group, its samples with advantages and weights
    set; an empty sequence where the group leaves the update (zero variance). `denominator` is what the policy term over
    some of these rows is divided by; None: by the sum of its weights. `state` is what it remembers of earlier updates;
    a resumed run gives it to `restore`.
    """

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> Sequence[Sequence[Sample]]: ...
    def denominator(self, rows: Iterable[Sample]) -> float | None: ...
    def state(self) -> Mapping[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """How far the model's distribution q is from a teacher's p, and over what. `reverse` is KL(q || p), `forward` KL(p
    || q); `jensen_shannon` is beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q. `top_k`: over the
    teacher's likeliest tokens (`Sample.tops`), all others being one; `vocabulary`: over all tokens, the teacher
    (`Sample.teacher`) computed beside the model."""

    kind: Literal["reverse", "forward", "jensen_shannon"] = "reverse"
    over: Literal["top_k", "vocabulary"] = "vocabulary"
    beta: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a loss asks the trainer for. A declared unit is never split across micro-batches. `survey` costs a
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
    """One loss term. `quantities` maps a needed name to a tensor [N] aligned with the micro-batch's weighted tokens."""

    term: str
    needs: Needs

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult: ...


@dataclass(kw_only=True, slots=True)
class Corrected:
    """What a correction says of M tokens: what each one's share of the loss is multiplied with, [M] without gradient.
    `metrics` as in `LossResult`."""

    weights: torch.Tensor
    metrics: dict[str, tuple[float, float]]


class Trainer(Protocol):
    """Knows terms, not algorithms. One `step` per `Batch`, after one or more `forward_backward`. One that does not
    end its update leaves the version, which counts updates. `forward` is for annotators:
    quantities of the tokens that some term weighs, per row and aligned with its tokens, without gradients. `score` is
    what an engine of one of its teachers would say."""

    @property
    def version(self) -> int: ...
    async def forward(self, rows: Sequence[Sample], needs: Set[str]) -> Sequence[Mapping[str, tuple[float, ...]]]: ...
    async def score(self, teacher: str, request: ScoreRequest) -> Scores: ...
    async def forward_backward(self, batch: Batch) -> Mapping[str, float]: ...
    async def step(self, *, ends_update: bool = True) -> StepResult: ...
    async def push(self) -> WeightRef: ...
    async def save(self, path: str, *, stage: str, metrics: Mapping[str, float]) -> CheckpointRef: ...
    async def restore(self, ref: CheckpointRef) -> None: ...


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids out. Cancelling the awaiting task drops the request; `abort` ends it with what was
    sampled so far (finish reason "abort"), and a request for its tokens followed by those, with the same seed,
    continues it. `stream` is `generate` in pieces: deltas while tokens are made, then the Completion; leaving it drops
    the request. `fork` names requests that continue one under way from where it is, and keeps its KV for them until
    their conversations are released. `score` judges given tokens instead of sampling new ones. `metrics` are numbers
    about what it did since the start and does now, where it tells any; `engine/prometheus.py` says which of them count
    up.
    """

    @property
    def version(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    async def generate(self, request: GenerateRequest) -> Completion: ...
    def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]: ...
    async def abort(self, request: str) -> None: ...
    async def score(self, request: ScoreRequest) -> Scores: ...
    async def fork(self, request: str, seeds: Mapping[str, int]) -> tuple[GenerateRequest, ...]: ...
    async def release(self, conversation: str) -> None: ...
    async def pull(self, ref: WeightRef) -> None: ...
    async def close(self) -> None: ...


class Store(Protocol):
    """Durable record of a run. Every method is atomic: after a crash it happened or it did not."""

    def append_turns(self, turns: Sequence[tuple[str, Sequence[Segment]]]) -> None: ...
    def append(self, *groups: Group, stage: str) -> None: ...
    def groups(self, *, stage: str | None = None) -> Iterable[Group]: ...
    def load(self, rollout: str) -> Rollout: ...
    def metric(self, stage: str, step: int, values: Mapping[str, float]) -> None: ...
    def metrics(self, stage: str) -> list[tuple[int, dict[str, float]]]: ...
    def put(self, key: str, value: Any) -> None: ...
    def get(self, key: str) -> Any | None: ...
    def checkpoint(self, ref: CheckpointRef, state: Mapping[str, Any]) -> None: ...
    def last_checkpoint(self, stage: str) -> tuple[CheckpointRef, Mapping[str, Any]] | None: ...
    def checkpoints(self, stage: str) -> Sequence[CheckpointRef]: ...
    def truncate(self, stage: str, step: int, *, first_group: int = 0) -> None: ...
    def supersede(self, stage: str, number: int) -> None: ...
    def close(self) -> None: ...


class Cluster(Protocol):
    """Which process runs where. A stage asks for parts and never builds them.

    `path` is a Hugging Face checkpoint folder, for `worth` one with a scalar head. A trainer and an engine of one name
    start from equal weights at version 0 and never share storage (law 9).
    """

    def trainer(self, name: str, *, path: str, plan: TrainPlan) -> Trainer: ...
    def engine(self, name: str, *, path: str) -> Engine: ...
    def worth(self, name: str, *, path: str) -> Worth: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """What a stage wants of a trainer: its loss terms, how many steps the schedule spans, the keys of `[train]` that
    this stage replaces, and the head it trains (as `model.load` has it). `teachers`, the checkpoint folders of models
    by name, are computed beside it, without gradients; None is where what is trained begins, and a name that is no
    model of the recipe has the settings of that one. `averages` says with which decay some of these follow what is
    trained (see `train.average`). `role` is what its batches and checkpoints call it where that is not the model's
    name, as of a critic that is made of the policy."""

    losses: Sequence[Loss]
    total_steps: int
    overrides: Mapping[str, Any]
    head: str = "tokens"
    teachers: Mapping[str, str | None] = field(default_factory=dict)
    averages: Mapping[str, float] = field(default_factory=dict)
    role: str = ""


class GroupSource(Protocol):
    """Scored groups in admission order."""

    def groups(self) -> AsyncIterator[Group]: ...
