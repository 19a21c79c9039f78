"""All rules that `[algo]` can name, by part. A new rule is its own file and one line here."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import msgspec

from sparring.algo.base import name_of
from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.gae import Gae
from sparring.algo.credit.gdpo import Gdpo
from sparring.algo.credit.gigpo import Gigpo
from sparring.algo.credit.gpg import Gpg
from sparring.algo.credit.grpo import Grpo
from sparring.algo.credit.hierarchical import Hierarchical
from sparring.algo.credit.maxrl import MaxRl
from sparring.algo.credit.opo import Opo
from sparring.algo.credit.optimal_token_baseline import OptimalTokenBaseline
from sparring.algo.credit.pass_at_k import PassAtK
from sparring.algo.credit.prime import Prime
from sparring.algo.credit.process import Process
from sparring.algo.credit.rae import Rae
from sparring.algo.credit.raft import Raft
from sparring.algo.credit.raft_plus_plus import RaftPlusPlus
from sparring.algo.credit.reinforce import Reinforce
from sparring.algo.credit.reinforce_plus_plus import ReinforcePlusPlus
from sparring.algo.credit.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from sparring.algo.credit.rejection import Rejection
from sparring.algo.credit.remax import Remax
from sparring.algo.credit.rloo import Rloo
from sparring.algo.credit.topr import Topr
from sparring.algo.credit.turn_level import TurnLevel
from sparring.algo.gate.cispo import Cispo
from sparring.algo.gate.clip import Clip
from sparring.algo.gate.clip_cov import ClipCov
from sparring.algo.gate.dual_clip import DualClip
from sparring.algo.gate.geometric import Geometric
from sparring.algo.gate.kl_cov import KlCov
from sparring.algo.gate.kl_mask import KlMask
from sparring.algo.gate.m2po import M2po
from sparring.algo.gate.none import NoGate
from sparring.algo.gate.sapo import Sapo
from sparring.algo.gate.topr import ToprGate
from sparring.algo.gate.tv_mask import TvMask
from sparring.algo.gate.vespo import Vespo
from sparring.algo.ratio import ProductRatio, SequenceRatio, TokenRatio, TurnRatio
from sparring.algo.shaping.linear_length import LinearLength
from sparring.algo.shaping.overlong import Overlong
from sparring.algo.shaping.relative_length import RelativeLength
from sparring.algo.shaping.stop_properly import StopProperly

CreditRule = (
    Grpo
    | Gae
    | Gdpo
    | Gigpo
    | Gpg
    | Hierarchical
    | MaxRl
    | Opo
    | OptimalTokenBaseline
    | PassAtK
    | Prime
    | Process
    | Rae
    | Raft
    | RaftPlusPlus
    | Reinforce
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | Rejection
    | Remax
    | Rloo
    | Topr
    | TurnLevel
)
"""Choices of `[algo] credit`."""

RatioRule = TokenRatio | SequenceRatio | TurnRatio | ProductRatio
"""Choices of `[algo] ratio`."""

GateRule = (
    Clip | DualClip | Cispo | Sapo | TvMask | KlMask | Geometric | ClipCov | KlCov | Vespo | M2po | ToprGate | NoGate
)
"""Choices of `[algo] gate`."""

ShapingRule = LinearLength | Overlong | RelativeLength | StopProperly
"""Choices for each entry of `[algo] shaping`."""

DEFAULT_CREDIT, DEFAULT_RATIO, DEFAULT_GATE = Grpo(), TokenRatio(), Clip()


def rules(union: Any) -> tuple[type[msgspec.Struct], ...]:
    """List the rules of a union, in its order."""
    return typing.get_args(union) or (union,)


RULES: dict[str, msgspec.Struct] = {"credit": DEFAULT_CREDIT, "ratio": DEFAULT_RATIO, "gate": DEFAULT_GATE}
"""Default rule of each part that is chosen by name."""

RULES_BY_KEY = {"credit": rules(CreditRule), "ratio": rules(RatioRule), "gate": rules(GateRule)}
"""All rules of each part that is chosen by name."""


def credits_with(fact: Callable[[type[BaseCredit]], bool]) -> list[str]:
    """List the names of the credit rules for which `fact` holds, sorted."""
    credits: tuple[Any, ...] = rules(CreditRule)
    return sorted(name_of(rule) for rule in credits if fact(rule))
