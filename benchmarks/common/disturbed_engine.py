"""Engine with a known error in its weights, for studies of mismatch between engine and trainer.

It is a native engine otherwise, so `served.ServerThread` serves it, and a recipe reaches it with `[engine] kind =
"remote"`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import xxhash

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.model.causal import CausalModel
from sparring.model.staging import StagedWeights
from sparring.types import WeightRef
from sparring.weights.fetch import fetch
from sparring.weights.inline import publish

if TYPE_CHECKING:
    import torch


class DisturbedEngine(NativeEngine):
    """Native engine that adds the error of `disturbed` to all served weights. Adapters are served unchanged.

    Args:
        model: model to serve, which the engine owns; its weights are changed in place.
        config: `[engine]` settings.
        noise: size of the error as a share of a tensor's root mean square.
        threads: CPU threads of the engine; 0 keeps torch's number.
    """

    def __init__(self, model: CausalModel, config: EngineConfig, *, noise: float, threads: int = 0) -> None:
        StagedWeights(model, disturbed(model.state(), noise)).commit()
        super().__init__(model, config, threads=threads)
        self._noise = noise

    async def pull(self, ref: WeightRef) -> None:
        """Serve the published weights with the error added. The publisher's probe is dropped, because these weights
        give other log-probabilities.

        Raises:
            WeightsError: the tensors differ from the published ones, or do not fit the model.
            EngineError: the engine is closed.
        """
        await super().pull(await self._with_error(ref))

    async def wake(self, ref: WeightRef) -> None:
        """Serve them after a sleep, as `pull` does."""
        await super().wake(await self._with_error(ref))

    async def _with_error(self, ref: WeightRef) -> WeightRef:
        return await asyncio.to_thread(self._disturbed, ref) if ref.adapter is None else ref

    def _disturbed(self, ref: WeightRef) -> WeightRef:
        return publish(ref.model, ref.version, disturbed(fetch(ref), self._noise))


def disturbed(state: Mapping[str, torch.Tensor], noise: float) -> dict[str, torch.Tensor]:
    """Add `noise` times the root mean square of each tensor times standard normal numbers.

    The random numbers depend on the tensor's name alone. So all versions have the same error, as they would with
    another kernel or with quantised weights.

    Args:
        state: tensors by name, which stay unchanged.
        noise: size of the error as a share of a tensor's root mean square.

    Returns:
        New tensors by the same names, of the same dtypes.
    """
    return {name: tensor + noise * _error(name, tensor) for name, tensor in state.items()}


def _error(name: str, tensor: torch.Tensor) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
    size = tensor.float().square().mean().sqrt()
    return (size * torch.randn(tensor.shape, generator=generator).to(tensor.device)).to(tensor.dtype)
