"""What tests of trainers do with one."""

import asyncio
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from sparring.train import checkpoint


def run(trainer, work):
    """`work(trainer)` on an event loop, and the trainer's threads ended."""

    async def main():
        try:
            return await work(trainer)
        finally:
            await trainer.close()

    return asyncio.run(main())


async def saved_optimiser(trainer):
    """Moments, step counts and separate masters, by `<kind>/<parameter>`."""
    with tempfile.TemporaryDirectory() as folder:
        ref = await trainer.save(f"{folder}/saved", stage="rl", metrics={})
        return load_file(Path(ref.path) / checkpoint.OPTIMISER)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.module.named_parameters()}


def state_of(model):
    return {name: value.clone() for name, value in model.state().items()}


def equal(tensors, others):
    """Whether two sets of named tensors have the same bits."""
    return tensors.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in tensors.items())


def check_close(model, other):
    """Check that the gradients of a model are those of another within rounding, of the largest of all."""
    expected = gradients(other)
    largest = float(max(gradient.abs().max() for gradient in expected.values()))
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5 * largest, rtol=1e-4)
