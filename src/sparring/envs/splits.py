"""Task streams that are pure functions of (seed, index), and splits that share no task."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from sparring.errors import refusal
from sparring.types import Message, Task

MAX_TRIES = 1000
"""Maximum number of draws for one place of a stream; then the world has too few distinct tasks."""

Draw = Callable[[str, int, int], Task | None]
"""Function (split, index, attempt) -> task. Each attempt is another draw for the same place; None: an unusable draw."""


def derived_seed(*parts: str | int) -> int:
    """Return a seed below 2^31 from names and indices: xxh3_64 of their text, equal in every process."""
    return xxhash.xxh3_64_intdigest("\x1f".join(map(str, parts)).encode()) >> 33


@functools.lru_cache(maxsize=4)
def order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    """Return a permutation of `count` places, a function of its arguments alone."""
    return tuple(sorted(range(count), key=lambda place: derived_seed(seed, epoch, place)))


def identity(task: Task) -> str:
    """Return a task's identity: its deduplication key, else its normalised messages. Tasks with equal identities count
    as one. A key starts with a separator that no normalised text starts with, so the two never collide."""
    return f"\x1f{task.key}" if task.key else prompt_content(task.messages)


def prompt_content(messages: Sequence[Message]) -> str:
    """Return the normalised content of a prompt, without case and spacing: the words alone for one question with or
    without a system message; else each message with its role, reasoning and tool calls."""
    roles = [message.role for message in messages]
    plain = roles in (["user"], ["system", "user"]) and not messages[-1].reasoning
    if plain or not messages:
        return normalised(" ".join(message.content for message in messages))
    return "\x1f\x1f" + "\x1e".join(part for message in messages for part in _parts(message))


def _parts(message: Message) -> Iterator[str]:
    yield message.role
    yield normalised(message.content)
    yield normalised(message.reasoning or "")
    for call in message.tool_calls:
        arguments = call.raw if call.arguments is None else json.dumps(call.arguments, sort_keys=True, default=repr)
        yield f"{call.name}{arguments}"


def normalised(text: str) -> str:
    """Return a text without differences of blanks and case."""
    return " ".join(text.split()).casefold()


def can_be_held_out(task: Task, share: float) -> bool:
    """Return True if a task belongs to the held-out `share`, which is never trained on; a function of its identity."""
    return xxhash.xxh3_64_intdigest(identity(task).encode()) < share * 2**64


def overlap(eval_tasks: Iterable[Task], train_tasks: Iterable[Task]) -> set[str]:
    """Return the identities of the tasks that occur in both splits; empty if the splits are correct."""
    return {identity(t) for t in eval_tasks} & {identity(t) for t in train_tasks}


class Stream:
    """Task stream by index: each task is a function of its index, so the state is one number. Implements
    `protocols.TaskSource`.

    Args:
        at: returns the task at an index, None past the end.
    """

    def __init__(self, at: Callable[[int], Task | None]) -> None:
        self._at = at
        self._next = 0

    def next(self) -> Task | None:
        task = self._at(self._next)
        if task is not None:
            self._next += 1
        return task

    def observe(self, group: Any) -> None:
        """Ignore results: this stream does not learn from them."""

    def state(self) -> Mapping[str, Any]:
        return {"next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["next"])


def listed(tasks: list[Task]) -> Stream:
    """Return a finite stream of tasks."""
    return Stream(lambda index: tasks[index] if index < len(tasks) else None)


class Splits:
    """Three task streams of a generated world for one seed. `eval` is drawn first; the others skip its tasks.

    Args:
        held_out: number of distinct tasks in the eval stream.
        demonstrations: number of distinct tasks in the demonstration stream.
        share: share of all tasks that may be held out; these occur in no other stream of any seed. 0: the draws of
            `eval` decide.
    """

    def __init__(
        self,
        world: str,
        draw: Draw,
        *,
        held_out: int,
        demonstrations: int,
        share: float = 0.0,
    ) -> None:
        self._world, self._draw = world, draw
        self._share = share
        self._demonstrations = demonstrations
        self._eval = self._distinct("eval", held_out, set())
        self._held_out = {identity(task) for task in self._eval}

    def stream(self, split: str) -> Stream:
        """Return the stream of `train` (endless), `eval` or `demonstration` (finite).

        Raises:
            BadInput: the split is unknown, or the world has too few distinct tasks.
        """
        if split == "train":
            return Stream(lambda index: self._fresh(split, index, self._held_out))
        if split == "eval":
            return listed(self._eval)
        if split == "demonstration":
            return listed(self._distinct(split, self._demonstrations, set(self._held_out)))
        raise unknown_split(self._world, split)

    def _distinct(self, split: str, count: int, taken: set[str]) -> list[Task]:
        tasks = []
        for index in range(count):
            tasks.append(self._fresh(split, index, taken))
            taken.add(identity(tasks[-1]))
        return tasks

    def _fresh(self, split: str, index: int, taken: set[str]) -> Task:
        task = None
        for attempt in range(MAX_TRIES):
            task = self._draw(split, index, attempt)
            if task is not None and identity(task) not in taken and self._belongs(task, split):
                return task
        what = "key" if task and task.key else "prompt"
        raise refusal(
            f"env {self._world}",
            f"a new {what} for the {split} split at task {index}{f' of {task.tag}' if task and task.tag else ''}",
            f"{MAX_TRIES} draws that all repeat {what}s already taken",
            "lower held_out and demonstrations, or give the world more variety; where its tasks differ and "
            "their prompts do not, give it a method key(self, task)",
        )

    def _belongs(self, task: Task, split: str) -> bool:
        return not self._share or can_be_held_out(task, self._share) == (split == "eval")


def unknown_split(world: str, split: str) -> Exception:
    """Return the refusal of a split that does not exist."""
    return refusal(f"env {world}", "train, eval or demonstration", repr(split), "ask for one of these splits")
