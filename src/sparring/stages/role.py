"""A trainer beside the policy's, told apart from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from sparring.generation import ScoreRequest, Scores
from sparring.protocols import Trainer
from sparring.types import Batch, CheckpointRef, Sample, StepResult, WeightRef


class RoleTrainer:
    """A trainer whose metrics bear its role, as `critic/loss_value`. Implements `protocols.Trainer`.

    Args:
        trainer: what is told apart.
        role: that of its batches and checkpoints.
        told: what is told of the metrics of a batch; None: all as they are.
    """

    def __init__(
        self, trainer: Trainer, role: str, *, told: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None
    ) -> None:
        self._trainer, self._role, self._of_batch = trainer, role, told or dict

    @property
    def version(self) -> int:
        """As the trainer; updates are counted on the policy's, so that it stays at 0."""
        return self._trainer.version

    async def forward(self, rows: Sequence[Sample], needs: Set[str]) -> Sequence[Mapping[str, tuple[float, ...]]]:
        """As the trainer."""
        return await self._trainer.forward(rows, needs)

    async def score(self, teacher: str, request: ScoreRequest) -> Scores:
        """As the trainer."""
        return await self._trainer.score(teacher, request)

    async def forward_backward(self, batch: Batch) -> Mapping[str, float]:
        """As the trainer."""
        return self._told(self._of_batch(await self._trainer.forward_backward(batch)))

    async def step(self, *, ends_update: bool = True) -> StepResult:
        """As the trainer."""
        step = await self._trainer.step(ends_update=ends_update)
        return StepResult(version=step.version, metrics=self._told(step.metrics))

    async def push(self) -> WeightRef:
        """As the trainer."""
        return await self._trainer.push()

    async def save(self, path: str, *, stage: str, metrics: Mapping[str, float]) -> CheckpointRef:
        """As the trainer."""
        return await self._trainer.save(path, stage=stage, metrics=metrics)

    async def restore(self, ref: CheckpointRef) -> None:
        """As the trainer."""
        await self._trainer.restore(ref)

    def _told(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {f"{self._role}/{name}": value for name, value in metrics.items()}
