"""Gradients and weights that are not finite: dropped, counted, and the end of a run."""

import json
from dataclasses import replace

import pytest
import torch
from training import equal, run

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.policy import PolicyLoss
from sparring.errors import NotFinite
from sparring.observe.sinks.jsonl import JsonlSink
from sparring.stages.runtime.reports import StepReports
from sparring.stages.runtime.totals import Totals
from sparring.train.config import TrainConfig
from sparring.train.non_finite import DROPPED_STEPS
from sparring.train.trainer import LocalTrainer
from sparring.types import TokenAccount

BAD = float("inf")


def trainer_of(model):
    config = TrainConfig(learning_rate=1e-3)
    return LocalTrainer(model, config, [PolicyLoss(AlgoConfig())], name="policy", total_steps=9, threads=1)


def broken(batch):
    rows = (replace(batch.rows[0], advantages=tuple(a and BAD for a in batch.rows[0].advantages)), *batch.rows[1:])
    return replace(batch, rows=rows)


def steps(model, batches):
    """Metrics of each step, as the loop merges them."""

    async def work(trainer):
        return [{**await trainer.forward_backward(batch), **(await trainer.step()).metrics} for batch in batches]

    return run(trainer_of(model), work)


def test_tokens_of_a_dropped_step_are_not_trained(make_model, make_batch):
    once, twice = make_model(), make_model()
    steps(once, [make_batch(1, rows=2)])
    good, bad = steps(twice, [make_batch(1, rows=2), broken(make_batch(2, rows=2))])
    assert equal(once.state(), twice.state())
    assert good["tokens_trained"] > 0 and "tokens_dropped" not in good and good["updated"] == 1.0
    assert bad["tokens_trained"] == 0.0 and bad["tokens_dropped"] > 0 and bad["updated"] == 0.0


def test_several_dropped_steps_in_a_row_end_the_run(make_model, make_batch):
    bad = [broken(make_batch(step, rows=2)) for step in range(1, DROPPED_STEPS + 1)]
    with pytest.raises(NotFinite, match=r"policy step 3: expected a finite gradient.*learning_rate"):
        steps(make_model(), bad)
    between = [*bad[1:], make_batch(4, rows=2), *bad[1:]]
    assert [step["updated"] for step in steps(make_model(), between)] == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_dropped_steps_count_across_a_resume(make_model, make_batch, tmp_path):
    bad = [broken(make_batch(step, rows=2)) for step in range(1, DROPPED_STEPS + 1)]

    def trained(given, restored=None):
        async def work(trainer):
            if restored is not None:
                await trainer.restore(restored)
            for batch in given:
                await trainer.forward_backward(batch)
                await trainer.step()
            return await trainer.save(str(tmp_path / "step"), stage="rl", metrics={})

        return run(trainer_of(make_model()), work)

    ref = trained(bad[1:])
    with pytest.raises(NotFinite, match="in 3 optimiser steps"):
        trained(bad[:1], ref)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite_are_neither_served_nor_saved(make_model, value, dtype, tmp_path):
    trainer = trainer_of(model := make_model(dtype))
    with torch.no_grad():
        model.parameters()["model.norm.weight"][3] = value

    async def work(trainer):
        with pytest.raises(NotFinite, match="model.norm.weight"):
            await trainer.push()
        with pytest.raises(NotFinite, match="model.norm.weight"):
            await trainer.save(str(tmp_path / "c"), stage="rl", metrics={})

    run(trainer, work)
    assert not list(tmp_path.iterdir())


def test_the_first_dropped_step_in_a_row_is_reported_with_its_model(tmp_path):
    bad = {"tokens_dropped": 7.0, "updated": 0.0}
    reports = StepReports(JsonlSink(tmp_path / "metrics.jsonl"), "rl")
    critic = {"critic/tokens_dropped": 2.0}
    for version, metrics in enumerate([{}, bad, bad, {**bad, **critic}, {}, bad], 1):
        reports.log(version, metrics)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    said = [line["event"] for line in lines if "event" in line]
    assert len(lines) == 6 + len(said)
    assert [line.partition(":")[0] for line in said] == ["step 2", "step 4", "step 6"]
    assert "7 tokens" in said[0] and "critic: the gradient" in said[1]


def test_the_account_lists_dropped_tokens_separately(make_batch):
    account = TokenAccount(sampled=9, trained=5, filtered=4)
    totals, times = Totals(), {"time/overlap": 0.0, "time/step_s": 1.0}
    batch = replace(make_batch(), account=account)
    totals.add(batch, {"updated": 1.0, **times})
    totals.add(batch, {"updated": 0.0, "tokens_dropped": 6.0, **times})
    totals.add(batch, {"updated": 0.5, "tokens_dropped": 6.0, **times})  # of two optimiser steps one trained
    assert totals.account == TokenAccount(sampled=27, trained=10, filtered=12, dropped=5) and totals.account.balanced
