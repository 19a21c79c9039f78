"""Counter-based seeds: a rollout's random numbers depend on what it is, never on when or beside what it runs (law 8)."""

from __future__ import annotations

import msgspec
import xxhash

from sparring.types import Purpose, Task


def rollout_seed(run_seed: int, purpose: Purpose, task: Task, index: int) -> int:
    """The 64-bit seed of rollout `index` of a group. A retry has the same one, so it samples the same tokens."""
    parts = ("rollout", run_seed, purpose, task.id, task.seed, index)
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(parts))
