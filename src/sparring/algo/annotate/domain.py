"""Choice of a task's teacher by its domain."""

from __future__ import annotations

from collections.abc import Mapping

from sparring.errors import refusal
from sparring.types import Task

ANY = "*"
"""Domain of the default teacher, for tasks without a teacher of their own."""


def teacher_of(teachers: Mapping[str, str], task: Task) -> str:
    """Return the name of the model that teaches `task`: the first entry of `teachers` among the task's tag, its
    environment and `*`. A task without an entry is refused (`BadInput`)."""
    for domain in (task.tag, task.env, ANY):
        if domain in teachers:
            return teachers[domain]
    actual, fix = f"teachers for {', '.join(sorted(teachers))}", f"add one to `teachers`, or one for {ANY!r}"
    raise refusal(f"task {task.id}", f"a teacher for {task.tag or task.env!r}", actual, fix)
