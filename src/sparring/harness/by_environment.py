"""Harnesses of several environments as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparring.harness.program import OpenDoor
from sparring.protocols import Boxes, Episode, Harness
from sparring.record.leases import Leases
from sparring.types import BoxSpec, Task


class HarnessByEnvironment:
    """Harness that passes each episode to the harness of its task's environment. Implements `protocols.Harness`."""

    def __init__(self, harnesses: Mapping[str, Harness]) -> None:
        self._harnesses = dict(harnesses)

    @property
    def mounts(self) -> Mapping[str, str] | None:
        """Files and folders of the host that the harnesses' programs need; None if they run no programs."""
        mounts = [mounts_of(harness) for harness in self._harnesses.values()]
        needed = [each for each in mounts if each is not None]
        return {target: source for each in needed for target, source in each.items()} if needed else None

    def behind(self, open_door: OpenDoor, leases: Callable[[], Leases | None], within_s: float | None) -> Harness:
        """Return the same harnesses, except that their workers claim rollouts at another server."""
        moved = {name: behind(harness, open_door, leases, within_s) for name, harness in self._harnesses.items()}
        return HarnessByEnvironment(moved)

    def box_of(self, task: Task, *, tools: bool) -> BoxSpec | None:
        """Return the box that a rollout of a task needs."""
        widened = getattr(self._harnesses[task.env], "box_of", None)
        return task.box if widened is None else widened(task, tools=tools)

    async def check_image(self, task: Task, boxes: Boxes, *, tools: bool) -> bool:
        """Start the program of a task's harness in a box of the task's image. Return False if no program runs there."""
        starts = getattr(self._harnesses[task.env], "check_image", None)
        return starts is not None and await starts(task, boxes, tools=tools)

    async def run(self, episode: Episode) -> None:
        await self._harnesses[episode.task.env].run(episode)


def behind(
    harness: Harness, open_door: OpenDoor, leases: Callable[[], Leases | None], within_s: float | None = None
) -> Harness:
    """Return the same harness, except that its workers claim rollouts at the server of `open_door` and `leases`, each
    within `within_s` seconds (None: unlimited). A harness without workers is returned unchanged."""
    moved = getattr(harness, "behind", None)
    return harness if moved is None else moved(open_door, leases, within_s)


def mounts_of(harness: Harness) -> Mapping[str, str] | None:
    """Return the files and folders of the host that a harness's boxes need, by their path in the boxes; None if it runs
    no programs."""
    return getattr(harness, "mounts", None)
