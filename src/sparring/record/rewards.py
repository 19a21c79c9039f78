"""Rewards that a rollout gets from outside: given by a program elsewhere, for the rollout, a turn or a branch."""

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
    """A reward names a reply that this rollout did not get."""


class RewardConflict(BadInput):
    """A reward bears the id of another reward."""


class RewardsClosed(BadInput):
    """The run takes no rewards from outside, or none under this key."""


class RewardExpired(BadInput):
    """A reward came after the rollout was scored."""


class OutsideReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Reward as it was given."""

    reward: float | None
    """None: not scored, which is not 0. Of a turn or a branch it is a number."""

    of: str | None = None
    """Id of a reply; None: of the rollout."""

    branch: bool = False
    """True: of the branch that the reply stands in, earned where that ends; False: of the reply alone."""

    parts: dict[str, float] = {}
    """Named components, for reports."""

    final: bool | None = None
    """True: no other is awaited; None: the rollout's is final, those of turns and branches are not."""

    id: str = ""
    """Id of the reward itself: the same one twice counts once, whatever came between; empty: none."""

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
        """True where no other reward is awaited after it."""
        return self.of is None if self.final is None else self.final


class OutsideRewards:
    """Rewards of one attempt at a rollout of one role. The latest of a target counts: of the rollout, of each reply, of
    each branch.

    Args:
        trajectory: id of the attempt's trajectory.
        within_s: seconds for which rewards are awaited.
        by_sampler: whether the key under which the rollout samples may give them, too.
        before: rewards that an earlier process took for this attempt, in order.
        record: makes a reward durable; it counts when this has returned.
        expire: called for each reward that comes too late.

    Attributes:
        offered: whether a client got a key under which it can give them.
        closed: whether they come too late.
        by_sampler: as above.
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
        """True where no other reward is awaited."""
        return self._final.is_set()

    def give(self, reward: OutsideReward) -> None:
        """Take a reward, and make it durable.

        Raises:
            RewardExpired: the rollout is scored.
            RewardConflict: another one bears its id.
            StoreError: it cannot be made durable; it does not count.
        """
        if self.closed:
            self._expire()
            do = "send it earlier, or raise rollout.rewards_within_s"
            raise RewardExpired(str(refusal("reward", "one that comes in time", "expired", do)))
        same = self._by_id.get(reward.id) if reward.id else self._by_target.get((reward.of, reward.branch))
        if same == reward:
            return
        if reward.id and same is not None:
            do = "give each reward an id of its own"
            raise RewardConflict(str(refusal("id", "that of no other reward", repr(reward.id), do)))
        self._record(msgspec.to_builtins(reward))
        self._take(reward)

    def when_closed(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Have a function called when rewards are awaited no more; what holds the key to them."""
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
        """Take no more. Safe to call twice."""
        self.closed = True
        while self._closers:
            await self._closers.pop()()

    def score(self, score: Score, trajectory: Trajectory) -> Score:
        """Return the score with these rewards in the place of the world's: not scored where the final one has not come,
        or says so. Where the rollout itself was given none, its reward is the sum of those of its turns and branches.

        Args:
            score: the world's; its parts and its success stay.
            trajectory: of the attempt.
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
        """Return the number of rewards for replies and branches of a trajectory that count for nothing: the reply is
        lost or auxiliary, or none of it."""
        turns = {segment.index for segment in trajectory.turns}
        earning = [(_segment_of(trajectory, r.of), r.branch) for r in self._by_target.values() if r.of is not None]
        ends = [s and (_end_of_branch(trajectory, s) if branch else s) for s, branch in earning]
        return sum(end is None or end.index not in turns for end in ends)

    def _take(self, reward: OutsideReward) -> None:
        """Let a reward count."""
        self._by_target[reward.of, reward.branch] = reward
        if reward.id:
            self._by_id[reward.id] = reward
        if reward.ends:
            self._final.set()


def _segment_of(trajectory: Trajectory, reply: str) -> Segment | None:
    """Return the segment of a reply, by the reply's id, which bears the place of its request."""
    place = reply.rpartition("#")[2]
    for segment in trajectory.segments:
        if segment.model is not None and place == str(segment.index if segment.place is None else segment.place):
            return segment
    return None


def _end_of_branch(trajectory: Trajectory, segment: Segment) -> Segment:
    """Return the last turn of the branch that a reply stands in: of several that go on from it, the latest; the reply
    itself where none does."""
    below, end = {segment.index}, segment
    for later in trajectory.segments:
        if later.parent in below:
            below.add(later.index)
            end = later if later.is_turn else end
    return end
