"""Rows that begin alike are computed together: the same log-probabilities to the bit, the same gradients within
rounding."""

import random
from dataclasses import replace

import pytest
import torch
from test_local_trainer import logprobs, make_trainer
from training import equal, gradients, run

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.policy import PolicyLoss
from sparring.batch.demonstration import demonstration, demonstration_batch
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Batch, Sample

pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths(portable=False)]

VOCABULARY = 48


def make_row(draw, name, beginning):
    """One rollout from `beginning` on: two turns that the policy sampled and a tool's words between them."""
    parts = [(1.0, draw.randint(1, 6)), (0.0, draw.randint(1, 4)), (1.0, draw.randint(1, 6))]
    weights = (*(0.0 for _ in beginning), *(weight for weight, length in parts for _ in range(length)))
    tokens = (*beginning, *(draw.randrange(VOCABULARY) for _ in weights[len(beginning) :]))
    advantage = draw.choice((-1, 1)) * draw.uniform(0.2, 1)
    return Sample(
        id=name,
        group="g",
        source="policy",
        tokens=tokens,
        weights={"policy": weights},
        logprobs=tuple(draw.uniform(-4.0, -3.7) * weight for weight in weights),
        advantages=tuple(advantage * weight for weight in weights),
        versions=tuple(0 if weight else -1 for weight in weights),
        kv_versions=tuple(0 if weight else -1 for weight in weights),
    )


def make_forest(seed, groups=4, size=3):
    """Groups under one header, among them rows that stand alone, in mixed order; one row is there twice."""
    draw = random.Random(seed)
    header = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 20))]
    rows = []
    for group in range(groups):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 12))]
        beginning = prompt if group == 1 else header + prompt
        rows += [make_row(draw, f"{group}-{i}", beginning) for i in range(size)]
    rows.append(replace(rows[0], id="again"))
    draw.shuffle(rows)
    count = sum(sum(row.weights["policy"]) for row in rows)
    return Batch(step=1, model="policy", rows=tuple(rows), denominators={"policy": count})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharing_changes_no_bit_of_any_log_probability(make_model, dtype):
    model = make_model(dtype)
    for seed in range(6):
        rows = make_forest(seed).rows
        for row, found in zip(rows, logprobs(model, rows), strict=True):
            assert torch.equal(found, logprobs(model, [row])[0])


def test_gradients_are_those_of_every_row_alone(make_model):
    for seed in range(3):
        batch = make_forest(seed)
        together, apart = make_model(), make_model()
        metrics = run(make_trainer(together, token_budget=10_000), lambda t, b=batch: t.forward_backward(b))
        alone = run(make_trainer(apart, token_budget=1), lambda t, b=batch: t.forward_backward(b))
        assert (metrics["micro_batches"], alone["micro_batches"]) == (1, len(batch.rows))
        assert metrics["tokens_trained"] == alone["tokens_trained"] == batch.denominators["policy"]
        assert metrics["tokens_forward"] < 0.7 * alone["tokens_forward"]
        assert metrics["tokens_forward"] + metrics["tokens_shared"] == alone["tokens_forward"]
        assert alone["tokens_shared"] == 0.0
        assert metrics["loss_policy"] == pytest.approx(alone["loss_policy"], abs=1e-6)
        expected = gradients(apart)
        for name, found in gradients(together).items():
            torch.testing.assert_close(found, expected[name], atol=2e-6, rtol=1e-4)


def test_the_same_batch_gives_the_same_gradients_to_the_bit(make_model):
    """With hundreds of tokens predicted from one place: indexing would add their gradients in the order threads
    come."""
    batch, found = make_forest(7, groups=4, size=80), []
    for _ in range(3):
        model = make_model()
        losses = [PolicyLoss(AlgoConfig())]
        trainer = LocalTrainer(model, TrainConfig(token_budget=10_000), losses, name="policy", total_steps=1, threads=4)
        run(trainer, lambda t: t.forward_backward(batch))
        found.append(gradients(model))
    assert all(equal(found[0], other) for other in found[1:])


def test_a_demonstration_given_twice_counts_twice(make_model):
    row = demonstration([1, 2, 3, 4, 5], [False, False, False, True, True], "d")
    metrics, grads = [], []
    for rows in ([row], [row, replace(row, id="again")]):
        model = make_model()
        batch = replace(demonstration_batch(rows, step=1, model="policy"), denominators={"imitate": 2.0})
        metrics.append(run(make_trainer(model), lambda t, b=batch: t.forward_backward(b)))
        grads.append(gradients(model))
    assert [m["tokens_forward"] for m in metrics] == [4.0, 4.0]
    assert [m["tokens_trained"] for m in metrics] == [2.0, 4.0]
    assert metrics[1]["loss_imitate"] == pytest.approx(2 * metrics[0]["loss_imitate"])
    for name, once in grads[0].items():
        torch.testing.assert_close(grads[1][name], 2 * once, atol=1e-6, rtol=1e-4)
