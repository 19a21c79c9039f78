"""Sequences in lexicographic order, a walk through their prefix tree. A shared prefix is stored and computed once."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """B sequences stored as N tokens, one per distinct prefix. In lexicographic order, sequence b is the first
    shared[b] tokens of sequence b - 1, followed by tokens[cu_seqlens[b]:cu_seqlens[b + 1]]."""

    tokens: np.ndarray
    """[N] int64 ids."""
    positions: np.ndarray
    """[N] int64 position of the token in its sequences, from 0."""
    cu_seqlens: np.ndarray
    """[B + 1] int32 offsets of the tokens that each sequence adds."""
    shared: np.ndarray
    """[B] int32 number of tokens shared with the previous sequence."""
    paths: list[np.ndarray]
    """Indices of each sequence's tokens, in the order given: tokens[paths[i]] is sequence i."""


def walk(sequences: Sequence[Sequence[int] | np.ndarray]) -> tuple[list[int], list[int]]:
    """Return the lexicographic order of sequences of token ids, 0 to 2^32 - 1, and, in this order, the number of
    leading tokens that each shares with the previous one.

    No earlier sequence shares a longer prefix than the previous one does. So the tokens after the shared prefixes are
    together one token for each distinct prefix. Equal sequences keep their order.
    """
    keys = [_words(sequence) for sequence in sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return order, [0, *(_common(keys[a], keys[b]) for a, b in itertools.pairwise(order))][: len(order)]


def lay_out(sequences: Sequence[np.ndarray]) -> PrefixLayout:
    """Lay out the prefix tree of `sequences`, one token per distinct prefix, in the order of `walk`."""
    order, shared = walk(sequences)
    paths: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(order)
    offsets = [0]
    path = np.zeros(0, dtype=np.int64)
    for index, common in zip(order, shared, strict=True):
        offsets.append(offsets[-1] + len(sequences[index]) - common)
        path = paths[index] = np.concatenate((path[:common], np.arange(offsets[-2], offsets[-1])))
    added = [sequences[index][common:] for index, common in zip(order, shared, strict=True)]
    positions = [np.arange(common, len(sequences[index])) for index, common in zip(order, shared, strict=True)]
    return PrefixLayout(
        tokens=np.concatenate([np.zeros(0, dtype=np.int64), *added]),
        positions=np.concatenate([np.zeros(0, dtype=np.int64), *positions]),
        cu_seqlens=np.array(offsets, dtype=np.int32),
        shared=np.array(shared, dtype=np.int32),
        paths=paths,
    )


def _words(sequence: Sequence[int] | np.ndarray) -> bytes:
    """Encode ids as big-endian 32-bit words, whose bytes sort like the numbers."""
    if isinstance(sequence, np.ndarray):
        return sequence.astype(">u4").tobytes()
    return struct.pack(f">{len(sequence)}I", *sequence)


def _common(a: bytes, b: bytes) -> int:
    """Count the leading 32-bit words that two encoded sequences share: those above the highest bit in which the two
    differ as numbers."""
    length = min(len(a), len(b))
    differs = int.from_bytes(a[:length], "big") ^ int.from_bytes(b[:length], "big")
    return (8 * length - differs.bit_length()) // 32
