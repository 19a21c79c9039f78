"""What a checkpoint of a trainer has of its optimiser."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from sparring.train import checkpoint
from sparring.train.trainer import LocalTrainer


async def saved_optimiser(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    """Return moments, step counts and separate masters, by `<kind>/<parameter>`."""
    with tempfile.TemporaryDirectory() as folder:
        ref = await trainer.save(f"{folder}/saved", stage="rl", metrics={})
        return load_file(Path(ref.path) / checkpoint.OPTIMISER)
