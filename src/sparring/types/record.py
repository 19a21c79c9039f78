"""Record of what was sampled: segments, trajectories, rollouts and groups, with their outcomes and scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparring.generation import FinishReason, KeptSets, NumberRow, Runs, Sampling
from sparring.types.conversation import Message, Task, ToolSpec

Source = Literal["policy", "prompt", "tool", "harness", "expert", "teacher"]
OutcomeKind = Literal["completed", "truncated", "policy_failed", "infra_failed", "judge_failed", "cancelled"]
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
Label = Literal[
    "agent",  # a turn of an agent: trained
    "auxiliary",  # a title, a route: recorded and counted, not trained
    "compaction",  # the summary from which an agent goes on: trained
    "lost",  # its client never got it: recorded and counted, not trained
]
UNTRAINED: tuple[Label, ...] = ("auxiliary", "lost")
"""Labels of replies that are recorded and counted and not trained."""
ForkReason = Literal[
    "system",  # another system message
    "tools",  # other tools
    "edited",  # a message was changed
    "deleted",  # messages were left out
    "inserted",  # messages were put in
    "compaction",  # a summary stands for what it sums up
    "agent",  # another agent's conversation begins
    "auxiliary",  # a title, a route
    "template",  # the chat template has no bridge over what was said
]
POLICY = "policy"
"""Name of the model that is trained, in `[models]` and on the segments that it samples."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Departure of a conversation from one that its session recorded before.

    Attributes:
        reason: what the client, or the template, did.
        of: index of the last segment that both have, or of the reply that an agent was started by; None where there is
            none.
        message: place in the request of the first message that differs; of the last one where only ids or tools do.
        byte: place in that message of the first byte that differs, in UTF-8 of the text that both are compared by.
        before: the recorded side from there on, cut short; empty where it ends there.
        after: the request's side, likewise.
        agent: id of the agent that asks, as its client says; empty where it says none.
    """

    reason: ForkReason
    of: int | None = None
    message: int = 0
    byte: int = 0
    before: str = ""
    after: str = ""
    agent: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One node of a trajectory tree: the tokens it adds to its parent.

    `logprobs`, `versions` and `kv_versions` exist exactly when a model of ours sampled the tokens, and then have one
    value per token; so does `kept` where sampling was truncated. `message` is the parsed or rendered message, None for
    pure template tokens. `finish_reason` says how the sampling ended; None where nothing was, or no record says so.
    `label` says what a sampled reply was for.

    Segments stand in the order in which their requests were made. `place` is the number that a segment took when its
    request was planned, which the id of a reply bears (`rl/12/3#5`); None where that is its index. It differs where a
    request before it got no reply.

    Of what was told, `earlier` are the messages before `message`. A conversation that leaves another tells what follows
    the messages that both have: `fork` says which it left, and at which message. `tools` are those of the request where
    they are others than before; None where they are the same, or no record says so. `quotes` are the replies of other
    branches that are quoted in what was told: a sub-agent's answer, a summary, the call that began it.

    Of a sampled reply, `evidence` is what its client said of the request, and `delivered` whether the client got it;
    None where nobody knows.
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
    label: Label = "agent"
    place: int | None = None
    earlier: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] | None = None
    fork: Fork | None = None
    quotes: tuple[int, ...] = ()
    evidence: Evidence | None = None
    delivered: bool | None = None

    @property
    def told(self) -> tuple[Message, ...]:
        """All messages of the segment, in order."""
        return self.earlier if self.message is None else (*self.earlier, self.message)

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

    @property
    def is_turn(self) -> bool:
        """True of a reply that a model of ours sampled as a turn of the rollout: of an agent, or of a compaction."""
        return self.model is not None and bool(self.tokens) and self.label not in UNTRAINED

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

    @property
    def turns(self) -> list[Segment]:
        """The replies that are turns, in the order in which they were asked for: those that `Score.per_turn` and
        `Score.states` speak of."""
        return [segment for segment in self.segments if segment.is_turn]

    @property
    def answer(self) -> Segment | None:
        """The last reply of the main agent, see `main_replies`; None where no agent replied."""
        replies = main_replies(self.segments)
        return replies[-1] if replies else None

    def branches(self) -> Iterator[tuple[Segment, ...]]:
        """Yield every root-to-leaf path, in the order the leaves were made."""
        for leaf in self.leaves():
            yield self.path(leaf.index)

    def leaves(self) -> Iterator[Segment]:
        """Return the segments that none continues, in the order they were made."""
        parents = {s.parent for s in self.segments}
        return (segment for segment in self.segments if segment.index not in parents)

    def path(self, index: int) -> tuple[Segment, ...]:
        """Return the segments from a root to the one with this index."""
        path: list[Segment] = []
        at: int | None = index
        while at is not None:
            path.append(self.segments[at])
            at = self.segments[at].parent
        return tuple(reversed(path))


def main_replies(segments: Sequence[Segment]) -> list[Segment]:
    """Return the replies of the main agent, the one that asked first, whoever wrote them, in the order in which they
    were asked for. Titles, summaries, what its client never got and what sub-agents say are none."""
    replies = [s for s in segments if s.message is not None and s.message.role == "assistant"]
    of_agents = [reply for reply in replies if reply.label == "agent" and reply.source != "harness"]
    if len(of_agents) < 2:
        return of_agents
    main, begun = _agent_of(of_agents[0]), _begun_by_others(segments)
    own = [r for r in of_agents if _agent_of(r) == main and (main or not begun.get(r.index))]
    return own or of_agents[:1]


def _begun_by_others(segments: Sequence[Segment]) -> dict[int, bool]:
    """Return for each segment whether it belongs to an agent that a reply of another began, as the tree tells where
    clients name no agents."""
    others: dict[int, bool] = {}
    for s in segments:
        before = s.parent if s.parent is not None or s.fork is None else s.fork.of
        begins = s.parent is None and s.fork is not None and s.fork.reason == "agent"
        others[s.index] = begins or before is not None and others.get(before, False)
    return others


def _agent_of(reply: Segment) -> str:
    """Return the id of the agent that asked for a reply; empty where its client gives none."""
    return "" if reply.evidence is None else reply.evidence.agent


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

    `per_turn` says what of `reward` each turn earned, in the order of `Trajectory.turns`: replies that are auxiliary or
    lost are none; what they leave of it was earned by the end. `per_step` says likewise what of its turn's part each
    step of a turn earned, where turns have steps: per turn, (sampled tokens of the turn up to the step's end, reward),
    in order; the rest was earned by the turn's end. `states` says which state each of those turns was taken in, None
    where no other is like it (see `Observation.state_key`). `per_role` replaces `reward` for a role that it names,
    where roles earn different rewards. Where a rollout has several roles, `per_role_turns` and `per_role_states` stand
    for `per_turn` and `states`: each role's own turns.
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


ROUNDING = 1e-9
"""Difference of rewards, relative to the larger, that is rounding: sums of the same parts differ by some 1e-16."""
LEAST_DIFFERENCE = 1e-12
"""Difference that is rounding where rewards are near 0, as sums that cancel are."""


def alike(rewards: Sequence[float | None]) -> bool:
    """Return whether rewards differ by no more than rounding. One that is None is like none that is not."""
    earned = [reward for reward in rewards if reward is not None]
    if len(earned) < len(rewards):
        return not earned
    least, largest = min(earned, default=0.0), max(earned, default=0.0)
    return math.isclose(least, largest, rel_tol=ROUNDING, abs_tol=LEAST_DIFFERENCE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A task's rollouts with their scores, in rollout order. A rollout that left for an infrastructure failure, or that
    ended at a limit before the policy had a turn, is in `failed`, never among `rollouts`; an unscored or misaligned
    group cannot be built.

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
