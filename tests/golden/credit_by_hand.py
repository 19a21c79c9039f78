"""One case of every credit rule, worked by hand: the arithmetic is in the docstring of the rule's reference.

Cases have the form of `credit.cases`; where all tokens of a member get the same, `advantages` has one number for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from sparring.batch.plain_groups import Plain, simple_group

EPSILON = 1e-300
"""So small that it vanishes beside a deviation: by hand nobody adds it."""


def _case(groups: Sequence[Plain], advantages: Sequence[Any], **settings: Any) -> dict[str, Any]:
    return {"groups": groups, "advantages": advantages, "settings": settings}


def _posed_and_solved() -> Plain:
    """A group of two rollouts, each with a proposer and two solvers."""
    rewards = {"proposer": (1.0, 0.0), "solver/0": (1.0, 0.0), "solver/1": (0.0, 0.0)}
    members = [m for role, of in rewards.items() for m in simple_group(of, role=[role] * 2)["members"]]
    return {"members": sorted(members, key=lambda m: m["rollout"]), "failed": [], "baselines": []}


_ROOT = 1 / sqrt(2)
EXAMPLES: Mapping[str, dict[str, Any]] = {
    "gae": _case(
        [simple_group([1.0], turns=(2,), tokens=[{"value": [0.5, 0.5]}])],
        [[[0.25, 0.5]]],
        lambda_policy=0.5,
        whiten=False,
    ),
    "gdpo": _case(
        [simple_group([0.0, 0.0], parts=[{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 10.0}])],
        [[_ROOT, -_ROOT]],
        weights={"right": 2.0, "short": 1.0},
        epsilon=EPSILON,
    ),
    "gigpo": _case(
        [simple_group([1.0, 0.0], turns=(1, 1), per_turn=[[0.0, 0.0]] * 2, states=[["hall", None]] * 2)],
        [[[0.75, 0.5], [-0.75, -0.5]]],
        discount=0.5,
        divide=False,
    ),
    "gpg": _case([simple_group([1.0, 0.0]), simple_group([1.0, 1.0])], [[1.0, -1.0], [0.0, 0.0]]),
    "grpo": _case([simple_group([3.0, 1.0])], [[_ROOT, -_ROOT]], epsilon=EPSILON),
    "hierarchical": _case([_posed_and_solved()], [[0.5, 0.5, -0.5, -0.5, 0.0, 0.0]]),
    "maxrl": _case([simple_group([1.0, 0.0, 0.0, 0.0])], [[3.0, -1.0, -1.0, -1.0]]),
    "opo": _case([simple_group([1.0, 0.0], lengths=(3, 1))], [[0.25, -0.75]]),
    "optimal_token_baseline": _case(
        [
            simple_group(
                [1.0, 0.0],
                tokens=[
                    {"logprob": [-0.6931471805599453], "probability_squares": [0.5]},
                    {"logprob": [-1.3862943611198906], "probability_squares": [0.5]},
                ],
            )
        ],
        [[2 / 3, -1 / 3]],
    ),
    "pass_at_k": _case([simple_group([1.0, 0.0, 0.0])], [[_ROOT, -_ROOT / 2, -_ROOT / 2]], k=2),
    "prime": _case(
        [
            simple_group(
                [0.0, 0.0],
                turns=(2,),
                tokens=[
                    {"implicit": [-1.0, -2.0], "reference": [-2.0, -2.0]},
                    {"implicit": [-1.0, -1.0], "reference": [-1.0, -1.0]},
                ],
            )
        ],
        [[[1.0, 0.0], [-1.0, -0.5]]],
        beta=1.0,
    ),
    "process": _case([simple_group([1.0], turns=(1, 1), per_turn=[[1.0, 0.0]])], [[[0.0, -_ROOT]]], epsilon=EPSILON),
    "rae": _case([simple_group([1.0, 1.0])], [[0.5, 0.25]], decay=0.5),
    "raft": _case([simple_group([0.2, 0.9, 0.9])], [[0.0, 1.0, 0.0]]),
    "raft_plus_plus": _case([simple_group([1.0, 0.0, 1.0])], [[1.0, 0.0, 1.0]]),
    "reinforce": _case([simple_group([1.0], turns=(2,))], [[[0.25, 0.75]]], discount=0.5, baseline=0.25),
    "reinforce_plus_plus": _case([simple_group([1.0, 0.0])], [[1.0, -1.0]], epsilon=EPSILON),
    "reinforce_plus_plus_baseline": _case(
        [simple_group([3.0, 1.0]), simple_group([5.0, 5.0])], [[1 / _ROOT, -1 / _ROOT], [0.0, 0.0]], epsilon=EPSILON
    ),
    "rejection": _case([simple_group([1.0, 1.0, 0.0, 1.0], said=[0, 0, 1, 2])], [[1.0, 0.0, 0.0, 1.0]]),
    "remax": _case([{**simple_group([1.0, 0.0]), "baselines": [0.75]}], [[0.25, -0.75]]),
    "rloo": _case([simple_group([1.0, 0.0, 0.0])], [[1.0, -0.5, -0.5]]),
    "topr": _case([simple_group([1.0, 0.0])], [[0.75, -0.25]], baseline=0.25),
    "turn_level": _case(
        [simple_group([1.0, 2.0], turns=(1, 1), per_turn=[[1.0, 0.0], [0.0, 2.0]])],
        [[[_ROOT / 2, -_ROOT], [-_ROOT / 2, _ROOT]]],
        outcome_weight=0.5,
        epsilon=EPSILON,
    ),
}
"""By rule."""
