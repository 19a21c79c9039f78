"""The nouns of the path: one frozen dataclass per life stage of a token. Standard library only.

    task -> rollout -> trajectory -> group -> sample -> batch -> loss -> weights -> engine -> (next) rollout

Conventions. Tokens are ids as sampled, never re-encoded text. `None` means "does not exist" and is never the
same as zero. Durations are seconds (`_s`), times are seconds since the epoch. A weight version is the number of
optimiser steps that made it (0 = the weights the run started from).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Source = Literal["policy", "prompt", "tool", "harness", "expert", "teacher"]
OutcomeKind = Literal[
    "completed", "truncated", "policy_failed", "infra_failed", "judge_failed", "cancelled", "expired"
]
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
FinishReason = Literal["stop", "length", "abort"]


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
    """What one rollout may use. `max_tokens` counts sampled tokens over all its turns; `timeout_s` is wall clock."""

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
    `tag` names the mixture component (for a reasoning-gym task, the dataset) that reports are split by.
    """

    id: str
    env: str
    messages: tuple[Message, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = Limits()
    box: BoxSpec | None = None
    seed: int = 0
    tag: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn. `seed` and a token's absolute position in its branch decide its random number, nothing else.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 truncate nothing. Where several are set, all at this temperature:
    the top_k likeliest tokens, of these the fewest that hold top_p of what they have together, of these the ones with at least
    min_p of the likeliest one's probability. `stop` are token ids that end the turn (the stop token itself is sampled,
    recorded and trained).

    `logit_bias` is (token, what is added to its logit), before everything else; a stop token is impossible before
    `min_tokens` tokens are sampled. Both change the distribution, and log-probabilities are of the changed one.
    `top_logprobs` asks for that many of the likeliest tokens of each draw, at most 20; it changes nothing.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[int, ...] = ()
    seed: int = 0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Run lengths of a value per token: `Runs(lengths=(3, 2), values=(7, 8))` is 7 7 7 8 8."""

    lengths: tuple[int, ...] = ()
    values: tuple[int, ...] = ()

    @staticmethod
    def of(value: int, length: int) -> Runs:
        """One run of `length` tokens."""
        return Runs(lengths=(length,), values=(value,)) if length else Runs()

    def __len__(self) -> int:
        return sum(self.lengths)

    def expand(self) -> list[int]:
        """The value of every token."""
        values: list[int] = []
        for length, value in zip(self.lengths, self.values, strict=True):
            values += [value] * length
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptSets:
    """What truncated sampling left of the vocabulary (law 2): token i was drawn from the ids of `rows[i]`, ascending, 32 bits
    each, little-endian; from the whole vocabulary where the row is empty."""

    rows: tuple[bytes, ...]

    @staticmethod
    def of(ids: Iterable[Iterable[int]]) -> KeptSets:
        """One set of ids per token."""
        return KeptSets(rows=tuple(b"".join(id.to_bytes(4, "little") for id in sorted(row)) for row in ids))

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, token: int) -> tuple[int, ...]:
        """The ids that a token was drawn from; none where nothing was truncated."""
        row = self.rows[token]
        return tuple(int.from_bytes(row[at : at + 4], "little") for at in range(0, len(row), 4))


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One turn to sample: token ids in, token ids out.

    `conversation` names the rollout branch whose KV may be kept between turns (None: keep nothing). A higher
    `priority` is served first; evaluation runs at a lower one than training.

    `ends(tokens, new)` is told the tokens sampled so far, `new` of which it was not told before, and says how many of them
    belong to the turn if it ends among the new ones: whoever has the tokenizer watches for strings there. Asked from
    `min_tokens` on; stop tokens hold beside it.

    `allowed(tokens)` says which tokens may follow those sampled so far: a bit for each of the vocabulary, lowest first, at least
    one of them set. Whoever has the tokenizer makes it of a grammar. `prompt_logprobs` asks for those of tokens[1:] at the
    temperature, without bias or truncation, under the weights served when the request came.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    conversation: str | None = None
    priority: int = 0
    ends: Callable[[Sequence[int], int], int | None] | None = None
    allowed: Callable[[Sequence[int]], bytes] | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What the engine sampled. `logprobs[i]` is of the distribution that tokens[i] was drawn from (law 2).

    `versions` is the weight version that sampled each token, `kv_versions` the oldest version among the KV entries
    it attended to; `cached_tokens` counts prompt tokens whose KV was already there. `kept` is None where nothing was truncated,
    `top_logprobs` where they were not asked for: the likeliest tokens of each draw, best first, with their log-probabilities.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: Runs
    kv_versions: Runs
    kept: KeptSets | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """Given tokens to be judged: `tokens[first:]`, each by the distribution softmax(logits / temperature) behind all before it.

    `top_k` of the likeliest tokens are named at each place. A higher `priority` is served first, together with those of
    `GenerateRequest`.
    """

    id: str
    tokens: tuple[int, ...]
    first: int = 1
    temperature: float = 1.0
    top_k: int = 0
    priority: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """How likely given tokens are, all under the weights of one version: row i is about tokens[first + i] of the request.

    `logprobs` and `entropies` are in nats. `top_ids` and `top_logprobs` hold top_k values a row, the likeliest first, equal
    ones by id. `cached_tokens` counts tokens whose KV was already there.
    """

    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]
    version: int
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What a streamed request sampled since the delta before: at least one token. The `Completion` that ends the stream holds
    all of it again, with versions."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the world says after a reply. `state_key` marks equal states for anchor-state credit."""

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    state_key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One node of a trajectory tree: the tokens it adds to its parent.

    `logprobs`, `versions` and `kv_versions` exist exactly when a model of ours sampled the tokens, and then have one
    value per token; so does `kept` where sampling was truncated. `message` is the parsed or rendered message, None for pure
    template tokens.
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

    def __post_init__(self) -> None:
        sampled = self.model is not None
        if sampled != (self.logprobs is not None) or sampled != (self.versions is not None):
            raise ValueError("a segment has log-probabilities and versions exactly when a model of ours sampled it")
        if self.logprobs is not None and not len(self.logprobs) == len(self.tokens) == len(self.versions or ()):
            raise ValueError("one log-probability and one version per sampled token")
        if self.kept is not None and not (sampled and len(self.kept) == len(self.tokens)):
            raise ValueError("one kept set per sampled token")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What broke, for the record: the error class, where, and its message."""

    error: str
    where: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a trajectory ended (law 6). `failure` exists exactly when something crashed."""

    kind: OutcomeKind
    reason: StopReason
    failure: Failure | None = None

    @property
    def trainable(self) -> bool:
        """Whether the policy is answerable for this outcome: its group may count it."""
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
    """Where a trajectory's wall clock went, in seconds; `started` is the epoch time."""

    started: float = 0.0
    wall_s: float = 0.0
    generate_s: float = 0.0
    world_s: float = 0.0


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
        """Every root-to-leaf path, in the order the leaves were made."""
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
    """One attempt at a task: one trajectory per role. `index` is its place in the group, `attempt` counts retries."""

    id: str
    task: Task
    index: int
    attempt: int
    purpose: Purpose
    trajectories: tuple[Trajectory, ...]

    @property
    def outcome(self) -> Outcome:
        """The worst outcome over the roles: a rollout is trainable only when all its roles are."""
        return next((t.outcome for t in self.trajectories if not t.outcome.trainable), self.trajectories[0].outcome)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """`reward` None means not scored, which is not 0. `parts` are named components for reports; `success` is the
    verifier's yes or no (None where a world has no such notion)."""

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    success: bool | None = None
    per_turn: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A task's rollouts with their scores, in rollout order. A rollout that left for an infrastructure failure is in
    `failed`, never among `rollouts`; an unscored or misaligned group cannot be built.

    `index` is the admission number (batches form in this order, law 5); `version` the weight version at admission.
    """

    id: str
    index: int
    task: Task
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    failed: tuple[Rollout, ...] = ()
    version: int = 0

    def __post_init__(self) -> None:
        if len(self.rollouts) != len(self.scores):
            raise ValueError(f"group {self.id}: {len(self.rollouts)} rollouts but {len(self.scores)} scores")
        for rollout, score in zip(self.rollouts, self.scores, strict=True):
            if score.reward is None or not rollout.outcome.trainable:
                raise ValueError(f"group {self.id}: rollout {rollout.id} is unscored or not the policy's doing")


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
    annotations: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in (*self.weights.items(), *self.annotations.items()):
            if len(values) != len(self.tokens):
                raise ValueError(f"sample {self.id}: {name} has {len(values)} values for {len(self.tokens)} tokens")
        if self.kept is not None and len(self.kept) != len(self.tokens):
            raise ValueError(f"sample {self.id}: {len(self.kept)} kept sets for {len(self.tokens)} tokens")
        if any(values and values[0] for values in self.weights.values()):
            raise ValueError(f"sample {self.id}: the first token has no prediction and cannot carry weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAccount:
    """Where every sampled token of an update went (law 7): sampled = trained + filtered + zero_advantage + failed."""

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
        """Whether nothing was lost and nothing doubled."""
        return self.sampled == self.trained + self.filtered + self.zero_advantage + self.failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The rows of one optimiser step and the model they train. `denominators` are global, one per loss term."""

    step: int
    model: str
    rows: tuple[Sample, ...]
    denominators: Mapping[str, float]
    publish: bool = True
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
    transport: an object in this process for `inline`, a path for `disk`). `probe` are (tokens, log-probabilities) that the
    receiver must reproduce before it serves (law 9)."""

    model: str
    version: int
    checksum: str
    transport: str
    location: Any
    probe: tuple[tuple[int, ...], tuple[float, ...]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """What a resume needs: the folder of one complete checkpoint and the step after which it was written."""

    model: str
    stage: str
    step: int
    path: str
    metrics: Mapping[str, float] = field(default_factory=dict)
