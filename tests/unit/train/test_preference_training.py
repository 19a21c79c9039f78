"""Preferences through the trainer: pairs stay whole, surveys are of the whole batch, scalar heads learn what a text is
worth."""

import random
from dataclasses import replace

import pytest
import torch
from training import equal, run

from sparring.algo.loss.imitate import ImitateLoss
from sparring.algo.loss.preference.bradley_terry import BradleyTerry
from sparring.algo.loss.preference.dpo import Dpo
from sparring.algo.loss.preference.kto import Kto
from sparring.algo.loss.preference.pairs import PairLoss
from sparring.algo.loss.step_labels import StepLabels
from sparring.batch.preference import CHOSEN, REJECTED, labelled_steps, mismatched, preference_batch, reply, whole_text
from sparring.batch.units import units
from sparring.model.load import load
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer

VOCABULARY = 48
PAIRED = frozenset({"preference"})


def trained(model, losses, work, *, threads=1, **settings):
    """`work` of a trainer of these losses."""
    config = TrainConfig(**{"learning_rate": 1e-2, "token_budget": 64, **settings})
    return run(LocalTrainer(model, config, losses, name="policy", total_steps=20, threads=threads), work)


def drawn_pairs(count, *, share=0.5, imitate=False, long=12):
    """Rows of pairs, the sides of a pair behind one prompt, shuffled; references are near what a random model says."""
    draw, rows = random.Random(5), []
    for number in range(count):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 6))]
        for label in (CHOSEN, REJECTED):
            answer = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, long))]
            marks = [False] * len(prompt) + [True] * len(answer)
            where = {"id": f"{number}{label:+}", "group": f"{number}", "imitate": imitate and label > 0}
            made = reply([*prompt, *answer], marks, label=label, share=share, **where)
            reference = tuple(draw.uniform(-5, -3) if mark else 0.0 for mark in marks)
            rows.append(replace(made, annotations={"reference": reference}))
    draw.shuffle(rows)
    return rows


def step_of(batch, model, losses, **settings):
    async def work(trainer):
        metrics = await trainer.forward_backward(batch)
        return metrics, {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}

    return trained(model, losses, work, **settings)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-6)


def test_any_token_budget_gives_the_same_gradients_of_pairs(make_model):
    batch = preference_batch(units(drawn_pairs(9, imitate=True), PAIRED), step=1, model="policy")
    losses = [PairLoss(Dpo()), ImitateLoss(scale=0.5)]
    metrics, expected = step_of(batch, make_model(), losses, token_budget=10_000)
    assert metrics["micro_batches"] == 1 and metrics["tokens_shared"] > 0
    for budget, least in ((1, 9), (40, 4), (90, 2)):
        parts, found = step_of(batch, make_model(), losses, token_budget=budget)
        assert parts["micro_batches"] >= least
        for name in ("loss_preference", "loss_imitate", "accuracy", "reward_margin"):
            assert parts[name] == pytest.approx(metrics[name], rel=1e-5)
        assert_same(found, expected)


def test_a_pair_that_is_chosen_twice_counts_twice(make_model):
    """Where one epoch ends and the next begins."""
    rows = drawn_pairs(1)
    once, twice = (preference_batch([rows] * count, step=1, model="policy") for count in (1, 2))
    assert (once.denominators["preference"], twice.denominators["preference"]) == (
        pytest.approx(1.0),
        pytest.approx(2.0),
    )
    (one, first), (two, second) = (step_of(batch, make_model(), [PairLoss(Dpo())]) for batch in (once, twice))
    assert two["loss_preference"] == pytest.approx(one["loss_preference"], rel=1e-6)
    assert_same(second, first)


def test_pairs_are_cut_between_lanes_as_wholes(make_model):
    """Enough tokens for two lanes; the same bits with one thread and with two."""
    batch = preference_batch(units(drawn_pairs(24, long=30), PAIRED), step=1, model="policy")
    one, first = step_of(batch, make_model(), [PairLoss(Dpo())], token_budget=10_000)
    two, second = step_of(batch, make_model(), [PairLoss(Dpo())], token_budget=10_000, threads=2)
    assert one["micro_batches"] == two["micro_batches"] == 2
    assert equal(first, second)


def kto_batch():
    rows = drawn_pairs(6, share=1.0)
    # far below what the model says, so that the shift is not cut off at 0
    rows = [
        replace(r, annotations={"reference": tuple(3.0 * value for value in r.annotations["reference"])}) for r in rows
    ]
    strangers = []
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        stranger = mismatched(row, other, 64)
        known = tuple(-12.0 if weight else 0.0 for weight in stranger.weights["preference"])
        strangers.append(replace(stranger, annotations={"reference": known}))
    return preference_batch(units([*rows, *strangers], PAIRED), step=1, model="policy")


def test_a_survey_covers_the_whole_batch_under_any_token_budget(make_model):
    batch = kto_batch()
    assert batch.denominators["preference"] == pytest.approx(12.0)
    metrics, expected = step_of(batch, make_model(), [Kto()], token_budget=10_000)
    assert metrics["kto_shift"] > 1.0
    for budget in (1, 60):
        parts, found = step_of(batch, make_model(), [Kto()], token_budget=budget)
        assert parts["kto_shift"] == pytest.approx(metrics["kto_shift"], rel=1e-6)
        assert parts["loss_preference"] == pytest.approx(metrics["loss_preference"], rel=1e-6)
        assert_same(found, expected)
    # the mismatched rows are judged, not trained
    assert metrics["tokens_trained"] == sum(
        len(r.weights["preference"]) - r.weights["preference"].count(0.0) for r in batch.rows if r.label
    )


def test_a_step_without_mismatched_rows_is_refused(make_model):
    batch = kto_batch()
    alone = replace(batch, rows=tuple(row for row in batch.rows if row.label))
    with pytest.raises(ValueError, match="expected mismatched rows"):
        step_of(alone, make_model(), [Kto()])


def test_rewards_are_zero_at_the_references_weights(make_model):
    """The reference that a run begins with is its own model: `forward` gives it, to the bit."""

    async def work(trainer):
        rows = drawn_pairs(4)
        known = await trainer.forward(rows, frozenset({"logprob"}))
        rows = [
            replace(row, annotations={"reference": values["logprob"]}) for row, values in zip(rows, known, strict=True)
        ]
        first = await trainer.forward_backward(preference_batch(units(rows, PAIRED), step=1, model="policy"))
        await trainer.step()
        for step in range(2, 12):
            last = await trainer.forward_backward(preference_batch(units(rows, PAIRED), step=step, model="policy"))
            await trainer.step()
        return first, last

    first, last = trained(make_model(), [PairLoss(Dpo(beta=0.5))], work)
    assert first["reward_margin"] == first["reward_chosen"] == 0.0 and first["accuracy"] == 0.5
    assert last["accuracy"] == 1.0 and last["reward_margin"] > 0.5


def test_a_scalar_head_learns_which_text_is_better(model_path):
    """The reward is of the whole text, its last token included: the two of a pair differ there alone."""
    rows = [
        whole_text((5 + number, 6, 7 if label > 0 else 8), id=f"{number}{label}", group=str(number), label=label)
        for number in range(6)
        for label in (CHOSEN, REJECTED)
    ]

    async def work(trainer):
        before = await trainer.forward(rows, frozenset({"value"}))
        for step in range(1, 16):
            metrics = await trainer.forward_backward(preference_batch(units(rows, PAIRED), step=step, model="policy"))
            await trainer.step()
        ref = await trainer.push()
        return before, metrics, await trainer.forward(rows, frozenset({"value"})), ref

    model = load(model_path, head="new scalar")
    before, metrics, after, ref = trained(model, [BradleyTerry(centre=0.01)], work)
    assert not any(any(values["value"]) for values in before)
    assert metrics["accuracy"] == 1.0 and "logprob_max_abs_diff" not in metrics and ref.probe is None
    worth = [values["value"][-1] for values in after]
    assert all(good > bad + 1.0 for good, bad in zip(worth[::2], worth[1::2], strict=True))


def test_a_scalar_head_learns_step_labels(model_path):
    """Token 9 is a wrong step; what follows it is not made wrong by it."""
    draw = random.Random(1)
    texts = [[draw.choice([4, 5, 9]) for _ in range(6)] for _ in range(8)]
    rows = [
        labelled_steps((1, 2, *text), {3 + at: float(token != 9) for at, token in enumerate(text)}, id=str(n))
        for n, text in enumerate(texts)
    ]

    async def work(trainer):
        for step in range(1, 31):
            metrics = await trainer.forward_backward(preference_batch(units(rows, PAIRED), step=step, model="policy"))
            await trainer.step()
        return metrics

    assert trained(load(model_path, head="new scalar"), [StepLabels()], work)["accuracy"] == 1.0
