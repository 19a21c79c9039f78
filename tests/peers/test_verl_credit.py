"""Advantages and returns against every estimator that verl registers, in float64.

Rows of verl are padded to one length, with a mask for what the policy sampled: a tool's answer stands between two of
its turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import msgspec
import pytest
from golden.draws import random_groups, with_tokens

from sparring.algo.rules import CreditRule
from sparring.batch.plain_groups import Plain, by_member, nouns

pytestmark = pytest.mark.peers
TOLERANCE = 1e-6
Column = Callable[[Plain], list[float]]


def chats(
    seed: int, sizes: Sequence[int], names: Sequence[str] = (), rewards: Sequence[float] | None = None
) -> list[Plain]:
    """Groups of conversations of one to four turns."""
    groups = with_tokens(random_groups(seed, sizes, rewards=rewards), names)
    for m in (m for group in groups for m in group["members"]):
        m["follows"] = list(range(-1, len(m["turns"]) - 1))
    return groups


def of_one_turn(groups: Sequence[Plain]) -> list[Plain]:
    for m in (m for group in groups for m in group["members"]):
        m.update(turns=[sum(m["turns"])], follows=[-1], per_turn=[sum(m["per_turn"])])
    return list(groups)


def of_one_length(groups: Sequence[Plain]) -> list[Plain]:
    """Two turns of 3 tokens in all, and parts that float32 holds exactly: verl rounds these."""
    for number, m in enumerate(m for group in groups for m in group["members"]):
        m.update(turns=[2, 1], follows=[-1, 0], per_turn=[0.0, m["reward"]])
        m["parts"] = {"right": number % 4 / 4, "short": number * 5 % 7 / 8}
    return list(groups)


def without_turns(groups: Sequence[Plain]) -> list[Plain]:
    for m in (m for group in groups for m in group["members"]):
        del m["per_turn"]
    return list(groups)


def earned(member: Plain) -> list[float]:
    """Each token's own reward, the turn's at the turn's last, what is left at the end."""
    found = list(member["tokens"].get("reward", [0.0] * sum(member["turns"])))
    last = -1
    for length, reward in zip(member["turns"], member.get("per_turn", [0.0] * len(member["turns"])), strict=True):
        last += length
        found[last] += reward
    found[-1] += member["reward"] - sum(member.get("per_turn", []))
    return found


def token(name: str) -> Column:
    return lambda member: member["tokens"][name]


COLUMNS: Mapping[str, Column] = {
    "response_mask": lambda member: [1.0] * sum(member["turns"]),
    "token_level_rewards": earned,
    "values": token("value"),
    "old_log_probs": token("logprob"),
    "sum_pi_squared": token("probability_squares"),
}


def padded(groups: Sequence[Plain], column: Column) -> list[list[float]]:
    """[B, T]: the values where the policy sampled, 0 in a tool's answers and behind the end."""
    rows = []
    for m in (m for group in groups for m in group["members"]):
        values, row = iter(column(m)), []
        for number, length in enumerate(m["turns"]):
            row += [0.0] * min(number, 1) + [next(values) for _ in range(length)]
        rows.append(row)
    longest = max(map(len, rows))
    return [row + [0.0] * (longest - len(row)) for row in rows]


def taken(groups: Sequence[Plain], matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of each member what the matrix says of its sampled tokens."""
    masks = padded(groups, COLUMNS["response_mask"])
    return [[x for x, there in zip(row, mask, strict=True) if there] for row, mask in zip(matrix, masks, strict=True)]


def over_tokens(groups: Sequence[Plain]) -> float:
    """verl divides by the deviation over n - 1 of n tokens, we by that over n."""
    count = sum(sum(m["turns"]) for group in groups for m in group["members"])
    return sqrt(count / (count - 1))


def over_rollouts(groups: Sequence[Plain]) -> float:
    """verl divides by the deviation over all N T tokens, the paper's equation and we by that over the N rollouts."""
    lengths = [sum(m["turns"]) for group in groups for m in group["members"]]
    return sqrt(lengths[0] * (len(lengths) - 1) / (sum(lengths) - 1))


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A rule of ours beside an estimator of verl: `theirs` and `config` are verl's settings; ours is `scale` times as
    large."""

    rule: Mapping[str, Any]
    groups: Sequence[Plain]
    columns: Sequence[str] = ("token_level_rewards", "response_mask")
    theirs: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    scale: Callable[[Sequence[Plain]], float] = lambda groups: 1.0
    returns: bool = False


_OTB = ("token_level_rewards", "response_mask", "old_log_probs", "sum_pi_squared")
_OF_OTB = ("logprob", "probability_squares")
# verl's alpha counts rewards that are not 0, ours members of groups that differ: the same where only the others are 0
_USEFUL = (
    *chats(6, (3,), rewards=(0.25, 0.5, 1.0)),
    *chats(7, (2,), rewards=(0.0,)),
    *chats(8, (4,), rewards=(2.0, 3.0, 0.5)),
)
_PARTS = of_one_length(chats(9, (4, 3)))

COMPARED: Mapping[str, Sequence[Compared]] = {
    "gae": [
        Compared(
            rule={"name": "gae", "discount": gamma, "lambda_policy": lam, "lambda_value": lam},
            groups=chats(seed, (3, 2), ("value", "reward")),
            columns=("token_level_rewards", "response_mask", "values"),
            theirs={"gamma": gamma, "lam": lam},
            scale=over_tokens,
            returns=True,
        )
        for seed, gamma, lam in ((1, 1.0, 1.0), (2, 0.97, 0.9))
    ],
    **{
        name: [
            Compared(
                rule={"name": "grpo", "normalise": normal},
                groups=chats(3, (4, 3, 2)),
                theirs={"norm_adv_by_std_in_grpo": normal},
            )
            for normal in (True, False)
        ]
        for name in ("grpo", "grpo_vectorized")
    },
    "gdpo": [
        Compared(
            rule={"name": "gdpo", "weights": weights, "epsilon": 1e-9},
            groups=_PARTS,
            theirs={"epsilon": 1e-9},
            config={"gdpo_reward_keys": list(weights), "gdpo_reward_weights": list(weights.values())},
            given={
                "parts": {name: [m["parts"][name] for group in _PARTS for m in group["members"]] for name in weights}
            },
            scale=over_rollouts,
        )
        for weights in ({"right": 1.0}, {"right": 2.0, "short": 0.5})
    ],
    "reinforce_plus_plus": [
        Compared(
            rule={"name": "reinforce_plus_plus"},
            groups=chats(seed, (3, 4), names),
            config={"gamma": 1.0},
            scale=over_tokens,
        )
        for seed, names in ((4, ()), (5, ("reward",)))
    ],
    "reinforce_plus_plus_baseline": [
        Compared(rule={"name": "reinforce_plus_plus_baseline"}, groups=chats(4, (3, 4)), scale=over_tokens)
    ],
    "rloo": [Compared(rule={"name": "rloo"}, groups=chats(5, (2, 4, 3)))],
    "rloo_vectorized": [Compared(rule={"name": "rloo"}, groups=chats(5, (2, 4, 3)))],
    "opo": [Compared(rule={"name": "opo"}, groups=chats(6, (2, 4, 3)))],
    "remax": [
        Compared(
            rule={"name": "remax"},
            groups=(groups := without_turns(chats(7, (2, 3)))),
            given={"reward_baselines": [group["baselines"][0] for group in groups for _ in group["members"]]},
        )
    ],
    "gpg": [Compared(rule={"name": "gpg"}, groups=_USEFUL)],
    "optimal_token_baseline": [
        Compared(
            rule={"name": "optimal_token_baseline", "zero_tail": tail},
            groups=of_one_turn(chats(8, (3, 2, 4), (*_OF_OTB, "reward"))),
            columns=_OTB,
            theirs={"handle_zero_tail": tail},
        )
        for tail in (True, False)
    ],
    "tir_optimal_token_baseline": [
        Compared(
            rule={"name": "optimal_token_baseline", "zero_tail": tail},
            groups=chats(9, (3, 2, 4), (*_OF_OTB, "reward")),
            columns=_OTB,
            theirs={"handle_zero_tail": tail},
        )
        for tail in (True, False)
    ],
}
"""By verl's name."""

APART: Mapping[str, str] = {
    "grpo_passk": "not `pass_at_k`: the best of the group alone, by its lead over the second (arXiv 2503.19595)",
}
"""verl's names that nothing of ours is compared with, and why."""


def test_every_estimator_of_verl_is_compared_or_listed(verl) -> None:
    registered = set(verl("names")["estimators"])
    assert registered == COMPARED.keys() | APART.keys() and not COMPARED.keys() & APART.keys()
    assert all(len(reason) > 20 for reason in APART.values())


@pytest.mark.parametrize("name", COMPARED)
def test_advantages_and_returns_are_verls(name: str, verl) -> None:
    for case in COMPARED[name]:
        groups = case.groups
        index = [number for number, group in enumerate(groups) for _ in group["members"]]
        given = {"index": index, **{key: padded(groups, COLUMNS[key]) for key in case.columns}, **case.given}
        theirs = verl("estimator", name=name, given=given, config=case.config, **case.theirs)
        made, samples = nouns(groups)
        credited = msgspec.convert(case.rule, CreditRule).credit(made, samples)
        ours = [m for group in by_member(groups, credited) for m in group or ()]
        expected = [[x * case.scale(groups) for x in of] for of in taken(groups, theirs["advantages"])]
        assert len(ours) == len(index) and any(any(of) for of in ours)
        assert any(m["turns"][1:] for group in groups for m in group["members"]) or name == "optimal_token_baseline"
        for mine, of in zip(ours, expected, strict=True):
            assert mine == pytest.approx(of, rel=TOLERANCE, abs=TOLERANCE), case
        if case.returns:
            mine = [m for group in by_member(groups, credited, "return") for m in group or ()]
            for one, of in zip(mine, taken(groups, theirs["returns"]), strict=True):
                assert one == pytest.approx(of, rel=TOLERANCE, abs=TOLERANCE), case
