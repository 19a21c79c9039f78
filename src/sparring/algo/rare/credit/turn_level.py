"""Turn-level advantages in addition to the outcome's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, any_scored, per_turn
from sparring.algo.credit.statistics import standardised
from sparring.algo.credit.succession import Address
from sparring.errors import refusal
from sparring.types import Group, Sample


class TurnLevel(BaseCredit, frozen=True, kw_only=True, tag="turn_level"):
    """MT-GRPO: a turn is compared with the same turn of the sibling rollouts, an outcome with the siblings' outcomes.

        A^T_i,k = (r_i,k - mean_i(r_i,k)) / (std_i(r_i,k) + epsilon)    over members with a turn k before their last
        o_i     = reward_i - sum_{k < K} r_i,k                          includes the reward of the last turn K
        A^O_i   = (o_i - mean(o)) / (std(o) + epsilon)
        A_i,k   = A^T_i,k + outcome_weight * A^O_i                         before the last turn
        A_i,K   = A^O_i                                                    in the last turn

    Zeng et al., arXiv 2505.11821 (version 1), section 4.2, with any number of turns. Use it if every turn can be
    verified, such as tool calls before an answer. `Score.per_turn` has the rewards of turns. Turns are counted along
    the main chain. In a side branch the count continues from the turn that the branch hangs on (`succession`). A group
    of one leaves the update.
    """

    least_members: ClassVar[int] = 2
    sees_one_group: ClassVar[bool] = True
    tells_turns_apart: ClassVar[bool] = True

    outcome_weight: float = 1.0
    """Weight of the outcome's advantage in turns before the last."""

    epsilon: float = 1e-6
    """Constant added to standard deviations."""

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        want_turns(groups, "turn_level")
        return per_turn(groups, samples, self._role_advantages)

    def _role_advantages(self, role: Sequence[Member]) -> list[list[float]] | None:
        if len(role) < 2:
            return None
        orders, turns = [m.succession() for m in role], [m.per_turn() for m in role]
        earlier = [[turn for turn in range(len(o.following)) if turn not in o.main[-1:]] for o in orders]
        outcomes = standardised(
            [m.reward - sum(of[k] for k in ks) for m, of, ks in zip(role, turns, earlier, strict=True)],
            epsilon=self.epsilon,
        )
        values = [[o] * len(rewards) for o, rewards in zip(outcomes, turns, strict=True)]
        members_at: dict[Address, list[tuple[int, int]]] = {}
        for number, (order, ks) in enumerate(zip(orders, earlier, strict=True)):
            addresses = order.addresses()
            for k in ks:
                members_at.setdefault(addresses[k], []).append((number, k))
        for peers in members_at.values():
            normal = standardised([turns[number][k] for number, k in peers], epsilon=self.epsilon)
            for (number, k), value in zip(peers, normal, strict=True):
                values[number][k] = value + self.outcome_weight * outcomes[number]
        return values


def want_turns(groups: Sequence[Group], rule: str) -> None:
    """Refuse an update in which no score has rewards per turn, unless the policy broke every rollout."""
    if any_scored(groups) and all(score.per_turn is None for group in groups for score in group.scores):
        fix = "have the environment or a process reward model give them, or choose 'grpo'"
        raise refusal(f"[algo] credit {rule!r}", "scores with rewards per turn", "none in the whole update", fix)
