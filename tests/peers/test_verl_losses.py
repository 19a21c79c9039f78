"""Policy losses, aggregations, penalties, corrections and the critic's loss against all that verl knows by a name:
values and gradients, in float64, over rows of several turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, log
from typing import Any

import pytest
import torch
from golden.policy import draw
from policy_cases import computed

from sparring.algo.annotate.kl import KlCoefficient
from sparring.algo.kl import Kl
from sparring.algo.loss.value import ValueLoss
from sparring.algo.shaping.kl_reward import KlReward
from sparring.batch.tensors import micro_batch
from sparring.types import Sample

pytestmark = pytest.mark.peers
TOLERANCE = 1e-6
LENGTH = 7
"""Of the aggregation "constant"."""

AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
AGGREGATIONS_APART = {
    "token-sum": "a sum without a denominator: its gradient grows with the batch, and no algorithm here asks for it"
}


def drawn(seed: int, *, spread: float = 0.6, per_token: bool = False) -> list[dict[str, Any]]:
    """Rows of one to three turns, one without advantage; each a trajectory of its own, for verl knows no branches."""
    rows = draw(seed, spread=spread)
    for number, row in enumerate(rows):
        row["trajectory"] = str(number)
        if per_token:
            row["advantage"] = [a * (1 + 0.3 * (-1) ** place) for place, a in enumerate(row["advantage"])]
    return rows


def padded(rows: Sequence[Mapping[str, Any]], name: str) -> list[list[float]]:
    """[B, T]: a value where the policy sampled, 0 between turns and behind the end; `name` "mask" is where it did."""
    found = []
    for row in rows:
        values, line = iter(row.get(name) or [1.0] * sum(row["turns"])), []
        for number, length in enumerate(row["turns"]):
            line += [0.0] * min(number, 1) + [next(values) for _ in range(length)]
        found.append(line)
    longest = max(map(len, found))
    return [line + [0.0] * (longest - len(line)) for line in found]


def taken(rows: Sequence[Mapping[str, Any]], matrix: Sequence[Sequence[float]]) -> list[float]:
    """What the matrix says of the sampled tokens, row after row; it says nothing of the others."""
    both = list(zip(matrix, padded(rows, "mask"), strict=True))
    assert not any(x for line, mask in both for x, there in zip(line, mask, strict=True) if not there)
    return [x for line, mask in both for x, there in zip(line, mask, strict=True) if there]


def flat(rows: Sequence[Sequence[float]]) -> list[float]:
    return [x for row in rows for x in row]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """`[algo]` of ours beside a loss of verl with its config.

    `as_score`: verl writes the same gradient as weight * log pi, of which our surrogate has another value; verl's value
    is then held against our gradient times log pi.
    """

    algo: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    modes: Sequence[str] = ("token-mean",)
    as_score: bool = False
    spread: float = 0.6
    per_token: bool = False
    on_policy: bool = False
    stops: bool = True


def bounds(low: float, high: float) -> dict[str, float]:
    return {"clip_ratio_low": low, "clip_ratio_high": high}


def bypass(**settings: Any) -> dict[str, Any]:
    return {"policy_loss": {"rollout_correction": settings}, **bounds(0.2, 0.28)}


def covariance(**settings: float) -> dict[str, Any]:
    return {"policy_loss": settings, **bounds(0.2, 0.2)}


_CLIP = {"gate": {"name": "dual_clip", "low": 0.2, "high": 0.28, "bound": 1.5}}
_WEIGHED = {"gate": "none", "anchor": "proximal"}
COMPARED: Mapping[str, Sequence[Compared]] = {
    "vanilla": [
        Compared(
            algo=_CLIP, config={**bounds(0.2, 0.28), "clip_ratio_c": 1.5}, modes=tuple(AGGREGATIONS), per_token=True
        )
    ],
    "dppo_tv": [
        Compared(
            algo={"gate": {"name": "tv_mask", "above": above}},
            config=bounds(above, above) | {"clip_ratio_c": 1e3},
            as_score=True,
        )
        for above in (0.02, 0.1)
    ],
    "dppo_kl": [
        Compared(
            algo={"gate": {"name": "kl_mask", "above": above}},
            config=bounds(above, above) | {"clip_ratio_c": 1e3},
            as_score=True,
        )
        for above in (0.005, 0.05)
    ],
    "gspo": [
        Compared(
            algo={
                "ratio": {"name": "sequence", "per_token": per_token},
                "gate": {"name": "clip", "low": 0.03, "high": 0.04},
            },
            config=bounds(0.03, 0.04),
            modes=("seq-mean-token-mean",),
            per_token=per_token,
        )
        for per_token in (True, False)
    ],
    "sapo": [
        Compared(
            algo={"gate": {"name": "sapo", "tau_positive": 1.5, "tau_negative": 3.0}},
            config={"tau_pos": 1.5, "tau_neg": 3.0},
            modes=("seq-mean-token-mean",),
            per_token=True,
        )
    ],
    "gpg": [
        Compared(
            algo={"gate": "none"}, on_policy=True, as_score=True, per_token=True, stops=False, modes=tuple(AGGREGATIONS)
        )
    ],
    # all that lie between the bounds are chosen, so that nothing is drawn, and no ratio of the others reaches a clip
    "clip_cov": [
        Compared(
            algo={"gate": {"name": "clip_cov", "share": 1.0, "low": 0.1, "high": 0.6}},
            config=covariance(clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=0.6),
            spread=0.05,
        )
    ],
    "kl_cov": [
        Compared(
            algo={"gate": {"name": "kl_cov", "share": 0.3, "coefficient": 0.7}},
            config=covariance(kl_cov_ratio=0.3, ppo_kl_coef=0.7),
            modes=("token-mean", "seq-mean-token-mean"),
        )
    ],
    "geo_mean": [
        Compared(
            algo={"gate": {"name": "geometric", "low": exp(-0.2), "high": exp(0.3)}},
            config=bounds(0.2, 0.3),
            modes=("seq-mean-token-mean",),
        )
    ],
    "cispo": [
        Compared(
            algo={"gate": {"name": "cispo", "low": low, "high": 0.28}},
            config=bounds(low, 0.28),
            modes=modes,
            per_token=True,
        )
        for low, modes in ((1.0, tuple(AGGREGATIONS)), (0.3, ("token-mean",)))
    ],
    "bypass_mode": [
        Compared(algo=_CLIP, config=bypass(loss_type="ppo_clip") | {"clip_ratio_c": 1.5}, per_token=True),
        Compared(
            algo={"gate": {"name": "cispo", "low": 1.0, "high": 0.5}},
            config=bypass(loss_type="reinforce", rollout_is="token", rollout_is_threshold=1.5),
        ),
        Compared(
            algo={**_WEIGHED, "correction": {"weight": "sequence", "high": 1.5, "compare": "now"}},
            config=bypass(loss_type="reinforce", rollout_is="sequence", rollout_is_threshold=1.5),
            as_score=True,
            stops=False,
        ),
    ],
}
"""By verl's name."""

APART: Mapping[str, str] = {
    "dro": 'A log pi less a square of the log-ratio (arXiv 2405.19107): no gate; `kl` k2 to "last" is the square alone',
}
"""verl's names that nothing of ours is compared with, and why."""


def test_every_name_of_verl_is_compared_or_listed(verl) -> None:
    theirs = verl("names")
    for kind, compared, apart in (
        ("losses", COMPARED, APART),
        ("aggregations", AGGREGATIONS, AGGREGATIONS_APART),
        ("penalties", PENALTIES, PENALTIES_APART),
        ("weights", WEIGHTS, {}),
        ("rejections", REJECTIONS, {}),
    ):
        assert set(theirs[kind]) == compared.keys() | apart.keys(), kind
        assert not compared.keys() & apart.keys() and all(len(reason) > 20 for reason in apart.values())


@pytest.mark.parametrize("name", COMPARED)
def test_a_loss_and_its_gradient_are_verls(name: str, verl) -> None:
    for case in COMPARED[name]:
        stopped = 0.0
        for seed in range(3):
            rows = drawn(seed, spread=case.spread, per_token=case.per_token)
            for row in rows:
                row["before"] = row["logprob"]
                if case.on_policy:
                    row["behaviour"] = row["logprob"]
            names = {
                "log_prob": "logprob",
                "old_log_prob": "behaviour",
                "advantages": "advantage",
                "response_mask": "mask",
            }
            for mode in case.modes:
                algo = {**case.algo, "aggregation": AGGREGATIONS[mode]}
                total, gradient, _, metrics = computed({"algo": algo, "rows": rows, "max_tokens": LENGTH})
                config = {**case.config, "global_batch_info": {"loss_scale_factor": LENGTH}}
                theirs = verl(
                    "loss",
                    name=name,
                    rows={key: padded(rows, of) for key, of in names.items()},
                    mode=mode,
                    config=config,
                )
                mine = flat(gradient)
                scale = max(map(abs, mine))
                assert mine == pytest.approx(taken(rows, theirs["gradient"]), rel=TOLERANCE, abs=TOLERANCE * scale), (
                    case,
                    mode,
                )
                if case.as_score:
                    total = sum(g * x for g, x in zip(mine, flat([row["logprob"] for row in rows]), strict=True))
                assert total == pytest.approx(theirs["loss"], rel=TOLERANCE, abs=TOLERANCE), (case, mode)
                stopped += metrics["clip_fraction"][0]
        assert stopped > 0 or not case.stops, "no token reached a bound"


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_aggregation_is_verls(name: str, verl) -> None:
    """At ratio 1 a token's loss is minus its advantage, and its derivative what the token counts."""
    rows = drawn(5, per_token=True)
    for row in rows:
        row["behaviour"] = row["logprob"]
    algo = {"gate": "none", "aggregation": AGGREGATIONS[name]}
    total, gradient, _, _ = computed({"algo": algo, "rows": rows, "max_tokens": LENGTH})
    losses = [{**row, "loss": [-a for a in row["advantage"]]} for row in rows]
    settings = {"loss_scale_factor": LENGTH} if AGGREGATIONS[name] == "constant" else {}
    theirs = verl("aggregation", name=name, values=padded(losses, "loss"), mask=padded(rows, "mask"), **settings)
    assert total == pytest.approx(theirs["loss"], rel=TOLERANCE)
    counts = [
        -a * count
        for a, count in zip(flat([r["advantage"] for r in rows]), taken(rows, theirs["gradient"]), strict=True)
    ]
    assert flat(gradient) == pytest.approx(counts, rel=TOLERANCE, abs=TOLERANCE)


PENALTIES = {"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3", "abs": "abs"}
PENALTIES_APART = {
    "full": "verl raises NotImplementedError: its losses see no logits; ours is held against golden vectors"
}


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_is_verls(name: str, verl) -> None:
    rows = drawn(6, spread=1.0)
    now, reference = (flat([row[of] for row in rows]) for of in ("logprob", "reference"))
    theirs = verl("penalty", name=name, now=now, reference=reference)
    priced = KlReward(coefficient=1.0, estimator=PENALTIES[name])
    prices = [-x for x in rewarded(priced, now, reference)]
    assert prices == pytest.approx(theirs["values"], rel=TOLERANCE, abs=TOLERANCE)
    if PENALTIES[name] != "k1":  # of which a loss would learn nothing: we have it in the reward alone
        own = torch.tensor(now, dtype=torch.float64, requires_grad=True)
        found = Kl(coefficient=1.0, estimator=PENALTIES[name])(own, torch.tensor(reference, dtype=torch.float64))
        found.sum().backward()
        assert found.tolist() == pytest.approx(theirs["values"], rel=TOLERANCE, abs=TOLERANCE)
        assert own.grad.tolist() == pytest.approx(theirs["gradient"], rel=TOLERANCE, abs=TOLERANCE)


def sampled(now: Sequence[float], **annotations: Sequence[float]) -> Sample:
    """One row of these tokens, behind one of context."""
    weights, columns = (0.0, *[1.0] * len(now)), {name: (0.0, *of) for name, of in annotations.items()}
    tokens, logprobs = tuple(range(len(now) + 1)), (0.0, *now)
    return Sample(
        id="t#0",
        group="g",
        source="policy",
        tokens=tokens,
        weights={"policy": weights},
        logprobs=logprobs,
        annotations=columns,
    )


def rewarded(
    price: KlReward, now: Sequence[float], reference: Sequence[float], earned: Sequence[float] = ()
) -> list[float]:
    row = sampled(now, reference=reference, **({"reward": earned} if earned else {}))
    [after] = asyncio.run(price.annotate([row]))
    return list(after.annotations["reward"])[1:]


def test_what_the_reference_costs_in_the_reward_is_verls(verl) -> None:
    rows = drawn(7)
    now, reference, earned = (flat([row[of] for row in rows]) for of in ("logprob", "reference", "entropy"))
    theirs = verl("reward", earned=earned, now=now, reference=reference, coefficient=0.03)
    assert rewarded(KlReward(coefficient=0.03), now, reference, earned) == pytest.approx(
        theirs["values"], rel=TOLERANCE
    )


def test_an_adaptive_coefficient_is_verls(verl) -> None:
    divergences = [0.5, 0.9, 1.05, 1.1, 3.0, 2.0]
    theirs = verl("controller", coefficient=0.2, target=1.0, horizon=80, steps=4, divergences=divergences)
    ours, found = KlCoefficient(Kl(coefficient=0.2, target=1.0, gain=4 / 80)), []
    for divergence in divergences:
        asyncio.run(ours.annotate([sampled([-1.0, -2.0], reference=[-1.0 - divergence, -2.0])]))
        found.append(ours.state()["coefficient"])
    assert found == pytest.approx(theirs["coefficients"], rel=TOLERANCE)
    assert any(before < after for before, after in pairwise(found)) and any(
        before > after for before, after in pairwise(found)
    )


WEIGHTS: Mapping[str, Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "token": [
        ({"weight": "token", "high": 1.2}, {"rollout_is_threshold": 1.2}),
        ({"weight": "token", "bound": "mask", "low": 0.8, "high": 1.25}, {"rollout_is_threshold": "0.8_1.25"}),
        (
            {"weight": "token", "high": 1.2, "normalise": True},
            {"rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True},
        ),
    ],
    "sequence": [
        ({"weight": "sequence", "high": 1.1}, {"rollout_is_threshold": 1.1}),
        ({"weight": "sequence", "bound": "mask", "low": 0.8, "high": 1.25}, {"rollout_is_threshold": "0.8_1.25"}),
    ],
}
"""Settings of a correction of ours, and verl's, by what a weight belongs to."""

REJECTIONS: Mapping[str, tuple[str, str, str]] = {
    **{f"token_{k}": (k, "token", "mean") for k in ("k1", "k2", "k3")},
    **{f"seq_{by}_{k}": (k, "sequence", by) for k in ("k1", "k2", "k3") for by in ("sum", "mean")},
    **{f"seq_max_{k}": (k, "sequence", "max") for k in ("k2", "k3")},
}
"""Divergence, unit, and how the unit's is one number, by verl's name."""


def corrected(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """The weight of each token: at ratio 1 and advantage 1 minus its derivative, times the tokens of the mean."""
    case = {
        "algo": {**_WEIGHED, "correction": settings, "aggregation": "token_mean"},
        "rows": rows,
        "max_tokens": LENGTH,
    }
    found = flat(computed(case)[1])
    return [-g * len(found) for g in found]


def behind(seed: int) -> list[dict[str, Any]]:
    """Rows of an engine whose probabilities are not the trainer's, which are those before the update."""
    return [
        {**row, "before": row["logprob"], "advantage": [1.0] * sum(row["turns"])} for row in drawn(seed, spread=0.2)
    ]


@pytest.mark.parametrize("name", WEIGHTS)
def test_importance_weights_are_verls(name: str, verl) -> None:
    for ours, theirs in WEIGHTS[name]:
        rows = behind(8)
        asked = {"old": padded(rows, "before"), "behaviour": padded(rows, "behaviour"), "mask": padded(rows, "mask")}
        found = taken(rows, verl("correction", **asked, rollout_is=name, **theirs)["weights"])
        assert corrected(ours, rows) == pytest.approx(found, rel=TOLERANCE, abs=TOLERANCE)
        assert len(set(found)) > 2 and (max(found) == ours["high"] or 0.0 in found or "normalise" in ours)


@pytest.mark.parametrize("name", REJECTIONS)
def test_the_same_tokens_are_rejected_as_by_verl(name: str, verl) -> None:
    """Which they are, not what the others are divided by: verl takes them out of the denominator."""
    kind, unit, by = REJECTIONS[name]
    kept = rejected = 0
    for seed in range(3):
        for bound in (1.02, 1.1, 1.3):
            rows = behind(seed)
            two_sided = {"reject_above": log(bound), "reject_below": -log(bound)}
            above = two_sided if kind == "k1" else {"reject_above": bound - 1}
            threshold = f"{1 / bound!r}_{bound!r}" if kind == "k1" else bound - 1
            ours = {"reject": kind, "reject_unit": unit, **({} if unit == "token" else {"reject_by": by}), **above}
            asked = {
                "old": padded(rows, "before"),
                "behaviour": padded(rows, "behaviour"),
                "mask": padded(rows, "mask"),
            }
            found = taken(
                rows,
                verl("correction", **asked, rollout_is=None, rollout_rs=name, rollout_rs_threshold=threshold)["kept"],
            )
            assert [weight != 0 for weight in corrected(ours, rows)] == [one == 1 for one in found]
            kept, rejected = kept + found.count(1.0), rejected + found.count(0.0)
    assert kept and rejected


def test_the_critics_loss_and_its_gradient_are_verls(verl) -> None:
    rows, clip = drawn(9), 0.3
    lines = {"said": padded(rows, "logprob"), "target": padded(rows, "entropy"), "old": padded(rows, "before")}
    theirs = verl("value", **lines, mask=padded(rows, "mask"), clip=clip)
    samples = []
    for number, row in enumerate(rows):
        row_of = sampled(row["logprob"], value=row["before"], **{"return": row["entropy"]})
        samples.append(replace(row_of, id=f"{number}#0", weights={"value": row_of.weights["policy"]}))
    count = sum(sum(row["turns"]) for row in rows)
    micro = micro_batch(samples, {"value": float(count)})
    columns = {
        name: torch.tensor(flat([row[of] for row in rows]), dtype=torch.float64)
        for name, of in (("value", "before"), ("return", "entropy"))
    }
    micro = replace(micro, weights={"value": micro.weights["value"].double()}, annotations=columns)
    said = torch.tensor(flat([row["logprob"] for row in rows]), dtype=torch.float64, requires_grad=True)
    result = ValueLoss(clip=clip)({"value": said}, micro)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(theirs["loss"], rel=TOLERANCE)
    assert said.grad.tolist() == pytest.approx(taken(rows, theirs["gradient"]), rel=TOLERANCE, abs=TOLERANCE)
    clipped, of = result.metrics["clip_fraction"]
    assert 0 < clipped < of and clipped / of == pytest.approx(theirs["clipped"], abs=1e-6)
