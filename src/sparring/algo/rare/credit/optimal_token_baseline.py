"""Optimal token baseline: each position has a baseline of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, by_role, members, returns, set_advantages
from sparring.algo.credit.succession import Address, StepPlace
from sparring.annotations import Annotation
from sparring.types import Group, Sample, alike


class OptimalTokenBaseline(BaseCredit, frozen=True, kw_only=True, tag="optimal_token_baseline"):
    """Optimal token baseline: returns are compared per position, weighted by the squared gradient norms summed up to
    the position.

        w_i,t = 1 - 2 * p(y_t) + sum_v p(v)^2            squared norm of the gradient in the logits
        W_i,t = sum_{s <= t} w_i,s                       along the branch, including the turn that started it
        B_t   = sum_i W_i,t * G_i,t / sum_i W_i,t        over the members that have a token at position t
        A_i,t = G_i,t - B_t                              G: reward to go

    Li et al., arXiv 2602.07078. p(y_t) is the recorded probability of the sampled token; the annotation
    `probability_squares` is the sum over the vocabulary at that position. Use it for long rollouts with small groups.
    At a position that only one member reached, the equation compares this member with itself. The authors' code by
    default takes 0 as the baseline of such a position (`zero_tail`). A group of one leaves the update.
    """

    least_members: ClassVar[int] = 2
    tells_turns_apart: ClassVar[bool] = True
    reads: ClassVar[tuple[Annotation, ...]] = (Annotation.PROBABILITY_SQUARES,)

    zero_tail: bool = True
    """Use a baseline of 0 at positions that only one member reached. False: the advantage there is 0."""

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        credited = []
        for group, rows in zip(groups, samples, strict=True):
            everyone = members(group, rows)
            values: dict[str, list[float]] = {}
            for role in by_role(everyone).values():
                values |= self._role_advantages([m for m in role if m.rows])
            credited.append(set_advantages(rows, everyone, values, Member.with_steps))
        return credited

    def _role_advantages(self, role: Sequence[Member]) -> dict[str, list[float]]:
        if len(role) < 2:
            return {}
        to_go = [returns(m.step_rewards(1.0), 1.0, m.following()) for m in role]
        places = [m.succession().steps([len(turn) for turn in m.steps()]) for m in role]
        weights = [_cumulative_weights(m, of) for m, of in zip(role, places, strict=True)]
        values = [list(own) for own in to_go]
        members_at: dict[Address, list[tuple[int, int]]] = {}
        for number, of_member in enumerate(places):
            for t, place in enumerate(of_member):
                members_at.setdefault(place.address, []).append((number, t))
        for peers in members_at.values():
            if len(peers) == 1 and self.zero_tail:
                continue  # its advantage is its return
            total = math.fsum(weights[n][t] for n, t in peers)
            equal = alike([to_go[n][t] for n, t in peers])
            baseline = math.fsum(weights[n][t] * to_go[n][t] for n, t in peers) / total if total > 0 else 0.0
            for n, t in peers:
                values[n][t] = 0.0 if equal else to_go[n][t] - baseline
        return {m.trajectory.id: own for m, own in zip(role, values, strict=True)}


def _cumulative_weights(member: Member, places: Sequence[StepPlace]) -> list[float]:
    squares = member.read(Annotation.PROBABILITY_SQUARES, "optimal_token_baseline")
    totals: list[float] = []
    for logprob, square, place in zip(member.logprobs(), squares, places, strict=True):
        before = 0.0 if place.before is None else totals[place.before]
        totals.append(before + (1 - 2 * math.exp(logprob) + square))
    return totals
