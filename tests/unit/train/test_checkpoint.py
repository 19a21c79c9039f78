"""A checkpoint is whole or absent, and resuming from it is as if the run had never stopped."""

import json
import subprocess
import sys

import pytest
import torch
from training import equal, run, saved_optimiser, state_of

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.policy import PolicyLoss
from sparring.errors import BadInput, StoreError
from sparring.train import checkpoint
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import CheckpointRef


def train(model, steps, *, restore=None, save_at=None, folder=None, **settings):
    """Train on the batches of `steps`. Returns (final weights, optimiser state, the checkpoint written at
    `save_at`)."""
    options = {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "token_budget": 40}
    config = TrainConfig(**{**options, **settings})
    trainer = LocalTrainer(model, config, [PolicyLoss(AlgoConfig())], name="policy", total_steps=8, threads=1)

    async def work(trainer):
        ref = None
        if restore is not None:
            await trainer.restore(restore)
        for batch in steps:
            assert trainer.version == batch.step - 1
            await trainer.forward_backward(batch)
            await trainer.step()
            if batch.step == save_at:
                ref = await trainer.save(str(folder), stage="rl", metrics={"reward": 0.5})
        return await saved_optimiser(trainer), ref

    optimiser, ref = run(trainer, work)
    return state_of(model), optimiser, ref


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_is_bitwise(dtype, make_model, make_batch, tmp_path):
    steps = [make_batch(step) for step in range(1, 7)]
    weights, optimiser, ref = train(make_model(dtype), steps, save_at=3, folder=tmp_path / "c")
    assert (ref.step, ref.stage, ref.metrics) == (3, "rl", {"reward": 0.5})
    again, optimiser_again, _ = train(make_model(dtype), steps[3:], restore=ref)
    assert equal(weights, again) and equal(optimiser, optimiser_again)
    short, _, _ = train(make_model(dtype), steps[3:5], restore=ref)
    assert not equal(weights, short), "a step less must show"


def test_a_checkpoint_is_refused_when_missing_damaged_or_of_other_settings(make_model, make_batch, tmp_path):
    _, _, ref = train(make_model(), [make_batch()], save_at=1, folder=tmp_path / "c")
    with pytest.raises(BadInput, match="settings"):
        train(make_model(), [], restore=ref, learning_rate=1e-2)
    train(make_model(), [], restore=ref, save_every=7)
    with pytest.raises(BadInput, match="dtype"):
        train(make_model("bfloat16"), [], restore=ref)
    with pytest.raises(StoreError, match=r"trainer\.json"):
        train(make_model(), [], restore=CheckpointRef(model="policy", stage="rl", step=1, path=str(tmp_path / "none")))
    file = tmp_path / "c" / checkpoint.MODEL
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match="checksum"):
        train(make_model(), [], restore=ref)
    file.write_bytes(data[:100])
    with pytest.raises(StoreError, match="cannot be read"):
        train(make_model(), [], restore=ref)


def test_a_checkpoint_replaces_the_one_of_the_same_name(tmp_path):
    path = tmp_path / "c"
    for value in (1.0, 2.0):
        checkpoint.write(path, {checkpoint.MODEL: {"a": torch.tensor([value])}}, {"step": value})
    manifest, tensors = checkpoint.read(path)
    assert (manifest["step"], tensors[checkpoint.MODEL]["a"].item()) == (2.0, 2.0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    path.rename(tmp_path / "c.old")
    assert checkpoint.read(path)[0]["step"] == 2.0, "a crash between the two renames loses nothing"


FULL_DISK = """
import json, resource, sys
from pathlib import Path
import torch
from sparring.errors import StoreError
from sparring.train import checkpoint

path = Path(sys.argv[1])
checkpoint.write(path, {checkpoint.MODEL: {"a": torch.ones(1000)}}, {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
for name in (path, path.with_name("second")):
    try:
        checkpoint.write(name, {checkpoint.MODEL: {"a": torch.ones(100_000)}}, {"step": 2})
    except StoreError as error:
        print(json.dumps(str(error)))
"""


@pytest.mark.full
def test_a_full_disk_leaves_the_previous_checkpoint_intact(tmp_path):
    """The system refuses to let files grow, as a full disk would, while a larger checkpoint is written."""
    path = tmp_path / "first"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True)
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(messages) == 2
    assert all("expected to write 0.4 MB" in message and "free disk space" in message for message in messages)
    assert checkpoint.read(path)[0]["step"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["first"]


def test_retention_keeps_the_last_and_the_best(tmp_path):
    refs = []
    for step, reward in enumerate([0.1, 0.9, 0.2, 0.9, 0.3, 0.4], start=1):
        (tmp_path / str(step)).mkdir()
        where = {"model": "policy", "stage": "rl", "path": str(tmp_path / str(step))}
        refs.append(CheckpointRef(**where, step=step, metrics={"reward": reward}))
    kept = checkpoint.retain(refs, keep_last=2, best_metric="reward")
    assert [ref.step for ref in kept] == [2, 5, 6]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["2", "5", "6"]
    lowest = checkpoint.retain(kept, keep_last=1, best_metric="reward", best_is_highest=False)
    assert [ref.step for ref in lowest] == [5, 6]
    assert [ref.step for ref in checkpoint.retain(kept[1:], keep_last=1)] == [6]
