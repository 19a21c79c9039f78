"""Record of sampled data: segments, trajectories, rollouts and groups, with their outcomes and scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sparring.errors import StopReason as StopReason
from sparring.generation import FinishReason, KeptSets, NumberRow, Runs, Sampling
from sparring.types.conversation import Message, Task, ToolSpec

Source = Literal["policy", "prompt", "tool", "harness", "expert", "teacher"]
OutcomeKind = Literal["completed", "truncated", "policy_failed", "infra_failed", "judge_failed", "cancelled"]
Purpose = Literal["train", "eval", "baseline"]
Label = Literal[
    "agent",  # a turn of an agent: trained
    "auxiliary",  # a title or a routing decision: recorded and counted, not trained
    "compaction",  # a summary with which an agent continues: trained
    "lost",  # not delivered to its client: recorded and counted, not trained
]
UNTRAINED: tuple[Label, ...] = ("auxiliary", "lost")
"""Labels of replies that are recorded and counted but not trained."""
ForkReason = Literal[
    "system",  # the system message differs
    "tools",  # the tools differ
    "edited",  # a message was changed
    "deleted",  # messages were removed
    "inserted",  # messages were added in between
    "compaction",  # a summary replaces earlier messages
    "agent",  # another agent's conversation begins
    "auxiliary",  # a request for a title or a routing decision
    "template",  # the chat template cannot append to the recorded tokens
]
POLICY = "policy"
"""Name of the trained model, in `[models]` and on the segments that it samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Metadata that a client sends with a request. It labels and links turns; the key alone decides the request's
    rollout.

    Attributes:
        agent: id of the requesting agent or sub-agent; empty if the client sends none.
        parent: id of the agent that started this agent; empty if the client sends none.
        label: purpose of the request, if the client states it.
        handle: id of the reply that the request continues (from a response id, a call id or a signature); may be empty.
            It decides between several replies with equal conversations.
        wishes: fields of the request without effect on sampling.
    """

    agent: str = ""
    parent: str = ""
    label: Label | None = None
    handle: str = ""
    wishes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Point at which a conversation departs from one that its session recorded earlier.

    Attributes:
        reason: cause of the departure, an act of the client or of the template.
        of: index of the last common segment, or of the reply that started an agent; None without either.
        message: index in the request of the first differing message; of the last message if only ids or tools differ.
        byte: offset in that message of the first differing byte, in the UTF-8 text by which messages are compared.
        before: recorded text from this byte on, shortened; empty if the recorded text ends there.
        after: the request's text from this byte on, likewise.
        agent: id of the requesting agent, given by its client; empty if the client gives none.
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
    """Node of a trajectory tree: the tokens that it adds to its parent.

    `logprobs`, `versions` and `kv_versions` have one value per token if a model of this run sampled the tokens, and do
    not exist otherwise. `kept` exists if, in addition, sampling was truncated. Segments are in the order of their
    requests.

    Attributes:
        parent: index of the parent; None for a root.
        message: rendered or parsed message; None for pure template tokens.
        model: name of the model that sampled the tokens, or None.
        versions: weight versions that sampled the tokens.
        kv_versions: oldest weight versions of the KV cache that the tokens attended to.
        finish_reason: reason why sampling ended; None if nothing was sampled.
        label: purpose of a sampled reply.
        place: number reserved when the request was planned, which is part of the reply's id (`rl/12/3#5`). None: equal
            to `index`. It differs if an earlier request got no reply.
        earlier: messages before `message` that the segment adds. After a fork these follow the last common message.
        tools: tools of the request, if they changed. None: unchanged.
        fork: departure from an earlier conversation; None for a continuation.
        quotes: replies of other branches that the messages quote, such as a sub-agent's answer, a summary, or the call
            that started the agent.
        evidence: metadata that the client sent with the request of a sampled reply.
        delivered: True if the client received the reply; None: unknown.
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
        """All messages that the segment adds: `earlier`, then `message`."""
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
        """True for a reply that a model of this run sampled as a turn: of an agent, or a compaction."""
        return self.model is not None and bool(self.tokens) and self.label not in UNTRAINED

    def compact(self) -> None:
        """Store tokens and log-probabilities as `NumberRow`s, in a third of the memory. The segment stays equal."""
        object.__setattr__(self, "tokens", NumberRow.of_tokens(self.tokens))
        object.__setattr__(self, "logprobs", self.logprobs and NumberRow.of_floats(self.logprobs))


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Recorded failure: error class, place and message."""

    error: str
    where: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """End of a trajectory (law 6). `failure` exists exactly if something crashed."""

    kind: OutcomeKind
    reason: StopReason
    failure: Failure | None = None

    @property
    def trainable(self) -> bool:
        """True if the policy is responsible for the outcome, so its group may count it."""
        return self.kind in ("completed", "truncated", "policy_failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Counts of tokens, turns and calls in one trajectory."""

    sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    turns: int = 0
    tool_calls: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Wall-clock times of a trajectory in seconds; `started` is a time since the epoch."""

    started: float = 0.0
    wall_s: float = 0.0
    generate_s: float = 0.0
    world_s: float = 0.0


DEFAULT_ROLES = (POLICY,)
"""Roles of a world that names none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One role's tree of segments. `origin` is the (trajectory id, segment index) of a deliberate fork, or None."""

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
        """Replies that are turns, in the order of their requests; `Score.per_turn` and `Score.states` refer to them."""
        return [segment for segment in self.segments if segment.is_turn]

    @property
    def answer(self) -> Segment | None:
        """Last reply of the main agent (see `main_replies`); None if no agent replied."""
        replies = main_replies(self.segments)
        return replies[-1] if replies else None

    def branches(self) -> Iterator[tuple[Segment, ...]]:
        """Yield every root-to-leaf path, in the order of leaves."""
        for leaf in self.leaves():
            yield self.path(leaf.index)

    def leaves(self) -> Iterator[Segment]:
        """Return the segments without children, in order."""
        parents = {s.parent for s in self.segments}
        return (segment for segment in self.segments if segment.index not in parents)

    def path(self, index: int) -> tuple[Segment, ...]:
        """Return the segments from the root to the segment with this index."""
        path: list[Segment] = []
        at: int | None = index
        while at is not None:
            path.append(self.segments[at])
            at = self.segments[at].parent
        return tuple(reversed(path))


def main_replies(segments: Sequence[Segment]) -> list[Segment]:
    """Return the replies of the main agent, which is the first agent to request a reply, in the order of requests.

    Replies of any model count. Auxiliary, compaction, undelivered and sub-agent replies do not.
    """
    replies = [s for s in segments if s.message is not None and s.message.role == "assistant"]
    of_agents = [reply for reply in replies if reply.label == "agent" and reply.source != "harness"]
    if len(of_agents) < 2:
        return of_agents
    main, sub_agents = _agent_of(of_agents[0]), _by_sub_agents(segments)
    own = [r for r in of_agents if _agent_of(r) == main and (main or not sub_agents.get(r.index))]
    return own or of_agents[:1]


def _by_sub_agents(segments: Sequence[Segment]) -> dict[int, bool]:
    """Return for each segment whether it belongs to an agent that was started by another agent's reply, judged by the
    tree alone, since clients need not name agents."""
    others: dict[int, bool] = {}
    for s in segments:
        before = s.parent if s.parent is not None or s.fork is None else s.fork.of
        begins = s.parent is None and s.fork is not None and s.fork.reason == "agent"
        others[s.index] = begins or before is not None and others.get(before, False)
    return others


def _agent_of(reply: Segment) -> str:
    return "" if reply.evidence is None else reply.evidence.agent


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One attempt at a task.

    Attributes:
        attempt: number of retries before it.
        trajectories: one trajectory per role that got a request, in the world's order of roles; an attempt without
            requests has an empty trajectory of the first role.
    """

    id: str
    task: Task
    index: int
    attempt: int
    purpose: Purpose
    trajectories: tuple[Trajectory, ...]

    @property
    def outcome(self) -> Outcome:
        """Worst outcome over the roles: a rollout is trainable only if all its roles are, and completed only if all
        are."""
        outcomes = [trajectory.outcome for trajectory in self.trajectories]
        for outcome in outcomes:
            if not outcome.trainable:
                return outcome
        return next((outcome for outcome in outcomes if outcome.kind != "completed"), outcomes[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Score of a rollout.

    With several roles, `per_role_turns` and `per_role_states` replace `per_turn` and `states`.

    Attributes:
        reward: reward; None means not scored, which differs from 0.
        parts: named components, for reports and credit rules.
        success: verdict of the verifier; None in a world without one.
        per_turn: part of `reward` that each turn earned, in the order of `Trajectory.turns` (without auxiliary and lost
            replies); the end of the rollout earned the rest.
        per_step: for each turn, its steps in order as (number of the turn's tokens up to the end of the step, part of
            the turn's reward that the step earned); the end of the turn earned the rest.
        states: state in which each turn was taken (see `Observation.state_key`); None for a state that no other turn
            shares.
        per_role: rewards that replace `reward` for the named roles.
        per_role_turns: `per_turn` of each role's own turns.
        per_role_states: `states` of each role's own turns.
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
        """Return the reward of each of a role's turns; None if turns were not scored."""
        return self.per_turn if self.per_role_turns is None else self.per_role_turns.get(role)

    def states_of(self, role: str) -> tuple[str | None, ...] | None:
        """Return the state of each of a role's turns; None if states are not named."""
        return self.states if self.per_role_states is None else self.per_role_states.get(role)


ROUNDING = 1e-9
"""Largest relative difference between equal rewards: sums of the same parts differ by about 1e-16."""
LEAST_DIFFERENCE = 1e-12
"""Largest absolute difference between equal rewards near 0, such as sums that cancel."""


def alike(rewards: Sequence[float | None]) -> bool:
    """Return whether rewards are equal up to rounding. None equals only None."""
    earned = [reward for reward in rewards if reward is not None]
    if len(earned) < len(rewards):
        return not earned
    least, largest = min(earned, default=0.0), max(earned, default=0.0)
    return math.isclose(least, largest, rel_tol=ROUNDING, abs_tol=LEAST_DIFFERENCE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A task's rollouts with their scores. A group with an unscored or untrainable rollout cannot be built.

    Attributes:
        index: admission number; batches form in this order (law 5).
        failed: rollouts that were lost to infrastructure, or that reached a limit before the policy's first turn.
        version: weight version at admission.
        baselines: scores of the task's rollouts with purpose "baseline", which are neither trained nor members.
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
