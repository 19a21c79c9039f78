"""The nouns of the path: one frozen dataclass per life stage of a token. Standard library only.

    task -> rollout -> trajectory -> group -> sample -> batch -> loss -> weights -> engine -> (next) rollout

Conventions. Tokens are ids as sampled, never re-encoded text. `None` means "does not exist" and is never the
same as zero. Durations are seconds (`_s`), times are seconds since the epoch. A weight version is the number of
optimiser steps that made it (0 = the weights the run started from).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sparring.annotations import DECLARED
from sparring.generation import Constraint, FinishReason, KeptSets, NumberRow, Runs, Sampling, TopRows

Role = Literal["system", "user", "assistant", "tool"]
Source = Literal["policy", "prompt", "tool", "harness", "expert", "teacher"]
OutcomeKind = Literal["completed", "truncated", "policy_failed", "infra_failed", "judge_failed", "cancelled", "expired"]
StopReason = Literal[
    "answered",  # the agent ended its turn without a tool call, or the world said done
    "max_turns",
    "max_tokens",
    "max_tool_calls",
    "context_length",
    "timeout",
    "malformed",  # the reply could not be acted on
    "resources",  # the policy's own commands hit memory, disk, process or time limits fatally
    "failure",  # see Outcome.failure
    "cancelled",
    "stale",
]
Purpose = Literal["train", "eval", "baseline"]
POLICY = "policy"
"""Name of the model that is trained, in `[models]` and on the segments that it samples."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One node of a trajectory tree: the tokens it adds to its parent.

    `logprobs`, `versions` and `kv_versions` exist exactly when a model of ours sampled the tokens, and then have one
    value per token; so does `kept` where sampling was truncated. `message` is the parsed or rendered message, None for
    pure template tokens. `finish_reason` says how the sampling ended; None where nothing was, or no record says so.
    """

    index: int
    parent: int | None
    source: Source
    tokens: tuple[int, ...]
    message: Message | None = None
    model: str | None = None
    logprobs: tuple[float, ...] | None = None
    versions: Runs | None = None
    kv_versions: Runs | None = None
    sampling: Sampling | None = None
    kept: KeptSets | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        sampled = self.model is not None
        if sampled != (self.logprobs is not None) or sampled != (self.versions is not None):
            raise ValueError(
                "segment: expected log-probabilities and versions if a model of this run sampled it, and none otherwise"
            )
        if self.logprobs is not None and not len(self.logprobs) == len(self.tokens) == len(self.versions or ()):
            raise ValueError("segment: expected one log-probability and one version per sampled token")
        if self.kept is not None and not (sampled and len(self.kept) == len(self.tokens)):
            raise ValueError("segment: expected one kept set per sampled token")

    def compact(self) -> None:
        """Hold tokens and log-probabilities as `NumberRow`s, in a third of the memory; the segment stays equal."""
        object.__setattr__(self, "tokens", NumberRow.of_tokens(self.tokens))
        object.__setattr__(self, "logprobs", self.logprobs and NumberRow.of_floats(self.logprobs))


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Failure, for the record: the error class, where, and its message."""

    error: str
    where: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """End of a trajectory (law 6). `failure` exists exactly when something crashed."""

    kind: OutcomeKind
    reason: StopReason
    failure: Failure | None = None

    @property
    def trainable(self) -> bool:
        """True if the policy is answerable for this outcome, so that its group may count it."""
        return self.kind in ("completed", "truncated", "policy_failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Counts over one trajectory, in tokens, turns and calls."""

    sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    turns: int = 0
    tool_calls: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Wall clock of a trajectory, in seconds; `started` is the epoch time."""

    started: float = 0.0
    wall_s: float = 0.0
    generate_s: float = 0.0
    world_s: float = 0.0


DEFAULT_ROLES = (POLICY,)
"""The roles of a world that names none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One role's tree of segments. `origin` is (trajectory id, segment index) of a deliberate fork, or None."""

    id: str
    task: str
    role: str
    segments: tuple[Segment, ...]
    outcome: Outcome
    usage: Usage = Usage()
    timing: Timing = Timing()
    origin: tuple[str, int] | None = None

    def branches(self) -> Iterator[tuple[Segment, ...]]:
        """Yield every root-to-leaf path, in the order the leaves were made."""
        parents = {s.parent for s in self.segments}
        for leaf in self.segments:
            if leaf.index in parents:
                continue
            path: list[Segment] = []
            at: int | None = leaf.index
            while at is not None:
                path.append(self.segments[at])
                at = self.segments[at].parent
            yield tuple(reversed(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One attempt at a task: one trajectory per role that was asked, in the order in which the world names them; an
    attempt that asked nobody has the first role's. `index` is its place in the group, `attempt` counts retries."""

    id: str
    task: Task
    index: int
    attempt: int
    purpose: Purpose
    trajectories: tuple[Trajectory, ...]

    @property
    def outcome(self) -> Outcome:
        """The worst outcome over the roles: a rollout is trainable only when all its roles are, and completed only when
        all have completed."""
        outcomes = [trajectory.outcome for trajectory in self.trajectories]
        for outcome in outcomes:
            if not outcome.trainable:
                return outcome
        return next((outcome for outcome in outcomes if outcome.kind != "completed"), outcomes[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """`reward` None means not scored, which is not 0. `parts` are named components for reports; `success` is the
    verifier's yes or no (None where a world has no such notion).

    `per_turn` says what of `reward` each sampled turn earned, in the order in which they were sampled; what they leave
    of it was earned by the end. `per_step` says likewise what of its turn's part each step of a turn earned, where
    turns have steps: per turn, (sampled tokens of the turn up to the step's end, reward), in order; the rest was earned
    by the turn's end. `states` says which state each of those turns was taken in, None where no other is like it (see
    `Observation.state_key`). `per_role` replaces `reward` for a role that it names, where roles earn different rewards.
    Where a rollout has several roles, `per_role_turns` and `per_role_states` stand for `per_turn` and `states`: each
    role's own turns.
    """

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    success: bool | None = None
    per_turn: tuple[float, ...] | None = None
    per_step: tuple[tuple[tuple[int, float], ...], ...] | None = None
    states: tuple[str | None, ...] | None = None
    per_role: Mapping[str, float] | None = None
    per_role_turns: Mapping[str, tuple[float, ...]] | None = None
    per_role_states: Mapping[str, tuple[str | None, ...]] | None = None

    def of(self, role: str) -> float | None:
        """Return the reward of a role."""
        return (self.per_role or {}).get(role, self.reward)

    def turns_of(self, role: str) -> tuple[float, ...] | None:
        """Return each turn's reward of a role, or None if turns were not scored."""
        return self.per_turn if self.per_role_turns is None else self.per_role_turns.get(role)

    def states_of(self, role: str) -> tuple[str | None, ...] | None:
        """Return the state that each turn of a role was taken in, None where nothing is said of states."""
        return self.states if self.per_role_states is None else self.per_role_states.get(role)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A task's rollouts with their scores, in rollout order. A rollout that left for an infrastructure failure is in
    `failed`, never among `rollouts`; an unscored or misaligned group cannot be built.

    `index` is the admission number (batches form in this order, law 5); `version` the weight version at admission.
    `baselines` are the scores of the task's rollouts with purpose "baseline": never trained, and no members of the
    group.
    """

    id: str
    index: int
    task: Task
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    failed: tuple[Rollout, ...] = ()
    version: int = 0
    baselines: tuple[Score, ...] = ()

    def __post_init__(self) -> None:
        if len(self.rollouts) != len(self.scores):
            raise ValueError(f"group {self.id}: {len(self.rollouts)} rollouts but {len(self.scores)} scores")
        for rollout, score in zip(self.rollouts, self.scores, strict=True):
            if score.reward is None or not rollout.outcome.trainable:
                raise ValueError(f"group {self.id}: rollout {rollout.id} is unscored, or its outcome is not trainable")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One branch made ready for training. All per-token fields are aligned with `tokens`.

    Worked example: prompt `P0 P1`, first sampled turn `A0 A1`, a tool's answer `T0`, second sampled turn `B0`:

        tokens       P0    P1    A0    A1    T0    B0
        policy       0     0     1     1     0     1       weight in the policy term (`weights["policy"]`)
        logprobs     0.    0.   -0.3  -1.2   0.   -0.7     recorded when sampled; 0. where nothing was sampled
        advantages   0.    0.    0.5   0.5   0.    0.5
        versions     -1    -1    7     7     -1    7       -1 where nothing was sampled
        kv_versions  -1    -1    7     7     -1    7

    The model's log-probability of tokens[t] is computed at position t - 1, so tokens[0] never carries weight.
    `weights` maps a loss term (policy, imitate, ...) to its per-token weights; a term that is absent touches nothing.
    `kept` has an empty row where nothing was sampled or nothing truncated; it is None where that is so everywhere.
    `bias` is likewise, per token, what was added to logits before it was drawn: (id, value), minus infinity for what
    was impossible.

    `label` is what the preference term is told of the row: 1 chosen or wanted, -1 rejected or unwanted; 0: judged for a
    batch statistic alone, never trained. The chosen and the rejected rows of one `group` are a pair. `teacher` names
    the model that the distill term, or a penalty for leaving a reference, compares with; `tops` is what that one finds
    likeliest in the place of each token, where no more of its distribution is asked for.
    """

    id: str
    group: str
    source: Source
    tokens: tuple[int, ...]
    weights: Mapping[str, tuple[float, ...]]
    logprobs: tuple[float, ...] | None = None
    advantages: tuple[float, ...] | None = None
    versions: tuple[int, ...] | None = None
    kv_versions: tuple[int, ...] | None = None
    temperature: float = 1.0
    kept: KeptSets | None = None
    bias: tuple[tuple[tuple[int, float], ...], ...] | None = None
    annotations: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    label: float | None = None
    teacher: str | None = None
    tops: TopRows | None = None

    def __post_init__(self) -> None:
        if not self.annotations.keys() <= DECLARED:
            names = ", ".join(sorted(self.annotations.keys() - DECLARED))
            raise ValueError(f"sample {self.id}: expected annotations of sparring/annotations.py, got {names}")
        for name, values in (*self.weights.items(), *self.annotations.items()):
            if len(values) != len(self.tokens):
                raise ValueError(f"sample {self.id}: {name} has {len(values)} values for {len(self.tokens)} tokens")
        if self.kept is not None and len(self.kept) != len(self.tokens):
            raise ValueError(f"sample {self.id}: {len(self.kept)} kept sets for {len(self.tokens)} tokens")
        if self.tops is not None and len(self.tops) != len(self.tokens):
            raise ValueError(f"sample {self.id}: {len(self.tops)} rows of a teacher for {len(self.tokens)} tokens")
        if self.bias is not None and len(self.bias) != len(self.tokens):
            raise ValueError(f"sample {self.id}: {len(self.bias)} biases for {len(self.tokens)} tokens")
        if any(values and values[0] for values in self.weights.values()):
            raise ValueError(f"sample {self.id}: the first token has no prediction and cannot carry weight")

    def annotated(self, name: str, values: tuple[float, ...]) -> Sample:
        """Return the row with one more annotation, or another in its place.

        Args:
            name: a member of `annotations.Annotation`.
            values: one per token [T].

        Raises:
            ValueError: the name is not declared, or the row has another number of tokens.
        """
        return replace(self, annotations={**self.annotations, name: values})

    @property
    def trajectory(self) -> str:
        """The id of the trajectory that it was flattened from: its own is `<trajectory id>#<branch>`."""
        return self.id.rpartition("#")[0]

    @property
    def branch(self) -> int:
        """Index of the branch in its trajectory."""
        return int(self.id.rpartition("#")[2])


PAIR_SHARE = 0.5
"""Weight of each side of a pair, so that a pair weighs 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAccount:
    """Account of every sampled token of an update (law 7): sampled = trained + filtered + zero_advantage + failed."""

    sampled: int = 0
    trained: int = 0
    filtered: int = 0  # its group had no variance
    zero_advantage: int = 0  # its own advantage was exactly zero
    failed: int = 0  # its rollout left the group

    def __add__(self, other: TokenAccount) -> TokenAccount:
        return TokenAccount(
            sampled=self.sampled + other.sampled,
            trained=self.trained + other.trained,
            filtered=self.filtered + other.filtered,
            zero_advantage=self.zero_advantage + other.zero_advantage,
            failed=self.failed + other.failed,
        )

    @property
    def balanced(self) -> bool:
        """True if every sampled token is counted exactly once."""
        return self.sampled == self.trained + self.filtered + self.zero_advantage + self.failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The rows of one optimiser step and the model they train. `denominators` are global, one per loss term. An update
    may take several; the last one `ends_update`, and if it says `publish`, the engine is given the weights."""

    step: int
    model: str
    rows: tuple[Sample, ...]
    denominators: Mapping[str, float]
    publish: bool = True
    ends_update: bool = True
    account: TokenAccount = TokenAccount()
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """A new version with its metrics (gradient norm, learning rate, ...)."""

    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRef:
    """A published version: what it is called, what it must hash to, and where it lies (`location` belongs to the
    transport: an object in this process for `inline`, a path for `disk`). `probe` are (tokens, log-probabilities) that
    the receiver must reproduce before it serves (law 9). Where they are an adapter's and not a whole model's, `adapter`
    is its name. `digests` are those of single tensors, by name, where the publisher has them."""

    model: str
    version: int
    checksum: str
    transport: str
    location: Any
    probe: tuple[tuple[int, ...], tuple[float, ...]] | None = None
    adapter: str | None = None
    digests: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """Checkpoint for a resume: the folder of one complete checkpoint and the step after which it was written."""

    model: str
    stage: str
    step: int
    path: str
    metrics: Mapping[str, float] = field(default_factory=dict)
