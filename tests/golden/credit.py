"""Golden vectors of every credit rule: named cases with inputs and the advantages that a rule must give.

    for case in cases("rloo"):
        ...  # feed case["groups"] and case["settings"] to your framework, compare with case["advantages"]

A case is plain data (JSON): `name`, `rule`, `settings` (what differs from the rule's defaults), `groups` (see `groups`)
and `advantages`, per group and member one number per token in the order of time, None where the group leaves the
update. The cases of `gae` also have `returns`, the critic's targets. Rewards of tokens, where a case has them, are part
of what a trajectory earned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from golden import credit_outcome, credit_steps
from golden.credit_outcome import Credited, Reference
from golden.draws import random_groups, with_steps, with_tokens

from sparring.batch.plain_groups import Plain

REFERENCES: Mapping[str, Reference] = {
    function.__name__: function
    for function in (
        credit_steps.gae,
        credit_outcome.gdpo,
        credit_steps.gigpo,
        credit_outcome.gpg,
        credit_outcome.grpo,
        credit_outcome.hierarchical,
        credit_outcome.maxrl,
        credit_outcome.opo,
        credit_steps.optimal_token_baseline,
        credit_outcome.pass_at_k,
        credit_steps.prime,
        credit_steps.process,
        credit_outcome.rae,
        credit_outcome.raft,
        credit_outcome.raft_plus_plus,
        credit_steps.reinforce,
        credit_steps.reinforce_plus_plus,
        credit_steps.reinforce_plus_plus_baseline,
        credit_outcome.rejection,
        credit_outcome.remax,
        credit_outcome.rloo,
        credit_outcome.topr,
        credit_steps.turn_level,
    )
}
"""The reference of each rule, by the rule's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Ranges that the cases of a rule are drawn from: `settings` to try, `rewards` to choose among (any number where
    None), the token values that it reads, beside them rewards of tokens where it takes those, steps of turns likewise,
    and roles where it takes several."""

    settings: tuple[Mapping[str, Any], ...] = ({},)
    rewards: tuple[float, ...] | None = None
    tokens: tuple[str, ...] = ()
    token_rewards: bool = True
    steps: bool = False
    roles: tuple[str, ...] | None = ("white", "black")


_BINARY = (0.0, 1.0)
KINDS: Mapping[str, Kind] = {
    "gae": Kind(
        settings=(
            {},
            {"whiten": False, "discount": 0.9, "lambda_policy": 0.7, "lambda_value": 0.95},
            {"length_alpha": 0.3, "whiten": False},
        ),
        tokens=("value",),
        steps=True,
    ),
    "gdpo": Kind(
        settings=({"weights": {"right": 1.0, "short": 0.5}}, {"weights": {"right": 2.0}}), token_rewards=False
    ),
    "gigpo": Kind(
        settings=({}, {"divide": False, "step_weight": 0.5, "discount": 0.8}), token_rewards=False, roles=None
    ),
    "gpg": Kind(settings=({}, {"divide": True}), rewards=_BINARY, token_rewards=False),
    "grpo": Kind(settings=({}, {"normalise": False})),
    "hierarchical": Kind(settings=({}, {"inside": ("white", "black")}), roles=("proposer", "solver/0", "solver/1")),
    "maxrl": Kind(rewards=_BINARY, token_rewards=False),
    "opo": Kind(),
    "optimal_token_baseline": Kind(
        settings=({}, {"zero_tail": False}), tokens=("logprob", "probability_squares"), steps=True
    ),
    "pass_at_k": Kind(settings=({"k": 2}, {}, {"k": 1, "solved_above": 0.0}), rewards=_BINARY, token_rewards=False),
    "prime": Kind(settings=({}, {"beta": 0.5, "discount": 0.9}), tokens=("implicit", "reference")),
    "process": Kind(token_rewards=False, steps=True, roles=None),
    "rae": Kind(settings=({}, {"decay": 0.5})),
    "raft": Kind(settings=({}, {"best": 2})),
    "raft_plus_plus": Kind(settings=({}, {"solved_above": 0.0}), rewards=_BINARY, token_rewards=False),
    "reinforce": Kind(settings=({"discount": 0.9}, {"discount": 0.5, "baseline": 0.25}), steps=True),
    "reinforce_plus_plus": Kind(steps=True),
    "reinforce_plus_plus_baseline": Kind(),
    "rejection": Kind(settings=({}, {"at_most": 2}, {"solved_above": 0.0}), rewards=_BINARY, token_rewards=False),
    "remax": Kind(),
    "rloo": Kind(),
    "topr": Kind(settings=({}, {"baseline": 0.5})),
    "turn_level": Kind(settings=({}, {"outcome_weight": 0.3}), token_rewards=False, roles=None),
}
"""Settings and kinds of input that each rule's cases are drawn from, by the rule's name."""


def cases(rule: str) -> Iterator[dict[str, Any]]:
    """The golden cases of a rule; see above.

    Raises:
        KeyError: there is no such rule.
    """
    for number, settings in enumerate(KINDS[rule].settings):
        for shape, groups in _shapes(KINDS[rule]):
            case = {"name": f"{rule}/{number}/{shape}", "rule": rule, "settings": dict(settings), "groups": groups}
            case["advantages"] = plain(REFERENCES[rule](groups, dict(settings)))
            if rule == "gae":
                case["returns"] = plain(credit_steps.gae_returns(groups, dict(settings)))
            yield case


def plain(credited: Credited) -> list[list[list[float]] | None]:
    """Return a reference's result as lists."""
    return [None if of is None else [values.tolist() for values in of] for of in credited]


def _shapes(kind: Kind) -> Iterator[tuple[str, Sequence[Plain]]]:
    """Groups of every shape that a rule has to get right, by name. Some members of all of them failed."""
    some = kind.rewards or (0.25,)
    yield "one_role", with_tokens(random_groups(1, (4, 3, 5), rewards=kind.rewards), kind.tokens)
    yield "another_draw", with_tokens(random_groups(2, (6, 2), rewards=kind.rewards), kind.tokens)
    yield "one_member", with_tokens(random_groups(3, (1, 4), rewards=kind.rewards), kind.tokens)
    yield "only_one_member", with_tokens(random_groups(4, (1,), rewards=kind.rewards), kind.tokens)
    yield "equal_rewards", with_tokens(random_groups(5, (3, 2), rewards=some[-1:]), kind.tokens)
    yield "all_lost", with_tokens(random_groups(6, (3,), rewards=some[:1]), kind.tokens)
    if kind.token_rewards:
        yield "token_rewards", with_tokens(random_groups(7, (4, 3), rewards=kind.rewards), ("reward", *kind.tokens))
    if kind.steps:
        yield "steps", with_tokens(with_steps(random_groups(9, (4, 3), rewards=kind.rewards), 9), kind.tokens)
    if kind.roles:
        yield (
            "several_roles",
            with_tokens(random_groups(8, (3, 4), rewards=kind.rewards, roles=kind.roles), kind.tokens),
        )
