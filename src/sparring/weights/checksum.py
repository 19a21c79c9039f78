"""Checksums of named tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import xxhash

PIECE = 1 << 22
"""Bytes hashed at once. Hashing holds the interpreter's lock, which is released after each piece for an engine that may
be computing."""


def checksum(state: Mapping[str, torch.Tensor]) -> str:
    """Return xxh3-128 over names, dtypes, shapes and bytes in the order of names, as 32 hexadecimal digits.

    Two checksums are equal exactly if every tensor is bitwise equal (0.0 and -0.0 differ), on any device.
    """
    digest = xxhash.xxh3_128()
    _hash(state, digest, None)
    return digest.hexdigest()


def checksums(state: Mapping[str, torch.Tensor]) -> tuple[str, dict[str, int]]:
    """Return the checksum of all tensors, and the xxh3-64 of each tensor's bytes by name, which locates a
    difference."""
    digest, by_name = xxhash.xxh3_128(), dict[str, int]()
    _hash(state, digest, by_name)
    return digest.hexdigest(), by_name


def _hash(state: Mapping[str, torch.Tensor], digest: xxhash.xxh3_128, by_name: dict[str, int] | None) -> None:
    """Add all tensors to `digest` and, if given, the digest of each tensor to `by_name`."""
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
