"""Golden vectors of what acts on scores before credit: shaping rules, the KL penalty in the reward, the difficulty
filter.

    for case in cases("overlong"):
        ...  # feed case["groups"] and case["settings"] to your framework, compare with case["expected"]

`groups` are plain data (see `groups`), `settings` what differs from the defaults. `expected` has, per group and member,
the reward after shaping; for `kl_reward` the rewards of the tokens; for `difficulty`, per group, whether it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from golden.draws import random_groups, with_tokens

from sparring.batch.plain_groups import Plain, simple_group

Reference = Callable[[Plain, dict[str, Any]], Any]


def overlong(group: Plain, settings: dict[str, Any]) -> list[float]:
    """Limit 10, buffer 4, weight 1, reward 1 each, lengths 6, 8 and 11: 1 - 0, 1 - 2 / 4, 1 - 1."""
    limit, buffer = settings["limit"], settings["buffer"]
    after = []
    for m in group["members"]:
        length = sum(m["turns"])
        if length <= limit - buffer:
            punishment = 0.0
        elif length <= limit:
            punishment = (limit - buffer - length) / buffer
        else:
            punishment = -1.0
        after.append(m["reward"] + settings.get("weight", 1.0) * punishment)
    return after


def linear_length(group: Plain, settings: dict[str, Any]) -> list[float]:
    """Price 0.1, 1 free, rewards 1 and 0 of 3 and 2 tokens: half succeed, so 1 - 0.1 * 2 / 2 = 0.9 and 0 - 0.1 / 2 =
    -0.05."""
    after = []
    for m in group["members"]:
        used = sum(m["turns"]) if settings.get("per", "token") == "token" else len(m["turns"])
        solved = [p["reward"] > settings.get("solved_above", 0.5) for p in group["members"] if p["role"] == m["role"]]
        share = np.mean(solved) if settings.get("by_success", True) else 1.0
        after.append(float(m["reward"] - settings["price"] * max(0, used - settings.get("free", 0)) * share))
    return after


def relative_length(group: Plain, settings: dict[str, Any]) -> list[float]:
    """Rewards 1, 1, 0, 0 of 1, 3, 1 and 5 tokens: places 0.5, 0, 0.5 and -0.5, so 1.5, 1, 0 and -0.5."""
    after = []
    for m in group["members"]:
        lengths = np.array([sum(p["turns"]) for p in group["members"] if p["role"] == m["role"]], dtype=float)
        place = 0.5 - (sum(m["turns"]) - lengths.min()) / np.ptp(lengths) if np.ptp(lengths) else 0.0
        if m["reward"] <= settings.get("solved_above", 0.5):
            place = min(0.0, place)
        after.append(float(m["reward"] + settings.get("weight", 1.0) * place))
    return after


def stop_properly(group: Plain, settings: dict[str, Any]) -> list[float]:
    """Rewards 1 and 1, the second cut off, keeps 0.25: 1 and 0.25."""
    lost = 1 - settings.get("keeps", 0.0)
    return [m["reward"] - (lost * m["reward"] if m.get("cut") else 0.0) for m in group["members"]]


def kl_reward(group: Plain, settings: dict[str, Any]) -> list[list[float]]:
    """Coefficient 0.5, log-probabilities -1 and -2 beside a reference's -2 and -1, k1: -0.5 * 1 and -0.5 * -1."""
    after = []
    for m in group["members"]:
        d = np.array(m["tokens"]["logprob"]) - np.array(m["tokens"]["reference"])
        k = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d, "abs": np.abs(d)}[settings.get("estimator", "k1")]
        own = np.array(m["tokens"].get("reward", np.zeros(len(d))))
        after.append((own - settings.get("coefficient", 0.01) * k).tolist())
    return after


def difficulty(group: Plain, settings: dict[str, Any]) -> bool:
    """Rewards 1, 0, 0 with lowest 0.25: a third succeeds, which lies in the range. With 1, 0, 0, 0 a quarter does, its
    end."""
    share = np.mean([m["reward"] - settings.get("solved_above", 0.5) > 0 for m in group["members"]])
    low, high = settings.get("lowest", 0.0), settings.get("highest", 1.0)
    return bool(low <= share <= high if settings.get("inclusive", False) else low < share < high)


REFERENCES: Mapping[str, Reference] = {
    function.__name__: function
    for function in (difficulty, kl_reward, linear_length, overlong, relative_length, stop_properly)
}
"""By rule."""

_SETTINGS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "difficulty": (
        {"lowest": 0.5, "inclusive": True},
        {"highest": 0.8},
        {"lowest": 0.25, "highest": 0.75, "inclusive": True},
        {"lowest": 0.25, "highest": 0.75},
    ),
    "kl_reward": ({}, *({"coefficient": 0.5, "estimator": name} for name in ("k1", "k2", "k3", "abs"))),
    "linear_length": ({"price": 0.1}, {"price": 0.2, "per": "turn", "free": 1, "by_success": False}),
    "overlong": ({"limit": 10, "buffer": 6}, {"limit": 8, "buffer": 8, "weight": 0.5}),
    "relative_length": ({}, {"weight": 0.3}),
    "stop_properly": ({"keeps": 0.5}, {"keeps": 0.25}),
}
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "difficulty": {
        "groups": [simple_group([1.0, 0.0, 0.0]), simple_group([1.0, 0.0, 0.0, 0.0])],
        "settings": {"lowest": 0.25},
        "expected": [True, False],
    },
    "kl_reward": {
        "groups": [simple_group([0.0], turns=(2,), tokens=[{"logprob": [-1.0, -2.0], "reference": [-2.0, -1.0]}])],
        "settings": {"coefficient": 0.5},
        "expected": [[[-0.5, 0.5]]],
    },
    "linear_length": {
        "groups": [simple_group([1.0, 0.0], lengths=(3, 2))],
        "settings": {"price": 0.1, "free": 1},
        "expected": [[0.9, -0.05]],
    },
    "overlong": {
        "groups": [simple_group([1.0, 1.0, 1.0], lengths=(6, 8, 11))],
        "settings": {"limit": 10, "buffer": 4},
        "expected": [[1.0, 0.5, 0.0]],
    },
    "relative_length": {
        "groups": [simple_group([1.0, 1.0, 0.0, 0.0], lengths=(1, 3, 1, 5))],
        "settings": {},
        "expected": [[1.5, 1.0, 0.0, -0.5]],
    },
    "stop_properly": {
        "groups": [simple_group([1.0, 1.0], cut=(False, True))],
        "settings": {"keeps": 0.25},
        "expected": [[1.0, 0.25]],
    },
}
"""One case of each rule, worked by hand in its reference's docstring."""


def cases(rule: str) -> Iterator[dict[str, Any]]:
    """The golden cases of a rule; see above.

    Raises:
        KeyError: there is no such rule.
    """
    tokens = ("logprob", "reference") if rule == "kl_reward" else ()
    real = (0.0, 0.3, 1.7) if rule == "stop_properly" else None  # which refuses rewards below 0
    shapes = {
        "one_role": with_tokens(random_groups(11, (4, 3, 8, 1), rewards=(0.0, 1.0)), tokens),
        "real_rewards": with_tokens(random_groups(12, (5, 4), rewards=real), (*tokens, "reward") if tokens else ()),
        "several_roles": with_tokens(random_groups(13, (3, 4), rewards=real, roles=("white", "black")), tokens),
        "all_equal": with_tokens(random_groups(14, (3, 2), rewards=(1.0,)), tokens),
    }
    if rule == "difficulty":
        del shapes["several_roles"]
    for number, settings in enumerate(_SETTINGS[rule]):
        for shape, groups in shapes.items():
            expected = [REFERENCES[rule](group, dict(settings)) for group in groups]
            case = {"name": f"{rule}/{number}/{shape}", "rule": rule, "settings": dict(settings)}
            yield {**case, "groups": groups, "expected": expected}
