"""A run that was begun when steps were computed in another way: it goes on as it was begun, or says what is mended."""

import asyncio
import json

import pytest

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.policy import PolicyLoss
from sparring.model.load import load
from sparring.observe.sinks.jsonl import JsonlSink
from sparring.stages.runtime.reports import StepReports
from sparring.testing.tiny_adapters import tiny_adapter
from sparring.train.checkpoint import MANIFEST
from sparring.train.config import TrainConfig
from sparring.train.optimiser import learning_rate
from sparring.train.trainer import LocalTrainer

CONFIG = TrainConfig(learning_rate=1e-3, schedule="cosine", min_ratio=0.1)


@pytest.fixture
def adapter(model_path, tmp_path):
    """On products that are computed jointly, whose gradients are views."""
    return tiny_adapter(model_path, tmp_path / "adapter", target_modules=("q_proj", "v_proj"))


def went_on(path, batches, folder, older):
    """Metrics of the steps after a checkpoint of the first, and the manifest of a further one. `older`: the first says
    nothing of how its run was begun."""

    async def run():
        trainer = LocalTrainer(load(path), CONFIG, [PolicyLoss(AlgoConfig())], name="policy", total_steps=4)
        await trainer.forward_backward(batches[0])
        await trainer.step()
        ref = await trainer.save(str(folder / "c"), stage="rl", metrics={})
        await trainer.close()
        manifest = json.loads((folder / "c" / MANIFEST).read_text())
        if older:
            del manifest["schedule_ends_late"], manifest["gradients_were_misplaced"]
            (folder / "c" / MANIFEST).write_text(json.dumps(manifest))
        trainer = LocalTrainer(load(path), CONFIG, [PolicyLoss(AlgoConfig())], name="policy", total_steps=4)
        await trainer.restore(ref)
        found = []
        for batch in batches[1:]:
            await trainer.forward_backward(batch)
            found.append((await trainer.step()).metrics)
        await trainer.save(str(folder / "d"), stage="rl", metrics={})
        await trainer.close()
        return found, json.loads((folder / "d" / MANIFEST).read_text())

    return asyncio.run(run())


@pytest.mark.parametrize("older", [True, False])
def test_a_resumed_schedule_ends_as_it_began(model_path, make_batch, tmp_path, older):
    found, manifest = went_on(model_path, [make_batch(step) for step in range(1, 5)], tmp_path, older)
    expected = [learning_rate(CONFIG, step, 4, ends_late=older) for step in range(1, 4)]
    assert [metrics["learning_rate"] for metrics in found] == expected
    assert (expected[-1] == pytest.approx(1e-4)) != older and manifest["schedule_ends_late"] == older
    assert not any("tensors_misplaced" in metrics for metrics in found), "none of its gradients is a view"


def test_misplaced_tensors_are_reported_once(adapter, make_batch, tmp_path):
    batches = [make_batch(step) for step in range(1, 5)]
    found, manifest = went_on(adapter, batches, tmp_path, older=True)
    assert manifest["gradients_were_misplaced"] is True, "the next resume says it, too"
    reports = StepReports(JsonlSink(tmp_path / "metrics.jsonl"), "rl")
    for version, metrics in enumerate(found, 2):
        assert metrics["tensors_misplaced"] == 4.0  # lora_B of queries and values in two layers
        reports.log(version, metrics)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    [said] = [line["event"] for line in lines if "event" in line]
    assert said.startswith("step 2: 4 tensors are stepped right from here on")


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_checkpoint_from_before_norms_of_blocks_goes_on_and_is_told_from_now(model_path, make_batch, tmp_path, clip):
    """Its clipped steps have other last bits from here on; the digest of its settings had no norm."""
    config = TrainConfig(learning_rate=1e-3, gradient_clip=clip)

    async def run():
        trainer = LocalTrainer(load(model_path), config, [PolicyLoss(AlgoConfig())], name="policy", total_steps=4)
        await trainer.forward_backward(make_batch())
        await trainer.step()
        ref = await trainer.save(str(tmp_path / "c"), stage="rl", metrics={})
        file = tmp_path / "c" / MANIFEST
        now, older = json.loads(file.read_text()), trainer._config_digest(norm_of_blocks=False)
        assert (now["config"] == older) == (not clip), "without clipping the norm changes no weight"
        file.write_text(json.dumps({**now, "config": older}))
        await trainer.restore(ref)
        await trainer.close()
        return trainer.version

    assert asyncio.run(run()) == 1


def test_a_current_run_reports_no_misplaced_tensors(adapter, make_batch, tmp_path):
    found, _ = went_on(adapter, [make_batch(step) for step in range(1, 4)], tmp_path, older=False)
    assert not any("tensors_misplaced" in metrics for metrics in found)
