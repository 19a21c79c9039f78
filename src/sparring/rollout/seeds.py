"""Seeds of rollouts and digests of tasks. A seed depends only on what the rollout is, not on when it runs or what runs
at the same time (law 8). A digest identifies a recorded task."""

from __future__ import annotations

import msgspec
import xxhash

from sparring.types import Purpose, Task


def rollout_seed(run_seed: int, purpose: Purpose, task: Task, index: int, group: str | None = None) -> int:
    """Return the 64-bit seed of one rollout. A retry has the same seed, so it samples the same tokens.

    A policy gradient needs actions drawn independently of the data that trained the weights. So a task that comes again
    in a later epoch or stage gets other random numbers, through the id of its group. Evaluations are compared in pairs
    and need the same random numbers each time, so they pass no group.

    Args:
        index: place of the rollout in its group, or number of the sample of this task, from 0.
        group: id of the group: stage and admission index (`rl/12`). None in evaluation.
    """
    parts = ("rollout", run_seed, purpose, task.id, task.seed, index, *(() if group is None else (group,)))
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(parts))


def digest(task: Task) -> str:
    """Return a digest of a task's id, seed, messages and data. It is equal for equal tasks in every process."""
    content = (task.id, task.seed, [(m.role, m.content) for m in task.messages], task.data)
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(content, order="sorted", enc_hook=repr))
