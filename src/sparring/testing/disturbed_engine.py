"""An engine that disagrees with its trainer by a known amount, for studies of mismatch and for tests of what sees it.

It is the native engine with a fixed error in its weights, so it is served like that one (`served.ServerThread`), and a
recipe reaches it with `[engine] kind = "remote"`.
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
    """A native engine that adds `disturbed`'s error to all weights that it serves. Adapters are served as they are.

    Args:
        model: served, and from now on owned; its weights are disturbed in place.
        config: `[engine]`.
        noise: share of a tensor's root mean square.
        threads: CPU threads of the engine's thread; 0 keeps torch's number.
    """

    def __init__(self, model: CausalModel, config: EngineConfig, *, noise: float, threads: int = 0) -> None:
        StagedWeights(model, disturbed(model.state(), noise)).commit()
        super().__init__(model, config, threads=threads)
        self._noise = noise

    async def pull(self, ref: WeightRef) -> None:
        """Serve the published weights with the error added. The publisher's probe is dropped: these weights give other
        log-probabilities.

        Raises:
            WeightsError: the tensors are not the ones that were published, or do not fit the model.
            EngineError: the engine is closed.
        """
        await super().pull(await asyncio.to_thread(self._disturbed, ref) if ref.adapter is None else ref)

    def _disturbed(self, ref: WeightRef) -> WeightRef:
        return publish(ref.model, ref.version, disturbed(fetch(ref), self._noise))


def disturbed(state: Mapping[str, torch.Tensor], noise: float) -> dict[str, torch.Tensor]:
    """Add to every tensor `noise` times its root mean square times standard normal numbers.

    The numbers depend on the tensor's name alone, so they are the same in every version: the error of another kernel or
    of a quantised copy also depends on the place and not on the time.

    Args:
        state: tensors by name; they are not changed.
        noise: share of a tensor's root mean square.

    Returns:
        New tensors by the same names, of the same dtypes.
    """
    return {name: tensor + noise * _error(name, tensor) for name, tensor in state.items()}


def _error(name: str, tensor: torch.Tensor) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
    size = tensor.float().square().mean().sqrt()
    return (size * torch.randn(tensor.shape, generator=generator).to(tensor.device)).to(tensor.dtype)
