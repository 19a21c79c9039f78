"""Lookup of the group, rollout and branch that a row was made from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from sparring.types import Group, Rollout, Sample, Segment, Trajectory


class SampleProvenance:
    """Remembers the groups of the update that is being annotated. Has to be the stage's last annotator, because its
    `annotate` forgets the groups. Implements `Annotator`."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    async def groups(self, groups: AsyncIterator[Group]) -> AsyncIterator[Group]:
        """Pass groups on unchanged and remember each."""
        async for group in groups:
            self._groups[group.id] = group
            yield group

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the rows unchanged, and forget all groups: the update is complete."""
        self._groups.clear()
        return samples

    def group(self, row: Sample) -> Group:
        """Return the group that a row belongs to."""
        return self._groups[row.group]

    def rollout(self, row: Sample) -> tuple[int, Rollout]:
        """Return a row's rollout and its index in the group."""
        return next(
            (number, rollout)
            for number, rollout in enumerate(self.group(row).rollouts)
            if any(trajectory.id == row.trajectory for trajectory in rollout.trajectories)
        )

    def branches(self, row: Sample) -> list[tuple[Segment, ...]]:
        """List the branches of the row's trajectory up to and including the row's own."""
        trajectory: Trajectory = next(t for t in self.rollout(row)[1].trajectories if t.id == row.trajectory)
        return list(trajectory.branches())[: row.branch + 1]
