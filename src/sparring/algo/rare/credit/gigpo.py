"""GiGPO: turns taken in the same state are compared with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, any_scored, per_turn, returns
from sparring.algo.credit.statistics import centred, standardised
from sparring.errors import refusal
from sparring.types import Group, Sample


class Gigpo(BaseCredit, frozen=True, kw_only=True, tag="gigpo"):
    """GiGPO: the episode's advantage, plus the advantage of each turn over the group's turns that were taken in the
    same state.

        A^E_i   = (R_i - mean(R)) / F                           over the members
        G_i,t   = sum_{s >= t} discount^(s - t) * r_i,s         over the turns; the outcome's rest is earned at the end
        A^S_i,t = (G_i,t - mean(G)) / F                         over the turns with the same state key (anchor state)
        A_i,t   = A^E_i + step_weight * A^S_i,t                 for every token of the turn

    Feng et al., arXiv 2505.10978. F is the standard deviation + epsilon, or 1. `Score.states` names the states; a turn
    whose state is unnamed or occurs once has no A^S. The next turn is the one that follows on the branch or along a
    link; rewards of side branches are part of r of the turn that started them. Use it for long multi-turn tasks whose
    episodes revisit states. A group of one leaves the update unless it revisits a state.
    """

    least_members: ClassVar[int] = 2
    sees_one_group: ClassVar[bool] = True
    tells_turns_apart: ClassVar[bool] = True

    discount: float = 0.95
    """Discount per turn."""

    step_weight: float = 1.0
    """Weight of the turn's advantage; the episode's has weight 1."""

    divide: bool = True
    """Divide by standard deviations. False: F is 1."""

    epsilon: float = 1e-6
    """Constant added to standard deviations."""

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Set advantages; refuse an update in which no score names a state (`BadInput`)."""
        if any_scored(groups) and not any(score.states for group in groups for score in group.scores):
            fix = "have the environment's score name them, or choose 'grpo'"
            raise refusal(
                "[algo] credit 'gigpo'", "scores with the states of their turns", "none in the whole update", fix
            )
        return per_turn(groups, samples, self._role_advantages)

    def _role_advantages(self, role: Sequence[Member]) -> list[list[float]] | None:
        episodes = self._normalise([m.reward for m in role])
        to_go = [self._rewards_to_go(m) for m in role]
        places: dict[str, list[tuple[int, int]]] = {}
        for number, m in enumerate(role):
            for turn, state in enumerate(m.states()):
                if state is not None:
                    places.setdefault(state, []).append((number, turn))
        if len(role) < 2 and all(len(same_state) < 2 for same_state in places.values()):
            return None
        turns = [[episode] * len(member_returns) for episode, member_returns in zip(episodes, to_go, strict=True)]
        for same_state in places.values():
            for (number, turn), value in zip(
                same_state, self._normalise([to_go[n][t] for n, t in same_state]), strict=True
            ):
                turns[number][turn] += self.step_weight * value
        return turns

    def _rewards_to_go(self, member: Member) -> list[float]:
        order, rewards = member.succession(), member.per_turn()
        rest = member.reward - sum(rewards)
        earned = order.earned([[reward] for reward in rewards], self.discount, rest)
        return returns([value for [value] in earned], self.discount, order.following)

    def _normalise(self, values: Sequence[float]) -> list[float]:
        return standardised(values, epsilon=self.epsilon) if self.divide else centred(values)
