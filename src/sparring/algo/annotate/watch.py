"""What annotators know of a row beside the row: its group, its rollout, and the branch it was made of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from sparring.types import Group, Rollout, Sample, Segment, Trajectory


class Watch:
    """Remembers groups on their way to become rows. As the last of a stage's annotators it forgets those whose rows
    pass."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    async def groups(self, groups: AsyncIterator[Group]) -> AsyncIterator[Group]:
        """The same groups, each remembered."""
        async for group in groups:
            self._groups[group.id] = group
            yield group

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The same rows, which are an update's, as are the groups: all are forgotten, also those that gave no row."""
        self._groups.clear()
        return samples

    def group(self, row: Sample) -> Group:
        """The group that a row is of."""
        return self._groups[row.group]

    def rollout(self, row: Sample) -> tuple[int, Rollout]:
        """The rollout that a row is of, with its place in the group."""
        return next(
            (place, rollout)
            for place, rollout in enumerate(self.group(row).rollouts)
            if any(trajectory.id == row.trajectory for trajectory in rollout.trajectories)
        )

    def branches(self, row: Sample) -> list[tuple[Segment, ...]]:
        """The branches of the trajectory that a row is of, up to the row's own, which is the last."""
        trajectory: Trajectory = next(t for t in self.rollout(row)[1].trajectories if t.id == row.trajectory)
        return list(trajectory.branches())[: row.branch + 1]
