"""All rules that `[algo]` can name, by part. A new rule is its own file and one line here."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import msgspec

from sparring.algo.base import name_of
from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.gae import Gae
from sparring.algo.credit.grpo import Grpo
from sparring.algo.credit.reinforce import Reinforce
from sparring.algo.credit.reinforce_plus_plus import ReinforcePlusPlus
from sparring.algo.credit.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from sparring.algo.credit.remax import Remax
from sparring.algo.credit.rloo import Rloo
from sparring.algo.gate.cispo import Cispo
from sparring.algo.gate.clip import Clip
from sparring.algo.gate.dual_clip import DualClip
from sparring.algo.gate.none import NoGate
from sparring.algo.gate.sapo import Sapo
from sparring.algo.rare.credit.gdpo import Gdpo
from sparring.algo.rare.credit.gigpo import Gigpo
from sparring.algo.rare.credit.gpg import Gpg
from sparring.algo.rare.credit.hierarchical import Hierarchical
from sparring.algo.rare.credit.maxrl import MaxRl
from sparring.algo.rare.credit.opo import Opo
from sparring.algo.rare.credit.optimal_token_baseline import OptimalTokenBaseline
from sparring.algo.rare.credit.pass_at_k import PassAtK
from sparring.algo.rare.credit.prime import Prime
from sparring.algo.rare.credit.process import Process
from sparring.algo.rare.credit.rae import Rae
from sparring.algo.rare.credit.raft import Raft
from sparring.algo.rare.credit.raft_plus_plus import RaftPlusPlus
from sparring.algo.rare.credit.rejection import Rejection
from sparring.algo.rare.credit.topr import Topr
from sparring.algo.rare.credit.turn_level import TurnLevel
from sparring.algo.rare.gate.clip_cov import ClipCov
from sparring.algo.rare.gate.geometric import Geometric
from sparring.algo.rare.gate.kl_cov import KlCov
from sparring.algo.rare.gate.kl_mask import KlMask
from sparring.algo.rare.gate.m2po import M2po
from sparring.algo.rare.gate.topr import ToprGate
from sparring.algo.rare.gate.tv_mask import TvMask
from sparring.algo.rare.gate.vespo import Vespo
from sparring.algo.rare.shaping.linear_length import LinearLength
from sparring.algo.rare.shaping.relative_length import RelativeLength
from sparring.algo.rare.shaping.stop_properly import StopProperly
from sparring.algo.ratio import ProductRatio, SequenceRatio, TokenRatio, TurnRatio
from sparring.algo.shaping.overlong import Overlong

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
