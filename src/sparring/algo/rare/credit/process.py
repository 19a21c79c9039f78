"""GRPO with process supervision."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, per_token, returns
from sparring.algo.credit.statistics import standardised
from sparring.algo.credit.succession import Values
from sparring.algo.rare.credit.turn_level import want_turns
from sparring.types import Group, Sample


class Process(BaseCredit, frozen=True, kw_only=True, tag="process"):
    """GRPO's process supervision: a token's advantage is the sum of normalised step rewards from its step on.

        r~_i,k = (r_i,k - mean(r)) / (std(r) + epsilon)      over all steps of all members
        A_i,t  = sum of r~_i,k over the steps k that end at or after token t, along branches and links

    Shao et al. (DeepSeekMath), arXiv 2402.03300, section 4.1.3. Steps come from `Score.per_step`. Without it each turn
    is one step, with its reward in `Score.per_turn`. A process reward model or the world sets these rewards. The
    outcome itself does not count. Use it with a process reward model. A group with a single step leaves the update.
    """

    least_members: ClassVar[int] = 1
    sees_one_group: ClassVar[bool] = True
    tells_turns_apart: ClassVar[bool] = True
    counts_token_rewards: ClassVar[bool] = False

    epsilon: float = 1e-6
    """Constant added to the standard deviation."""

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        want_turns(groups, "process")
        return per_token(groups, samples, self._role_advantages)

    def _role_advantages(self, role: Sequence[Member]) -> list[list[float]] | None:
        per_member = [m.per_step() for m in role]
        rewards = [reward for turns in per_member for turn in turns for _, reward in turn]
        if len(rewards) < 2:
            return None
        normal = iter(standardised(rewards, epsilon=self.epsilon))
        # an empty step at the end of each turn holds the tokens after the last rewarded one
        rewarded = [[[*(next(normal) for _ in turn), 0.0] for turn in turns] for turns in per_member]
        return [
            _token_advantages(m, turns, values) for m, turns, values in zip(role, per_member, rewarded, strict=True)
        ]


def _token_advantages(member: Member, turns: Sequence[Sequence[tuple[int, float]]], rewards: Values) -> list[float]:
    """Return for each token the reward to go from its step on; outside all steps, from the next step on."""
    order = member.succession()
    earned = [value for turn in order.earned(rewards, 1.0) for value in turn]
    to_go = returns(earned, 1.0, order.behind([len(turn) for turn in rewards]))
    per_token_values, first = [], 0
    for tokens, steps in zip(member.steps(), turns, strict=True):
        ends = [end for end, _ in steps]
        per_token_values += [to_go[first + bisect_right(ends, position)] for position in range(len(tokens))]
        first += len(steps) + 1
    return per_token_values
