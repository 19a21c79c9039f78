"""What learns beside the policy in the rl stage: its trainer told apart, where its section belongs, and what is left of
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path

from sparring.algo.credit.rules import name_of
from sparring.recipe.run_config import RunConfig
from sparring.errors import refusal
from sparring.generation import ScoreRequest, Scores
from sparring.protocols import Trainer
from sparring.stages.context import Context
from sparring.types import Batch, CheckpointRef, Sample, StepResult, WeightRef


def check_asked(config: RunConfig, role: str, credit: str, preset: str) -> bool:
    """Whether the run has `[rl.<role>]`, which is there exactly where the stage rl runs with such a `credit`.

    Args:
        config: of the run.
        role: the section's name.
        credit: name of the rule that asks what learns there.
        preset: of `[algo]`, that has it.

    Raises:
        BadInput: it is missing, or there without being asked.
    """
    if "rl" not in config.run.stages:
        return False
    given = getattr(config.rl, role) is not None
    wanted = config.rl.preference is None and name_of(config.algo.credit) == credit
    if wanted and not given:
        raise refusal(f"rl.{role}", f"a table with credit {credit!r}, which asks it", "none", f"write [rl.{role}]")
    if given and not wanted:
        got = "rl.preference" if config.rl.preference is not None else f"credit {name_of(config.algo.credit)!r}"
        do = f'leave it out, or set [algo] preset = "{preset}"'
        raise refusal(f"rl.{role}", f"none without credit {credit!r}, which alone asks it", got, do)
    return given


async def write_learned(context: Context, trainer: Trainer, role: str, began: Path) -> str:
    """Write what a model beside the policy has become, which began as the folder `began`, as one that another run may
    begin with.

    Returns:
        The folder.
    """
    from sparring.stages.export import write_model

    folder = context.folder / "rl" / role
    await write_model(trainer, began, folder)
    return str(folder)


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
