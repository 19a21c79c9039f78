"""A trainer with a reference beside it: over the whole vocabulary, and as the moving average of what is trained."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from common.tiny_adapters import tiny_adapter
from golden.kl import average, divergence, probabilities
from test_distillation import Counted
from test_shared_prefixes import make_forest
from training import check_close, equal, gradients, run

from sparring.algo.config import AlgoConfig
from sparring.algo.kl import Kl
from sparring.algo.loss.policy import PolicyLoss
from sparring.algo.rules import KlCov
from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.errors import BadInput
from sparring.generation import KeptSets, ScoreRequest
from sparring.model.attention import Packed
from sparring.model.load import load
from sparring.train.average import Average
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer

VOCABULARY = 48
COEFFICIENT = 0.3


@pytest.fixture(scope="module")
def other(make_other):
    """A reference of another shape."""
    return make_other(3)


def make_trainer(model, kl=None, *, teachers=None, **settings):
    config = TrainConfig(**{"learning_rate": 1e-2, "token_budget": 10_000, **settings})
    losses = [PolicyLoss(AlgoConfig(kl=kl or Kl()))]
    return LocalTrainer(model, config, losses, name="policy", total_steps=9, threads=1, teachers=teachers)


def once(model, batch, *, teachers=None, budget=10_000, kl=Kl(coefficient=COEFFICIENT, estimator="full")):
    return run(make_trainer(model, kl, teachers=teachers, token_budget=budget), lambda t: t.forward_backward(batch))


def with_teacher(batch, name="there"):
    return replace(batch, rows=tuple(replace(row, teacher=name) for row in batch.rows))


def with_kept_sets(batch, seed=2):
    """The batch as it would be under truncated sampling and a bias: kept sets with the sampled token in them."""
    draw = random.Random(seed)
    rows = []
    for row in batch.rows:
        kept = [
            sorted({token, *draw.sample(range(VOCABULARY), 9)}) if draw.random() < 0.7 else [] for token in row.tokens
        ]
        rows.append(
            replace(row, kept=KeptSets.of(kept), bias=(((3, 0.5), (8, -1.0)),) * len(row.tokens), temperature=0.8)
        )
    return replace(batch, rows=tuple(rows))


def by_equation(model, reference, batch):
    """The mean over the policy's tokens of the divergence, each row alone, from logits."""
    found = []
    for row in batch.rows:
        tokens = torch.tensor(row.tokens)
        where = Packed(torch.tensor([0, len(tokens)], dtype=torch.int32))
        ours = [place for place, weight in enumerate(row.weights["policy"]) if weight]
        given = [dict(row.bias[place]) if row.bias else {} for place in ours]
        kept = [np.frombuffer(row.kept.rows[place], "<i4").tolist() if row.kept else [] for place in ours]
        with torch.no_grad():
            of = [
                each.logits(each.hidden(tokens, torch.arange(len(tokens)), where, torch.tensor(ours) - 1))
                .double()
                .numpy()
                for each in (model, reference)
            ]
        found.append(divergence(*(probabilities(logits, given, kept, row.temperature) for logits in of)))
    return float(np.concatenate(found).mean())


@pytest.mark.parametrize("narrow", [False, True])
def test_the_divergence_is_equal_under_any_token_budget_and_sharing(make_model, other, narrow):
    batch = with_teacher(with_kept_sets(make_forest(3)) if narrow else make_forest(3))
    whole, split = make_model(), make_model()
    together = once(whole, batch, teachers={"there": other})
    apart = once(split, batch, teachers={"there": other}, budget=1)
    assert (
        together["micro_batches"] == 1 and apart["micro_batches"] == len(batch.rows) and together["tokens_shared"] > 0
    )
    expected = by_equation(make_model(), other, batch)
    without = once(make_model(), batch, kl=Kl())
    for found in (together, apart):
        assert found["reference_kl"] == pytest.approx(expected, rel=1e-5)
        assert found["loss_policy"] == pytest.approx(without["loss_policy"] + COEFFICIENT * expected, rel=1e-5)
    check_close(split, whole)


def test_each_row_is_compared_with_the_model_that_it_names(make_model, other):
    """Also where only some of the rows were sampled from kept sets: in one micro-batch."""
    batch = with_kept_sets(make_forest(4))
    rows = [replace(row, teacher="there" if place % 2 else "self") for place, row in enumerate(batch.rows)]
    rows = [row if place % 3 else replace(row, kept=None, bias=None) for place, row in enumerate(rows)]
    trainer = make_trainer(make_model(), teachers={"there": other, "self": make_model()})
    said = run(trainer, lambda t: t.forward(rows, {"teacher"}))
    for model, name in ((other, "there"), (make_model(), "self")):
        its = [place for place, row in enumerate(rows) if row.teacher == name]
        expected = run(make_trainer(model), lambda t, its=its: t.forward([rows[place] for place in its], {"logprob"}))
        assert [said[place]["teacher"] for place in its] == [values["logprob"] for values in expected]


def test_a_survey_computes_no_reference(make_model, other):
    """The gate that singles tokens out finds the same ones beside the penalty, whose reference is computed once."""
    counted = Counted(other)
    algo = AlgoConfig(gate=KlCov(share=0.2), kl=Kl(coefficient=COEFFICIENT, estimator="full"))
    teachers, losses = {"there": counted}, [PolicyLoss(algo)]
    trainer = LocalTrainer(
        make_model(), TrainConfig(), losses, name="policy", total_steps=1, threads=1, teachers=teachers
    )
    batch = with_teacher(make_forest(3))
    found = run(trainer, lambda t: t.forward_backward(batch))
    assert found["reference_kl"] == pytest.approx(by_equation(make_model(), other, batch), rel=1e-5)
    assert counted.tokens == found["tokens_forward"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("narrow", [False, True])
def test_at_equal_weights_the_divergence_is_exactly_zero(make_model, dtype, narrow):
    batch = with_teacher(with_kept_sets(make_forest(1)) if narrow else make_forest(1))
    model, alone = make_model(), make_model()
    assert once(make_model(dtype), batch, teachers={"there": make_model(dtype)})["reference_kl"] == 0.0
    once(model, batch, teachers={"there": make_model()})
    once(alone, batch, kl=Kl())
    largest = max(gradient.abs().max() for gradient in gradients(alone).values())
    for key, gradient in gradients(alone).items():
        assert (gradients(model)[key] - gradient).abs().max() <= 1e-6 * largest


@pytest.mark.parametrize("narrow", [False, True])
def test_a_reference_equals_a_trainer_of_its_own_at_sampled_tokens(make_model, other, narrow):
    batch = with_teacher(with_kept_sets(make_forest(5)) if narrow else make_forest(5))

    def said(trainer, name):
        return [values[name] for values in run(trainer, lambda t: t.forward(batch.rows, {name}))]

    assert said(make_trainer(make_model(), teachers={"there": other}), "teacher") == said(
        make_trainer(other), "logprob"
    )


@pytest.mark.parametrize("name", ["there", "self"])
def test_the_trainer_scores_given_tokens_like_an_engine(make_model, other, name):
    models = {"there": other, "self": make_model()}
    trainer, draw = make_trainer(make_model(), teachers=models), random.Random(8)
    asked = [
        ScoreRequest(
            id=str(i),
            tokens=tuple(draw.choices(range(VOCABULARY), k=12)),
            first=1 + 3 * i,
            temperature=0.8,
            top_k=2 * i,
        )
        for i in range(3)
    ]

    async def both(trainer):
        engine = NativeEngine(models[name], EngineConfig(), name=name, threads=1)
        try:
            return [(await trainer.score(name, request), await engine.score(request)) for request in asked]
        finally:
            await engine.close()

    for ours, engines in run(trainer, both):
        assert replace(ours, cached_tokens=engines.cached_tokens) == engines


def train_with_average(model, batches, teacher, *, kl=None, restore=None, save=None):
    """What is trained after every update, the average after the last, and each update's metrics; saved to `save` after
    the third."""
    teachers = {"average": teacher}
    trainer = make_trainer(
        model, kl or Kl(coefficient=COEFFICIENT, estimator="full", reference="average"), teachers=teachers
    )
    found, metrics = [], []

    async def work(trainer):
        ref = None
        if restore is not None:
            await trainer.restore(restore)
        for batch in batches:
            metrics.append(await trainer.forward_backward(with_teacher(batch, "average")))
            await trainer.step()
            found.append({name: value.clone() for name, value in trainer._optimiser.masters().items()})
            if save is not None and batch.step == 3:
                ref = await trainer.save(str(save), stage="rl", metrics={})
        return ref

    ref = run(trainer, work)
    return found, {name: value.clone() for name, value in teacher.state().items()}, metrics, ref


@pytest.fixture(params=["float32", "bfloat16", "adapter"])
def make(request, model_path, tmp_path):
    """A fresh model of the same weights at every call."""
    if request.param == "adapter":
        folder = tiny_adapter(model_path, tmp_path / "a", seed=1)
        return lambda: load(folder)
    return lambda: load(model_path, dtype=request.param)


def test_the_average_follows_what_is_trained(make, make_batch):
    """As its equation says, in float32; what it computes with is that average, and the first update is compared with
    the start."""
    teacher, start = Average(make(), 0.7), Average(make(), 0.7).state()
    weights, found, metrics, _ = train_with_average(make(), [make_batch(step) for step in range(1, 5)], teacher)
    moved = 0.0
    for name, value in weights[-1].items():
        expected = average(0.7, start[name].double().numpy(), [update[name].double().numpy() for update in weights])[-1]
        assert np.abs(found[name].double().numpy() - expected).max() <= 1e-6 * max(1.0, np.abs(expected).max())
        moved = max(moved, float((found[name] - value).abs().max()))
    assert moved > 1e-4, "it lags behind"
    computes = (teacher.model.adapters.everywhere or teacher.model).parameters()
    assert all(torch.equal(computes[name], value.to(computes[name].dtype)) for name, value in found.items())
    assert metrics[0]["reference_kl"] == 0.0 < metrics[1]["reference_kl"]


def test_the_average_moves_per_update_not_per_optimiser_step(make, make_batch):
    teacher = Average(make(), 0.5)
    before = {name: value.clone() for name, value in teacher.state().items()}
    trainer = make_trainer(make(), Kl(coefficient=COEFFICIENT, estimator="full"), teachers={"average": teacher})
    moved = []

    async def work(trainer):
        for ends in (False, True):
            await trainer.forward_backward(with_teacher(make_batch(), "average"))
            await trainer.step(ends_update=ends)
            moved.append(any(not torch.equal(before[name], value) for name, value in teacher.state().items()))

    run(trainer, work)
    assert moved == [False, True]


def test_an_average_of_decay_0_is_the_previous_update(make, make_batch):
    weights, found, *_ = train_with_average(make(), [make_batch(step) for step in (1, 2)], Average(make(), 0.0))
    assert equal(found, weights[-1])


def test_the_average_keeps_its_bits_while_weights_do_not_change(make, make_batch):
    start = Average(make(), 0.9).state()
    _, found, *_ = train_with_average(make(), [make_batch(step, rows=0) for step in range(1, 4)], Average(make(), 0.9))
    assert equal(found, start)


def test_a_resume_goes_on_to_the_same_bits(make, make_batch, tmp_path):
    batches = [make_batch(step) for step in range(1, 7)]
    weights, found, metrics, ref = train_with_average(make(), batches, Average(make(), 0.7), save=tmp_path / "c")
    again, found_again, metrics_again, _ = train_with_average(make(), batches[3:], Average(make(), 0.7), restore=ref)
    assert equal(weights[-1], again[-1]) and equal(found, found_again)
    assert [step["reference_kl"] for step in metrics[3:]] == [step["reference_kl"] for step in metrics_again]
    with pytest.raises(BadInput, match="checkpoint .*: expected the .train. settings and moving averages"):
        train_with_average(make(), [], Average(make(), 0.6), restore=ref)


def test_an_average_of_another_model_is_refused(make, other):
    with pytest.raises(BadInput, match="this model's parameters"):
        Average(make(), 0.5).load_state(Average(other, 0.5).state())
