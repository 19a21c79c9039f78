"""One number for a set of named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash


def checksum(state: Mapping[str, torch.Tensor]) -> str:
    """xxh3-128 over names, dtypes, shapes and bytes in the order of the names, as 32 hexadecimal digits.

    Equal exactly when every tensor is equal to the bit (0.0 and -0.0 differ); the device does not matter.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(state):
        tensor = state[name].detach()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
