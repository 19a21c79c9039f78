"""Digest of a task: tells whether a task is the one that was recorded."""

from __future__ import annotations

import msgspec
import xxhash

from sparring.types import Task


def digest(task: Task) -> str:
    """Return a digest of the question and of what scores its answer: the same for equal tasks in every process."""
    content = (task.id, task.seed, [(m.role, m.content) for m in task.messages], task.data)
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(content, order="sorted", enc_hook=repr))
