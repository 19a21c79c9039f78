"""Every credit rule by name: what `[algo] credit` takes, as a name or as a table with the rule's settings."""

from __future__ import annotations

from collections.abc import Set

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
from sparring.algo.credit.rae import Rae, RaeCredit
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
from sparring.errors import refusal

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

OF_ONE_GROUP = (
    Gigpo,
    Grpo,
    Hierarchical,
    MaxRl,
    Opo,
    PassAtK,
    Process,
    Raft,
    RaftPlusPlus,
    Reinforce,
    Rejection,
    Remax,
    Rloo,
    Topr,
    TurnLevel,
)
"""The rules whose advantages depend on one group alone, as it is recorded; the others look at the whole update, at
annotations or at what came before."""

BLIND_TO_TOKENS = (Gdpo, Process)
"""Rules that read parts or turns of a score and no rewards of single tokens."""

OF_TURNS = (Gae, Gigpo, OptimalTokenBaseline, Process, Reinforce, ReinforcePlusPlus, TurnLevel)
"""Rules to which it matters which turn earned what; to the others a score's turns are no more than their sum."""

READS = {
    Gae: ("value",),
    OptimalTokenBaseline: ("probability_squares",),
    Prime: ("implicit", "reference"),
    Remax: ("baseline",),
}
"""What rules read beside scores and what was recorded: annotations of samples, and rollouts with the purpose
"baseline"."""


def name_of(rule: CreditRule) -> str:
    """The rule's name in a config."""
    return str(rule.__struct_config__.tag)


def open_rule(rule: CreditRule) -> CreditRule | RaeCredit:
    """The rule itself; where it keeps state, what keeps it."""
    return rule.open() if isinstance(rule, Rae) else rule


def refuse_group_size(rule: CreditRule, group_size: int) -> None:
    """Refuse groups in which the rule could compare nobody.

    Raises:
        BadInput: every group of this size would leave the update.
    """
    if group_size < rule.least_members:
        expected = f"at least {rule.least_members} rollouts to compare, for credit {name_of(rule)!r}"
        do = "raise it, or choose a credit that needs no siblings, such as 'reinforce_plus_plus'"
        raise refusal("rollout.group_size", expected, str(group_size), do)


def refuse_annotations(rule: CreditRule, written: Set[str]) -> None:
    """Refuse a rule that reads what no part of its stage writes.

    Args:
        rule: the rule.
        written: what the stage's annotators write; "baseline" for rollouts of that purpose.

    Raises:
        BadInput: something is missing.
    """
    missing = [name for name in READS.get(type(rule), ()) if name not in written]
    if missing:
        expected = f"a credit that can do without {missing[0]!r}, which no part of this stage writes"
        raise refusal("algo.credit", expected, repr(name_of(rule)), "choose another; docs/algorithms.md lists them")
