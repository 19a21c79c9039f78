"""Checkpoints of a stage: written in time, and gone on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparring.protocols import Store, Trainer
from sparring.train.config import TrainConfig
from sparring.types import CheckpointRef, StepResult


class Checkpoints:
    """The checkpoints of one stage: a folder each, with a manifest in the store that is written last.

    A crash between the two leaves a folder that nobody knows of and that the next save replaces; a manifest never names
    a folder that is not complete.

    Args:
        trainer: whose state is saved.
        store: holds the manifests.
        stage: the stage's name.
        folder: `<run>/<stage>`.
        config: `[train]`: `save_every`, `keep_last`, `best_metric`.
        last_step: the stage's last step, which is always saved.
        beside: other trainers of the stage by role. Each has a folder of that name inside the checkpoint's, so that
            they come and go with it.
        saves: False where steps are repeated: nothing is saved.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        store: Store,
        stage: str,
        folder: Path,
        config: TrainConfig,
        last_step: int,
        beside: Mapping[str, Trainer] = MappingProxyType({}),
        saves: bool = True,
    ) -> None:
        self._trainer = trainer
        self._store = store
        self._stage = stage
        self._folder = folder / "checkpoints"
        self._config = config
        self._last_step = last_step
        self._beside = beside
        self._saves = saves
        self._refs: list[CheckpointRef] | None = None
        self._unsaved: tuple[StepResult, Mapping[str, float], Mapping[str, Any]] | None = None

    async def resume(self) -> tuple[int, Mapping[str, Any]]:
        """Go back to the last complete checkpoint, if there is one.

        Returns:
            The number of finished steps and the state that was saved with them; (0, {}) for a fresh stage.
        """
        last = self._store.last_checkpoint(self._stage)
        if last is None:
            return 0, {}
        ref, state = last
        await self._trainer.restore(ref)
        for role, other in self._beside.items():
            await other.restore(_of(role, ref))
        return ref.step, state

    async def after(self, step: StepResult, metrics: Mapping[str, float], state: Mapping[str, Any]) -> None:
        """Save when it is time to: every `save_every` steps and after the last.

        Args:
            step: the step that has just finished.
            metrics: decide which checkpoint is the best.
            state: what a resume needs beside the weights, such as the task source's position.
        """
        self._unsaved = (step, metrics, state)
        every = self._config.save_every
        if step.version == self._last_step or every and step.version % every == 0:
            await self.save_last()

    async def save_last(self) -> None:
        """Save the step that finished last, where that was not saved yet: for a run that ends early and is to be gone
        on with. The trainer has to stand where it stood after that step."""
        if self._unsaved is None or not self._saves:
            return
        from sparring.train.checkpoint import retain

        step, metrics, state = self._unsaved
        path = self._folder / f"step-{step.version:06d}"
        ref = await self._trainer.save(str(path), stage=self._stage, metrics=metrics)
        for role, other in self._beside.items():  # after its folder, which the first puts in the place of any before
            await other.save(_of(role, ref).path, stage=self._stage, metrics={})
        self._store.checkpoint(ref, state)
        self._unsaved = None
        if self._refs is None:  # also those from before a resume; they are read once
            self._refs = list(self._store.checkpoints(self._stage))
        else:
            self._refs = [other for other in self._refs if other.step != ref.step] + [ref]
        retained = retain(
            self._refs,
            keep_last=self._config.keep_last,
            best_metric=self._config.best_metric,
            best_is_highest=self._config.best_is_highest,
        )
        deleted = {other.step for other in self._refs} - {other.step for other in retained}
        if deleted:
            self._store.retire(self._stage, deleted)
        self._refs = retained


def _of(role: str, ref: CheckpointRef) -> CheckpointRef:
    return replace(ref, model=role, path=str(Path(ref.path) / role))
