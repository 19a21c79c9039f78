"""Harnesses of several environments as one."""

from __future__ import annotations

from collections.abc import Mapping

from sparring.protocols import Episode, Harness
from sparring.types import BoxSpec, Task


class HarnessByEnvironment:
    """Harness that hands each episode to the one of its task's environment. Implements `protocols.Harness`.

    Args:
        harnesses: by the environment's name.
    """

    def __init__(self, harnesses: Mapping[str, Harness]) -> None:
        self._harnesses = dict(harnesses)

    @property
    def mounts(self) -> Mapping[str, str] | None:
        """The folders of the host that programs of these harnesses need; None where none runs programs."""
        mounts = [mounts_of(harness) for harness in self._harnesses.values()]
        needed = [each for each in mounts if each is not None]
        return {target: source for each in needed for target, source in each.items()} if needed else None

    @property
    def rehearsal(self) -> Harness:
        """The harnesses of rollouts before the run."""
        return HarnessByEnvironment({name: rehearsal_of(harness) for name, harness in self._harnesses.items()})

    def box_of(self, task: Task, *, tools: bool) -> BoxSpec | None:
        """Return the box that a rollout of a task needs."""
        widened = getattr(self._harnesses[task.env], "box_of", None)
        return task.box if widened is None else widened(task, tools=tools)

    async def run(self, episode: Episode) -> None:
        """Hold the conversation of one episode."""
        await self._harnesses[episode.task.env].run(episode)


def rehearsal_of(harness: Harness) -> Harness:
    """Return the harness of rollouts before the run: another one where its own needs programs that are elsewhere."""
    return getattr(harness, "rehearsal", harness)


def mounts_of(harness: Harness) -> Mapping[str, str] | None:
    """Return the folders of the host that a harness's boxes need, by their path in the boxes; None where it runs no
    programs."""
    return getattr(harness, "mounts", None)
