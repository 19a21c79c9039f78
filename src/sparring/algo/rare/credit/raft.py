"""RAFT: imitates the best of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member


class Raft(BaseCredit, frozen=True, kw_only=True, tag="raft"):
    """RAFT: the best of the group are imitated, the others ignored.

        A_i = 1 if r_i is among the `best` highest of the group, else 0      ties go to the earlier member

    Dong et al., arXiv 2304.06767, algorithm 1. Use it with several optimiser steps per batch and no ratio, as
    supervised learning on samples. The best are imitated even if all fail; `raft_plus_plus` imitates successes only.
    """

    least_members: ClassVar[int] = 1
    sees_one_group: ClassVar[bool] = True

    best: int = 1
    """Number of imitated members per group."""

    def __post_init__(self) -> None:
        if self.best < 1:
            raise ValueError(f"best must be at least 1, got {self.best}")

    def advantages(self, members: Sequence[Member]) -> list[float]:
        order = sorted(range(len(members)), key=lambda at: (-members[at].reward, at))
        best = set(order[: self.best])
        return [1.0 if at in best else 0.0 for at in range(len(members))]
