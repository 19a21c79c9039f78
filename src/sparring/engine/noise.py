"""A known mismatch: weights that differ from the trainer's by a noise of a given size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash


def disturbed(state: Mapping[str, torch.Tensor], noise: float) -> dict[str, torch.Tensor]:
    """Every tensor plus `noise` times its root mean square times standard normal numbers, which depend on its name
    alone: the same in every version, as the error of another kernel or of a quantised copy hangs on the place and not
    on the time.

    Args:
        state: tensors by name; they are not changed.
        noise: share of a tensor's root mean square.
    """
    return {name: tensor + noise * _error(name, tensor) for name, tensor in state.items()}


def _error(name: str, tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
    size = tensor.float().square().mean().sqrt()
    return (size * torch.randn(tensor.shape, generator=generator).to(tensor.device)).to(tensor.dtype)
