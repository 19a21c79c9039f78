"""Checksum of a set of named tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import xxhash

PIECE = 1 << 22
"""Bytes hashed before another thread gets its turn: hashing holds the interpreter's lock, and an engine may be
computing."""


def checksum(state: Mapping[str, torch.Tensor]) -> str:
    """Return xxh3-128 over names, dtypes, shapes and bytes in the order of the names, as 32 hexadecimal digits.

    Equal exactly when every tensor is equal to the bit (0.0 and -0.0 differ); the device does not matter.
    """
    digest, hashed = xxhash.xxh3_128(), 0
    for name in sorted(state):
        tensor = state[name].detach()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for begin in range(0, len(content), PIECE):
            piece = content[begin : begin + PIECE]
            digest.update(piece)
            hashed += len(piece)
            if hashed >= PIECE:
                time.sleep(0)
                hashed = 0
    return digest.hexdigest()
