"""Members of a group, the unit that credit rules compare: trajectories with their rewards and the positions of their
sampled tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeVar

from sparring.algo.credit.succession import Succession, succession
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.types import Group, Sample, Score, Trajectory

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnSpan:
    """Tokens of one sampled turn: positions `start` up to `stop` of a member's row number `row`."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One trajectory of a group. `rows` are its branches' rows; empty if a model other than the policy played the role.

    A step is a sampled token with policy weight. Steps are numbered turn by turn, in the order of the requests;
    `following` gives the step that logically comes next. A token that several branches share has weight in a single
    branch, so it is one step. A score whose number of turns is not the trajectory's is refused (`ValueError`).
    """

    trajectory: Trajectory
    rollout: str
    score: Score
    rows: tuple[Sample, ...]

    @property
    def reward(self) -> float:
        """Return the trajectory's total reward: its role's, plus every per-token reward that annotators wrote."""
        return self.outcome + math.fsum(
            x for row in self.rows for x in _step_values(row, row.annotations.get(Annotation.REWARD))
        )

    @property
    def outcome(self) -> float:
        """Return the reward that the score gives to the trajectory's role, or to the whole rollout if it gives roles
        none. A reward that is not finite is refused (`ValueError`)."""
        reward = self.score.of(self.trajectory.role)
        if reward is None or not math.isfinite(reward):
            raise ValueError(f"rollout {self.rollout}: expected a finite reward, got {reward}")
        return reward

    @property
    def length(self) -> int:
        """Return the number of trained tokens, which are the steps."""
        return sum(len(row.weights["policy"]) - row.weights["policy"].count(0.0) for row in self.rows)

    def turns(self) -> list[TurnSpan | None]:
        """Return the position of each turn of the trajectory; None for a turn without policy weight."""
        where: dict[int, TurnSpan] = {}
        branches = list(self.trajectory.branches())
        for number, row in enumerate(self.rows):
            start = 0
            for segment in branches[row.branch]:
                stop = start + len(segment.tokens)
                if segment.is_turn and any(row.weights["policy"][start:stop]):
                    where.setdefault(segment.index, TurnSpan(row=number, start=start, stop=stop))
                start = stop
        return [where.get(turn.index) for turn in self.trajectory.turns]

    def steps(self) -> list[list[tuple[int, int]]]:
        """Return (row, position) of each step, per turn; empty for a turn without policy weight."""
        return [
            [(turn.row, at) for at in range(turn.start, turn.stop) if self.rows[turn.row].weights["policy"][at]]
            if turn
            else []
            for turn in self.turns()
        ]

    def per_turn(self) -> list[float]:
        """Return the reward of each turn; zeros if the score has no rewards per turn."""
        return self._turn_values("per_turn", self.score.turns_of(self.trajectory.role), 0.0)

    def per_step(self) -> list[tuple[tuple[int, float], ...]]:
        """Return the step rewards of each turn as (number of the turn's tokens up to the step's end, reward).

        If the score has no rewards per step, each turn is one step. Steps that end outside their turn or out of order
        are refused (`ValueError`).
        """
        lengths = [len(turn.tokens) for turn in self.trajectory.turns]
        if self.score.per_step is None:
            return [((length, reward),) for length, reward in zip(lengths, self.per_turn(), strict=True)]
        per_turn = self._turn_values("per_step", self.score.per_step, ())
        for length, steps in zip(lengths, per_turn, strict=True):
            ends = [end for end, _ in steps]
            if ends != sorted(set(ends)) or ends and not 0 < ends[0] <= ends[-1] <= length:
                raise ValueError(f"trajectory {self.trajectory.id}: steps end at {ends} in a turn of {length} tokens")
        return per_turn

    def states(self) -> list[str | None]:
        """Return the state in which each turn was taken (`Score.states`); None for a turn without one."""
        return self._turn_values("states", self.score.states_of(self.trajectory.role), None)

    def read(self, name: Annotation, rule: str) -> list[float]:
        """Return the values of an annotation at each step; refuse a row without the annotation (`BadInput`, which names
        `rule`)."""
        for row in self.rows:
            if name not in row.annotations:
                fix = "add the annotator that writes it to the stage, or choose another credit"
                raise refusal(
                    f"[algo] credit {rule!r}", f"an annotation '{name}' on every sample", f"none on {row.id}", fix
                )
        columns = [row.annotations[name] for row in self.rows]
        return [columns[row][at] for turn in self.steps() for row, at in turn]

    def logprobs(self) -> list[float]:
        """Return the recorded log-probability of each step."""
        recorded = [row.logprobs or () for row in self.rows]
        return [recorded[row][at] for turn in self.steps() for row, at in turn]

    def succession(self) -> Succession:
        """Return the order of the trajectory's turns along branches and links."""
        return succession(self.trajectory)

    def following(self) -> list[int | None]:
        """Return for each step the number of the next step; None at the end."""
        return self.succession().behind([len(turn) for turn in self.steps()])

    def earned(self, values: Sequence[float], discount: float, rest: float = 0.0) -> list[float]:
        """Add to the steps' values the rewards of side branches and the rest of the outcome; see
        `Succession.earned`."""
        remaining = iter(values)
        by_turn = [[next(remaining) for _ in turn] for turn in self.steps()]
        return [value for turn in self.succession().earned(by_turn, discount, rest) for value in turn]

    def step_rewards(self, discount: float) -> list[float]:
        """Return the reward of each step, such that its return along `following` counts every reward once.

        A step's reward is its own (annotation `reward`), plus the rewards of `per_step` that end at it. The last step
        of a turn also gets the rest of the turn's reward and the rewards of side branches, discounted per step. The
        last step of the trajectory also gets the rest of the outcome.
        """
        steps, turns = self.steps(), self.per_turn()
        parts = [()] * len(turns) if self.score.per_step is None else self.per_step()
        flat = [step for turn in steps for step in turn]
        if not flat:
            return []
        own = [row.annotations.get(Annotation.REWARD) or (0.0,) * len(row.tokens) for row in self.rows]
        rewards = [own[row][at] for row, at in flat]
        last = -1
        for turn, reward, of_turn in zip(steps, turns, parts, strict=True):
            for end, earned in of_turn if turn else ():
                rewards[last + end] += earned
            last += len(turn)
            if turn:
                rewards[last] += reward - math.fsum(earned for _, earned in of_turn)
        rest = self.outcome - math.fsum(reward for turn, reward in zip(steps, turns, strict=True) if turn)
        return self.earned(rewards, discount, rest)

    def with_steps(self, values: Sequence[float], name: Annotation | None = None) -> tuple[Sample, ...]:
        """Return the member's rows with one value per step, as advantages or as the annotation `name`; 0.0 at other
        tokens."""
        written = [[0.0] * len(row.tokens) for row in self.rows]
        for (row, at), value in zip((step for turn in self.steps() for step in turn), values, strict=True):
            written[row][at] = value
        if name is not None:
            return tuple(row.annotated(name, tuple(v)) for row, v in zip(self.rows, written, strict=True))
        return tuple(replace(row, advantages=tuple(v)) for row, v in zip(self.rows, written, strict=True))

    def with_turns(self, values: Sequence[float]) -> tuple[Sample, ...]:
        """Return the member's rows with one advantage per turn, the same at all steps of the turn."""
        return self.with_steps([value for value, steps in zip(values, self.steps(), strict=True) for _ in steps])

    def with_advantage(self, value: float) -> tuple[Sample, ...]:
        """Return the member's rows with the same advantage at every step."""
        return tuple(
            replace(row, advantages=tuple([value if weight else 0.0 for weight in row.weights["policy"]]))
            for row in self.rows
        )

    def _turn_values(self, what: str, values: Sequence[T] | None, absent: T) -> list[T]:
        count = len(self.trajectory.turns)
        if values is None:
            return [absent] * count
        if len(values) != count:
            raise ValueError(
                f"trajectory {self.trajectory.id}: the score has {len(values)} {what} for {count} sampled turns"
            )
        return list(values)


Rule = Callable[[Sequence[Member]], Sequence[float] | None]
"""Credit rule per role: members to compare -> one advantage for each, or None if they cannot be compared."""


TurnRule = Callable[[Sequence[Member]], Sequence[Sequence[float]] | None]
"""Credit rule per role: members to compare -> for each one advantage per turn, or per step; None if they cannot be
compared."""


def members(group: Group, rows: Sequence[Sample]) -> list[Member]:
    """List the trajectories of a group, by rollout and role.

    Failed rollouts are no members. Neither is a role without turns in a rollout of several roles: its reward must not
    enter the baseline of others.

    Raises:
        ValueError: a row belongs to no trajectory of the group; or, in a rollout of several roles, the reward or state
            of a turn names no role.
    """
    by_trajectory: dict[str, list[Sample]] = {}
    for row in rows:
        by_trajectory.setdefault(row.trajectory, []).append(row)
    all_members = []
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        if len(rollout.trajectories) > 1 and (score.per_turn is not None or score.states is not None):
            raise ValueError(f"rollout {rollout.id}: expected per_role_turns and per_role_states, got turns of no role")
        for trajectory in rollout.trajectories:
            if not trajectory.segments and len(rollout.trajectories) > 1:
                continue
            own = tuple(by_trajectory.pop(trajectory.id, ()))
            all_members.append(Member(trajectory=trajectory, rollout=rollout.id, score=score, rows=own))
    if by_trajectory:
        raise ValueError(
            f"group {group.id}: sample {next(iter(by_trajectory.values()))[0].id} belongs to none of its trajectories"
        )
    return all_members


def by_role(members_of_roles: Sequence[Member]) -> dict[str, list[Member]]:
    """Divide members into sets to compare, one per role."""
    roles: dict[str, list[Member]] = {}
    for member in members_of_roles:
        roles.setdefault(member.trajectory.role, []).append(member)
    return roles


def per_trajectory(groups: Sequence[Group], samples: Sequence[Sequence[Sample]], rule: Rule) -> list[list[Sample]]:
    """Set one advantage for all tokens of a trajectory, comparing it with the group's trajectories of the same role.

    A role for which the rule returns None gets 0.0; a group in which each role gets None leaves the update.
    """
    return [
        _credit_group(group, rows, rule, Member.with_advantage) for group, rows in zip(groups, samples, strict=True)
    ]


def per_turn(groups: Sequence[Group], samples: Sequence[Sequence[Sample]], rule: TurnRule) -> list[list[Sample]]:
    """Set one advantage for all tokens of each turn; otherwise like `per_trajectory`."""
    return [_credit_group(group, rows, rule, Member.with_turns) for group, rows in zip(groups, samples, strict=True)]


def per_token(groups: Sequence[Group], samples: Sequence[Sequence[Sample]], rule: TurnRule) -> list[list[Sample]]:
    """Set one advantage for each step, turn by turn; otherwise like `per_trajectory`."""
    return [_credit_group(group, rows, rule, Member.with_steps) for group, rows in zip(groups, samples, strict=True)]


def _credit_group(
    group: Group,
    rows: Sequence[Sample],
    rule: Callable[[Sequence[Member]], Sequence[T] | None],
    write: Callable[[Member, T], tuple[Sample, ...]],
) -> list[Sample]:
    advantages: dict[str, T] = {}
    everyone = members(group, rows)
    for role in by_role(everyone).values():
        values = rule(role)
        if values is not None:
            advantages |= {m.trajectory.id: value for m, value in zip(role, values, strict=True)}
    return set_advantages(rows, everyone, advantages, write)


def set_advantages(
    rows: Sequence[Sample],
    everyone: Sequence[Member],
    advantages: Mapping[str, T],
    write: Callable[[Member, T], tuple[Sample, ...]],
) -> list[Sample]:
    """Set the advantages of a group's members, and return its rows in order.

    Args:
        advantages: advantages by trajectory; a member without any gets 0.0. If no member has any, the group leaves the
            update: the list is empty.
        write: method of `Member` that writes its advantage into its rows.
    """
    values = [advantages.get(m.trajectory.id) for m in everyone]
    if all(value is None for value in values):
        return []
    pairs = zip(everyone, values, strict=True)
    by_id = {row.id: row for m, v in pairs for row in (m.with_advantage(0.0) if v is None else write(m, v))}
    return [by_id[row.id] for row in rows]


def any_scored(groups: Sequence[Group]) -> bool:
    """Return whether the world scored any rollout of the groups, that is, whether the policy did not break them all."""
    return any(rollout.outcome.kind != "policy_failed" for group in groups for rollout in group.rollouts)


def _step_values(row: Sample, values: Sequence[float] | None) -> Iterable[float]:
    """Select a row's values at its steps; empty if there are no values."""
    return compress(values or (), row.weights["policy"])


def returns(rewards: Sequence[float], discount: float, following: Sequence[int | None]) -> list[float]:
    """Compute the reward to go: G_t = r_t + discount * G_next, with 0 after the end. `following` is the number of each
    step's next step, which comes later in `rewards`; None at the end."""
    to_go = [0.0] * len(rewards)
    for step in reversed(range(len(rewards))):
        after = following[step]
        to_go[step] = rewards[step] + discount * (0.0 if after is None else to_go[after])
    return to_go
