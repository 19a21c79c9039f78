"""Names of rollouts and tasks as numbers: counter-based seeds, so that random numbers depend on what a rollout is and
never on when or beside what it runs (law 8), and the digest by which a recorded task is known again."""

from __future__ import annotations

import msgspec
import xxhash

from sparring.types import Purpose, Task


def rollout_seed(run_seed: int, purpose: Purpose, task: Task, index: int, group: str | None = None) -> int:
    """Return the 64-bit seed of one rollout. A retry has the same one, so it samples the same tokens.

    A policy gradient needs actions that are drawn afresh, given weights that learnt from all earlier ones. So a task
    that comes again, in the next epoch or in another stage, needs other random numbers: its group has another id.
    Evaluations are compared in pairs and need the same ones every time: they give no group.

    Args:
        run_seed: `[run] seed`.
        purpose: of the rollout.
        task: what is rolled out.
        index: which rollout of the group, or which sample of the task, from 0.
        group: id of the group, the stage and the admission index (`rl/12`). None in evaluation, and in what was begun
            before groups entered the seed.
    """
    parts = ("rollout", run_seed, purpose, task.id, task.seed, index, *(() if group is None else (group,)))
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(parts))


def digest(task: Task) -> str:
    """Return a digest of the question and of what scores its answer: the same for equal tasks in every process."""
    content = (task.id, task.seed, [(m.role, m.content) for m in task.messages], task.data)
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(content, order="sorted", enc_hook=repr))
