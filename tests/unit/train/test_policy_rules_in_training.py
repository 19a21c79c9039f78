"""Every ratio, gate and correction in a trainer: the same loss and gradients under any token budget and any sharing of
prefixes, and the loss of the golden reference at the trainer's own log-probabilities."""

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from golden.policy import loss as reference
from suite import short_of
from test_shared_prefixes import make_forest
from training import check_close, gradients, run

from sparring.algo.config import AlgoConfig, named
from sparring.algo.loss.policy import PolicyLoss
from sparring.algo.rules import RULES_BY_KEY
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer

GATES = [str(rule.__struct_config__.tag) for rule in RULES_BY_KEY["gate"]]
ALGOS = {
    **{gate: {"gate": {"name": gate}} for gate in GATES},
    "vespo": {"gate": {"name": "vespo"}, "ratio": {"name": "product"}},
    "clip_cov": {"gate": {"name": "clip_cov", "share": 0.2, "low": 0.05, "high": 9.0}},
    "kl_cov": {"gate": {"name": "kl_cov", "share": 0.2}},
    "sequence": {"ratio": {"name": "sequence"}},
    "turn": {"ratio": {"name": "turn"}},
    "top_entropy": {"top_entropy": 0.3},
    "normalised": {"correction": {"weight": "turn", "normalise": True}, "anchor": "proximal"},
    "rejection": {"correction": {"reject": "k3", "reject_unit": "turn", "reject_above": 0.2}},
    "kept": {"correction": {"reject": "k3", "reject_unit": "turn", "reject_above": 0.2, "denominator": "kept"}},
}


def trained(model, batch, algo, budget):
    """What a forward_backward measures, and what the trainer says of every token before it."""
    losses = [PolicyLoss(msgspec.convert(named(algo), AlgoConfig))]
    trainer = LocalTrainer(model, TrainConfig(token_budget=budget), losses, name="policy", total_steps=1, threads=1)

    async def work(trainer):
        said = await trainer.forward(batch.rows, {"logprob", "entropy"})
        return await trainer.forward_backward(batch), said

    return run(trainer, work)


def as_case(batch, algo, said):
    """The batch as a golden case; of a batch that is trained once, what stood before is what stands now."""
    rows = []
    for row, values in zip(batch.rows, said, strict=True):
        ours = [weight > 0 for weight in row.weights["policy"]]
        of = {
            "logprob": values["logprob"],
            "before": values["logprob"],
            "entropy": values["entropy"],
            "behaviour": row.logprobs,
            "reference": row.logprobs,
            "share": row.logprobs,
            "advantage": row.advantages,
        }
        turns = [len(list(run)) for mine, run in itertools.groupby(ours) if mine]
        columns = {
            name: np.float32(list(itertools.compress(column, ours))).astype(float).tolist()
            for name, column in of.items()
        }
        rows.append({**columns, "turns": turns, "trajectory": row.trajectory})
    return {"algo": algo, "rows": rows, "max_tokens": 1}


@pytest.mark.parametrize("name", short_of(ALGOS, ["vespo", "kl_cov", "sequence", "turn", "normalised", "kept"]))
def test_the_result_equals_the_references_under_any_token_budget(make_model, name):
    batch, algo = make_forest(3), ALGOS[name]
    whole, split = make_model(), make_model()
    together, said = trained(whole, batch, algo, 10_000)
    apart, _ = trained(split, batch, algo, 1)
    assert together["micro_batches"] == 1 and apart["micro_batches"] == len(batch.rows)
    assert together["tokens_shared"] > 0 == apart["tokens_shared"]
    case = as_case(batch, algo, said)
    expected = reference(case, np.concatenate([row["logprob"] for row in case["rows"]]))
    assert together["loss_policy"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert apart["loss_policy"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert together["clip_fraction"] == apart["clip_fraction"]
    assert any(gradient.any() for gradient in gradients(whole).values())
    check_close(split, whole)


OF_SEQUENCES = {
    "gspo": {"preset": "gspo"},
    "gmpo": {"preset": "gmpo", "gate": {"low": 0.9, "high": 1.1}},
    "vespo": {"gate": {"name": "vespo"}, "ratio": {"name": "product"}},
    "rejected": {"correction": {"reject": "k3", "reject_above": 0.2}},
}


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_branches_of_a_trajectory_are_one_sequence_also_in_micro_batches_of_their_own(make_model, name):
    batch = make_forest(3)
    rows = tuple(replace(row, id=f"g/{number // 3}#{number % 3}") for number, row in enumerate(batch.rows))
    branched, whole, split = replace(batch, rows=rows), make_model(), make_model()
    algo = msgspec.to_builtins(msgspec.convert(named(OF_SEQUENCES[name]), AlgoConfig))
    together, said = trained(whole, branched, algo, 10_000)
    apart, _ = trained(split, branched, algo, 1)
    assert together["micro_batches"] == 1 and apart["micro_batches"] == len(rows)
    case = as_case(branched, {**OF_SEQUENCES[name], **_parts(algo)}, said)
    expected = reference(case, np.concatenate([row["logprob"] for row in case["rows"]]))
    assert together["loss_policy"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert apart["loss_policy"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for metric in ("clip_fraction", "ratio", "approx_kl", "entropy"):
        assert together[metric] == pytest.approx(apart[metric], rel=1e-5, abs=1e-9)
    trained(alone := make_model(), batch, algo, 10_000)
    check_close(split, whole)
    assert any(not torch.allclose(gradients(alone)[key], of) for key, of in gradients(whole).items()), "not row by row"


def _parts(algo):
    """Ratio, gate and aggregation as the reference reads them."""
    return {"ratio": algo["ratio"], "gate": algo["gate"], "aggregation": "token_mean"}
