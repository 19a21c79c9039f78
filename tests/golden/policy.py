"""Golden vectors of the policy loss: every ratio, gate, anchor, correction, divergence and aggregation by name.

    for case in cases("gate", "sapo"):
        ...  # feed case["algo"] and case["rows"] to your framework, compare with case["loss"] and case["gradient"]

A case is plain data (JSON):

    part, name, algo    what it is about, and what it sets in `[algo]`; all else is the default
    rows                per row (a branch of a trajectory; its rows are neighbours) and sampled token, in order:
                        logprob (the policy's now), before (the trainer's before the update), behaviour (the engine's),
                        reference, entropy, advantage; turns: how many tokens each turn has; trajectory: its name;
                        share: of a token's way from recorded to current that its log-linear anchor stands at
    max_tokens          L of aggregation "constant"
    loss                of all rows together
    gradient            per row, its derivative by each log-probability; entropy_gradient likewise by each entropy
    weights             per row, the correction's weight of each token

Worked example, by hand. One row of two tokens, log-probabilities -1.0 and -0.5, recorded as -1.2 and -0.3, so that log
r = 0.2 and -0.2 and r = 1.2214028 and 0.8187308; advantages 1 and -1. Losses of the tokens, all divided by 2 tokens:

    gate none            -1.2214028 + 0.8187308                                               / 2 = -0.2013360
    gate clip 0.1, 0.1   -1.1 + 0.9                                                           / 2 = -0.1
    gate sapo            -4 sigmoid(0.2214028) + 4 / 1.05 sigmoid(-1.05 * 0.1812692)          / 2 = -0.2482324
    ratio sequence       log s = 0, with gate none -1 + 1                                     / 2 = 0
    correction token     before = now: weights 1.2214028, 0.8187308; anchor proximal: r = 1   / 2 = -0.2013360
    kl k3, 1.0           reference -1.1, -0.5: exp(-0.1) - 1 + 0.1 = 0.0048374                / 2 more
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from golden.policy_parts import PARTS, Array, Step

Plain = dict[str, Any]
Parts = Mapping[str, Mapping[str, Callable[..., Any]]]

STEP_SIZE = 1e-30
"""Of the complex step: its square vanishes beside 1."""

CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    **{f"{unit}_truncate": {"weight": unit, "high": 1.3} for unit in ("token", "turn", "sequence", "geometric")},
    **{
        f"{unit}_mask": {"weight": unit, "bound": "mask", "low": 0.7, "high": 1.4}
        for unit in ("token", "turn", "sequence", "geometric")
    },
    **{
        f"{by}_{kind}_of_{unit}": {"reject": kind, "reject_by": by, "reject_unit": unit, "reject_above": above}
        for kind, above in (("k1", 0.1), ("k2", 0.05), ("k3", 0.05))
        for unit in ("turn", "sequence")
        for by in ("mean", "sum", "max")
    },
    **{
        f"{kind}_of_token": {"reject": kind, "reject_unit": "token", "reject_above": 0.05}
        for kind in ("k1", "k2", "k3")
    },
    "two_sided": {"reject": "k1", "reject_above": 0.05, "reject_below": -0.05},
    "only_negative": {"reject": "k1", "reject_above": 0.01, "only_negative": True, "compare": "now"},
    "both": {"weight": "token", "high": 1.5, "reject": "k3", "reject_above": 0.05},
    "normalised": {"weight": "token", "high": 1.5, "normalise": True},
    "normalised_mask": {"weight": "sequence", "bound": "mask", "low": 0.5, "high": 1.5, "normalise": True},
    "measured": {"weight": "token", "metrics_only": True},
    "raw": {"weight": "token", "bound": "none", "reject": "k1", "reject_above": 0.05, "reject_below": -0.05},
}
"""The corrections that are tried."""

_NONE = {"gate": {"name": "none"}}
_KEPT: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]] = (
    ({"weight": "token", "bound": "mask", "low": 0.7, "high": 1.4}, {"kl": {"coefficient": 0.3, "estimator": "k3"}}),
    ({"reject": "k3", "reject_above": 0.05}, {"entropy_bonus": 0.1}),
    ({"reject": "k1", "reject_by": "max", "reject_above": 0.1}, {}),
)
"""Corrections that leave what they take out of the denominator, and what else is set."""
SETTINGS: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "ratio": {
        "token": [_NONE],
        "sequence": [_NONE, {"ratio": {"name": "sequence", "per_token": True}, **_NONE}, {"gate": {"name": "cispo"}}],
        "turn": [_NONE, {"ratio": {"name": "turn", "per_token": True}, **_NONE}],
        "product": [{"gate": {"name": "topr"}}, {"gate": {"name": "vespo"}}],
    },
    "gate": {
        "none": [{}],
        "clip": [
            {},
            {"gate": {"low": 0.1, "high": 0.1}},
            {"ratio": {"name": "sequence"}, "gate": {"low": 0.05, "high": 0.05}},
        ],
        "dual_clip": [{}, {"gate": {"low": 0.1, "high": 0.1, "bound": 1.2}}],
        "cispo": [{}, {"gate": {"low": 0.2, "high": 0.1}}],
        "sapo": [{}, {"gate": {"tau_positive": 2.0, "tau_negative": 3.0}}, {"ratio": {"name": "sequence"}}],
        "tv_mask": [{}, {"gate": {"above": 0.05}}],
        "kl_mask": [{}, {"gate": {"above": 0.01}}],
        "geometric": [{}, {"gate": {"low": 0.9, "high": 1.1}}],
        "clip_cov": [
            {"gate": {"share": 0.2, "low": 0.1, "high": 9.0}},
            {"gate": {"share": 0.9, "low": 0.3, "high": 2.0}},
            {"gate": {"share": 0.3, "low": 0.1, "high": 9.0, "clip_low": 0.1, "clip_high": 0.1}},
            {"gate": {"low": 0.1}},
        ],
        "kl_cov": [{"gate": {"share": 0.2}}, {"gate": {"share": 0.5, "coefficient": 0.3}}, {}],
        "vespo": [{}, {"gate": {"k_positive": 1.0, "lambda_negative": 0.5}}],
        "m2po": [{}, {"gate": {"bound": 0.1}}],
        "topr": [{"ratio": {"name": "product"}}, {"ratio": {"name": "token"}, "gate": {"bound": 1.1}}],
    },
    "anchor": {
        "behaviour": [{}],
        "proximal": [{}, {"ratio": {"name": "sequence"}}],
        "loglinear": [{}, {"correction": {"weight": "token"}}],
    },
    "correction": {
        **{name: [{"correction": dict(settings), "anchor": "proximal"}] for name, settings in CORRECTIONS.items()},
        **{
            f"kept_{how}": [
                {"correction": {**settings, "denominator": "kept"}, "anchor": "proximal", "aggregation": how, **more}
                for settings, more in _KEPT
            ]
            for how in ("token_mean", "sequence_mean", "sequence_sum", "constant")
        },
    },
    "kl": {name: [{"kl": {"coefficient": 0.3, "estimator": name}}] for name in ("k2", "k3", "abs")},
    "aggregation": {
        "token_mean": [{}],
        "sequence_mean": [{}],
        "sequence_sum": [{"ratio": {"name": "sequence"}}, {}],
        "constant": [{}],
    },
    "shaping": {
        "entropy_bonus": [{"entropy_bonus": 0.1}],
        "top_entropy": [{"top_entropy": 0.2}, {"top_entropy": 0.5, "aggregation": "sequence_mean"}],
    },
}
"""Settings that the cases of each name use besides its defaults."""


def cases(part: str, name: str, draws: int = 2) -> Iterator[Plain]:
    """The golden cases of a name; see above.

    Raises:
        KeyError: there is no such part or name.
    """
    for number, settings in enumerate(SETTINGS[part][name]):
        algo = dict(settings)
        if part in ("ratio", "gate"):
            algo[part] = {"name": name, **settings.get(part, {})}
        elif part in ("anchor", "aggregation"):
            algo[part] = name
        if name == "vespo":
            algo["ratio"] = {"name": "product"}
        for seed in range(draws):
            case = {"part": part, "name": f"{name}/{number}/{seed}", "algo": algo, "rows": draw(seed), "max_tokens": 7}
            yield {**case, **answers(case)}


def names() -> Iterator[tuple[str, str]]:
    """Every part with every name."""
    for part, of in SETTINGS.items():
        for name in of:
            yield part, name


def answers(case: Plain, parts: Parts = PARTS) -> Plain:
    """loss, gradient, entropy_gradient and weights of a case. `parts`: other references to put in the place of ours."""
    at = _column(case, "logprob")
    count = len(at)
    tilt = [loss(case, at + STEP_SIZE * 1j * (np.arange(count) == place), parts=parts) for place in range(count)]
    entropy = _column(case, "entropy")
    by_entropy = [
        loss(case, at, entropy=entropy + STEP_SIZE * 1j * (np.arange(count) == place), parts=parts)
        for place in range(count)
    ]
    weights = _weights(case, _step(case, at, parts), parts)
    return {
        "loss": float(np.real(loss(case, at, parts=parts))),
        "gradient": _by_row(case, [float(np.imag(one)) / STEP_SIZE for one in tilt]),
        "entropy_gradient": _by_row(case, [float(np.imag(one)) / STEP_SIZE for one in by_entropy]),
        "weights": _by_row(case, weights.tolist()),
    }


def loss(case: Plain, now: Array, *, entropy: Array | None = None, parts: Parts = PARTS) -> Any:
    """The policy loss of a case at log-probabilities `now` [M]; what has no gradient stays as the case says."""
    algo, step = case["algo"], _step(case, now, parts)
    ratio, gate = algo.get("ratio", {"name": "token"}), algo.get("gate", {"name": "clip"})
    of_ratio = parts["ratio"][ratio["name"]]
    losses = parts["gate"][gate["name"]](of_ratio(step.now, step, ratio), of_ratio(step.at, step, ratio), step, gate)
    losses = losses * _weights(case, step, parts)
    share = algo.get("top_entropy", 1.0)
    if share < 1:
        highest = np.argsort(-step.entropy, kind="stable")[: max(1, round(share * len(step.at)))]
        losses = losses * np.isin(np.arange(len(step.at)), highest)
    losses = losses - algo.get("entropy_bonus", 0.0) * (step.entropy if entropy is None else entropy)
    kl = algo.get("kl", {})
    if kl:
        losses = losses + kl["coefficient"] * parts["kl"][kl["estimator"]](step.now, step.reference)
    if algo.get("correction", {}).get("denominator") == "kept":
        weighted = _weights(case, step, parts) > 0
        losses, step = losses[weighted], Step(**{name: column[weighted] for name, column in vars(step).items()})
        if not weighted.any():
            return 0.0
    return parts["aggregation"][algo.get("aggregation", "token_mean")](losses, step, case["max_tokens"])


def draw(seed: int, *, spread: float = 0.3) -> list[Plain]:
    """Rows of a step, drawn at random: five trajectories, one of two branches, one without advantage. All numbers are
    float32's, so that no framework need round them. With `spread` 0 all log-probabilities of a token are equal."""
    random = np.random.default_rng(seed)
    rows = []
    for name, advantage in (("a", 1.1), ("b", -0.7), ("b", -0.7), ("c", 0.4), ("d", 0.0), ("e", -1.6)):
        turns = random.integers(1, 5, size=int(random.integers(1, 4))).tolist()
        count = sum(turns)
        now = random.uniform(-2.5, -0.1, count)
        row = {
            "trajectory": name,
            "turns": turns,
            "advantage": _exact(np.full(count, advantage)),
            "logprob": _exact(now),
        }
        for other, far in (("before", 0.6), ("behaviour", 1.0), ("reference", 1.5)):
            row[other] = _exact(
                np.minimum(_exact(now) + spread * far * random.standard_normal(count), 0.0 if spread else now)
            )
        row["entropy"] = _exact(random.uniform(0.05, 2.0, count))
        row["share"] = _exact(random.choice([0.0, 0.5, 0.75], count))
        rows.append(row)
    return rows


def _step(case: Plain, now: Array, parts: Parts) -> Step:
    rows = case["rows"]
    lengths = [len(row["logprob"]) for row in rows]
    turns = [length for row in rows for length in row["turns"]]
    columns = {name: _column(case, name) for name in ("before", "behaviour", "reference", "entropy")}
    at, anchor = _column(case, "logprob"), case["algo"].get("anchor", "behaviour")
    step = Step(
        now=now,
        at=at,
        anchor=columns["behaviour"],
        advantages=_column(case, "advantage"),
        turns=np.repeat(np.arange(len(turns)), turns),
        trajectories=np.repeat([row["trajectory"] for row in rows], lengths),
        **columns,
    )
    stands = parts["anchor"][anchor](step, _column(case, "share"))
    # a log-linear anchor is also what stands before the update
    return Step(**{**vars(step), "anchor": stands, "before": stands if anchor == "loglinear" else step.before})


def _weights(case: Plain, step: Step, parts: Parts) -> Array:
    settings, of = case["algo"].get("correction", {}), parts["correction"]
    return np.asarray(of["correction"](of["weigh"](step, settings), of["rejected"](step, settings), settings), float)


def _column(case: Plain, name: str) -> Array:
    return np.concatenate([np.asarray(row[name], float) for row in case["rows"]])


def _by_row(case: Plain, flat: Sequence[float]) -> list[list[float]]:
    values = iter(flat)
    return [[next(values) for _ in row["logprob"]] for row in case["rows"]]


def _exact(values: Array) -> list[float]:
    return np.asarray(values, np.float32).astype(float).tolist()
