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
    digest = xxhash.xxh3_128()
    _hash(state, digest, None)
    return digest.hexdigest()


def checksums(state: Mapping[str, torch.Tensor]) -> tuple[str, dict[str, int]]:
    """Return the checksum of all tensors, and by name the xxh3-64 of each one's bytes: where two states differ, it says
    in which tensors."""
    digest, by_name = xxhash.xxh3_128(), dict[str, int]()
    _hash(state, digest, by_name)
    return digest.hexdigest(), by_name


def _hash(state: Mapping[str, torch.Tensor], digest: xxhash.xxh3_128, by_name: dict[str, int] | None) -> None:
    """Add all tensors to `digest`; of each, its own to `by_name` if that is given, while its bytes are at hand."""
    hashed = 0
    for name in sorted(state):
        tensor = state[name].detach()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        own = None if by_name is None else xxhash.xxh3_64()
        for begin in range(0, len(content), PIECE):
            piece = content[begin : begin + PIECE].data
            digest.update(piece)
            if own is not None:
                own.update(piece)
            hashed += len(piece)
            if hashed >= PIECE:
                time.sleep(0)
                hashed = 0
        if by_name is not None and own is not None:
            by_name[name] = own.intdigest()
