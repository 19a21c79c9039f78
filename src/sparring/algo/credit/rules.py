"""Every credit rule by name: what `[algo] credit` takes, as a name or as a table with the rule's settings."""

from __future__ import annotations

from sparring.algo.credit.gae import Gae
from sparring.algo.credit.gdpo import Gdpo
from sparring.algo.credit.gigpo import Gigpo
from sparring.algo.credit.gpg import Gpg
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
from sparring.errors import refusal
from sparring.protocols import Credit

CreditRule = (
    Gae
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


def name_of(rule: CreditRule) -> str:
    """The rule's name in a config."""
    return str(rule.__struct_config__.tag)


def open_rule(rule: CreditRule) -> Credit:
    """The credit of a rule, with fresh state where it keeps any (it then has `state` and `restore`)."""
    return rule.open() if isinstance(rule, Rae) else rule


def refuse_group_size(rule: CreditRule, group_size: int) -> None:
    """Refuse groups in which the rule could compare nobody.

    Raises:
        BadInput: every group of this size would leave the update.
    """
    if group_size < rule.least_members:
        expected = f"groups of at least {rule.least_members} rollouts for {name_of(rule)!r}"
        do = "set [rollout] group_size, or choose a credit that compares nobody, such as 'reinforce_plus_plus'"
        raise refusal("[algo] credit", expected, f"group_size = {group_size}", do)
