"""External rewards of a rollout: given by another program, for the rollout, a turn or a branch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from sparring.errors import BadInput, refusal
from sparring.types import Score, Segment, Trajectory


class UnknownReply(BadInput):
    """Error of a reward for a reply that the rollout does not have."""


class RewardConflict(BadInput):
    """Error of a reward with the id of another reward."""


class RewardsClosed(BadInput):
    """Error of a reward in a run that takes no external rewards, or does not take rewards under this key."""


class RewardExpired(BadInput):
    """Error of a reward that arrives after the rollout was scored."""


class OutsideReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """External reward."""

    reward: float | None
    """Value of the reward; None: the rollout is not scored, which is different from 0. A turn or a branch needs a
    number."""

    of: str | None = None
    """Id of a reply; None: the reward is for the rollout."""

    branch: bool = False
    """True: the reward is for the branch of the reply, and counts at the end of that branch; False: for the reply
    alone."""

    parts: dict[str, float] = {}
    """Named components, for reports."""

    final: bool | None = None
    """True: the rollout waits for no further reward; None: true for the rollout's reward, false for turns and
    branches."""

    id: str = ""
    """Id of the reward, by which a repeated reward counts once; empty: no id."""

    def __post_init__(self) -> None:
        if self.branch and self.of is None:
            raise ValueError("branch needs of, the id of a reply in the branch")
        if self.of is not None and self.reward is None:
            raise ValueError("reward of a reply must be a number; None (not scored) is the rollout's alone")
        for name, value in {"reward": self.reward or 0.0, **self.parts}.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value}")

    @property
    def ends(self) -> bool:
        """Whether this reward is final: the rollout waits for no further reward."""
        return self.of is None if self.final is None else self.final


class OutsideRewards:
    """External rewards of one attempt at a rollout of one role. The latest reward counts for each target: the rollout,
    each reply, each branch.

    Args:
        trajectory: id of the attempt's trajectory.
        within_s: seconds to wait for rewards.
        by_sampler: whether the key that samples may give rewards as well.
        before: rewards that an earlier process stored for this attempt, in order.
        record: function that stores a reward; the reward counts when the function returns.
        expire: function that is called for each late reward.

    Attributes:
        offered: whether a client got a key that can give rewards.
        closed: whether further rewards are refused as late.
    """

    def __init__(
        self,
        trajectory: str,
        within_s: float,
        *,
        by_sampler: bool = False,
        before: Sequence[Mapping[str, Any]] = (),
        record: Callable[[Mapping[str, Any]], None] = lambda data: None,
        expire: Callable[[], None] = lambda: None,
    ) -> None:
        self.trajectory = trajectory
        self.offered = self.closed = False
        self.by_sampler = by_sampler
        self._within_s = within_s
        self._record, self._expire = record, expire
        self._final = asyncio.Event()
        self._by_target: dict[tuple[str | None, bool], OutsideReward] = {}
        self._by_id: dict[str, OutsideReward] = {}
        self._closers: list[Callable[[], Awaitable[None]]] = []
        for data in before:
            self._take(msgspec.convert(data, OutsideReward))

    @property
    def final(self) -> bool:
        """Whether the final reward has come."""
        return self._final.is_set()

    def give(self, reward: OutsideReward) -> None:
        """Store a reward.

        Raises:
            RewardExpired: the rollout is already scored.
            RewardConflict: another reward has the same id.
            StoreError: the reward could not be stored, and does not count.
        """
        if self.closed:
            self._expire()
            remedy = "send it earlier, or raise rollout.rewards.within_s"
            raise RewardExpired(str(refusal("reward", "one that comes in time", "expired", remedy)))
        same = self._by_id.get(reward.id) if reward.id else self._by_target.get((reward.of, reward.branch))
        if same == reward:
            return
        if reward.id and same is not None:
            remedy = "give each reward an id of its own"
            raise RewardConflict(str(refusal("id", "that of no other reward", repr(reward.id), remedy)))
        self._record(msgspec.to_builtins(reward))
        self._take(reward)

    def when_closed(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Register a function to call when no more rewards are accepted, and note that a reward key exists."""
        self.offered = True
        self._closers.append(closer)

    async def wait(self) -> bool:
        """Wait for the final reward, and return whether it came in time."""
        try:
            async with asyncio.timeout(self._within_s):
                await self._final.wait()
        except TimeoutError:
            pass
        return self.final

    async def close(self) -> None:
        """Accept no more rewards. May be called twice."""
        self.closed = True
        while self._closers:
            await self._closers.pop()()

    def score(self, score: Score, trajectory: Trajectory) -> Score:
        """Return the score with these rewards instead of the world's.

        The rollout is not scored if the final reward has not come, or is None. Without a reward for the rollout itself,
        its reward is the sum over turns and branches. `score`: score of the world; its parts and its success are kept.
        """
        parts = dict(score.parts)
        for reward in self._by_target.values():
            parts.update(reward.parts)
        of_rollout = self._by_target.get((None, False))
        unscored = replace(score, reward=None, parts=parts, per_turn=None, per_step=None)
        if not self.final or of_rollout is not None and of_rollout.reward is None:
            return unscored
        turns = trajectory.turns
        numbers = {segment.index: number for number, segment in enumerate(turns)}
        earned = [0.0] * len(turns)
        of_turns = False
        for reward in self._by_target.values():
            segment = None if reward.of is None else _segment_of(trajectory, reward.of)
            if segment is None or reward.reward is None:
                continue
            earning = _end_of_branch(trajectory, segment) if reward.branch else segment
            if earning.index in numbers:  # a lost or an auxiliary reply earns nothing
                earned[numbers[earning.index]] += reward.reward
                of_turns = True
        total = math.fsum(earned) if of_rollout is None else of_rollout.reward
        return replace(unscored, reward=total, per_turn=tuple(earned) if of_turns else None)

    def of_no_turn(self, trajectory: Trajectory) -> int:
        """Return the number of rewards for replies and branches that have no effect, because the reply is unknown, lost
        or auxiliary."""
        turns = {segment.index for segment in trajectory.turns}
        earning = [(_segment_of(trajectory, r.of), r.branch) for r in self._by_target.values() if r.of is not None]
        ends = [s and (_end_of_branch(trajectory, s) if branch else s) for s, branch in earning]
        return sum(end is None or end.index not in turns for end in ends)

    def _take(self, reward: OutsideReward) -> None:
        self._by_target[reward.of, reward.branch] = reward
        if reward.id:
            self._by_id[reward.id] = reward
        if reward.ends:
            self._final.set()


def _segment_of(trajectory: Trajectory, reply: str) -> Segment | None:
    place = reply.rpartition("#")[2]
    for segment in trajectory.segments:
        if segment.model is not None and place == str(segment.index if segment.place is None else segment.place):
            return segment
    return None


def _end_of_branch(trajectory: Trajectory, segment: Segment) -> Segment:
    """Return the latest turn that follows a reply, on any of its branches; the reply itself if no turn follows."""
    below, end = {segment.index}, segment
    for later in trajectory.segments:
        if later.parent in below:
            below.add(later.index)
            end = later if later.is_turn else end
    return end
