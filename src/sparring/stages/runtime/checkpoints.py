"""Checkpoints of a stage: save, resume, and mark the best."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sparring.errors import StoreError
from sparring.protocols import Store, Trainer
from sparring.recipe.run_config import RunConfig
from sparring.stages.runtime.checkpoint_names import (
    BEST,
    WEIGHTS,
    best_saved,
    evaluated_steps,
    is_held_out,
    with_eval_metrics,
)
from sparring.train.config import TrainConfig
from sparring.types import CheckpointRef, StepResult

DAMAGED = "damaged-"
"""Prefix of the folder name of a damaged checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeping:
    """Rule for saving and keeping checkpoints.

    Attributes:
        last_step: last step of the stage, which is always saved.
        saves: False during a replay: no checkpoint is saved or moved.
        eval_every: steps between evaluations; 0: no evaluation. Evaluated steps are saved if `best_metric` is a figure
            of the evaluation.
        passes_over: whether a resume skips a damaged checkpoint.
    """

    train: TrainConfig
    last_step: int
    saves: bool = True
    eval_every: int = 0
    passes_over: bool = False

    @classmethod
    def of(cls, config: RunConfig, train: TrainConfig, last_step: int, *, saves: bool = True) -> Keeping:
        """Return the rule of a stage; `train` is `[train]` with the stage's own keys."""
        passes_over = config.run.damaged == "pass_over"
        return cls(train=train, last_step=last_step, saves=saves, eval_every=config.eval.every, passes_over=passes_over)


class Checkpoints:
    """Checkpoints of one stage: a folder each, with a manifest in the store that is written last.

    A crash before the manifest is written leaves an unlisted folder, which the next save replaces; a manifest never
    names an incomplete folder.

    Args:
        beside: other trainers of the stage by use, each saved in a subfolder of the checkpoint.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        store: Store,
        stage: str,
        folder: Path,
        keeping: Keeping,
        beside: Mapping[str, Trainer] = MappingProxyType({}),
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._trainer = trainer
        self._store = store
        self._stage = stage
        self._folder = folder / "checkpoints"
        self._keeping = keeping
        self._beside = beside
        self._say = say
        self._refs: list[CheckpointRef] | None = None
        self._unsaved: tuple[StepResult, Mapping[str, float], Mapping[str, Any]] | None = None

    async def resume(self) -> tuple[int, Mapping[str, Any]]:
        """Restore the last complete checkpoint, and return the number of finished steps and the state saved with them;
        (0, {}) for a fresh stage.

        Raises:
            StoreError: the checkpoint is damaged and `passes_over` is off.
        """
        while (last := self._store.last_checkpoint(self._stage)) is not None:
            ref, state = last
            try:
                self._verify(ref)
                await self._trainer.restore(ref)
                for use, other in self._beside.items():
                    await other.restore(_of_use(use, ref))
                return ref.step, state
            except StoreError as error:
                if not (self._keeping.passes_over and self._keeping.saves):
                    raise
                aside = Path(ref.path).with_name(DAMAGED + Path(ref.path).name)
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(ref.path, aside)
                fix = f"passed over, and kept as {aside.name}; the steps behind the one before are trained again"
                self._say(f"the checkpoint of step {ref.step} is damaged: {fix} ({str(error).partition(';')[0]})")
        return 0, {}

    def _verify(self, ref: CheckpointRef) -> None:
        """If damaged checkpoints may be skipped, read the other trainers' checkpoints completely before the policy's
        trainer is restored, because a partial restore could not be undone."""
        from sparring.train.checkpoint import read

        for use in self._beside if self._keeping.passes_over else ():
            read(Path(_of_use(use, ref).path))

    async def after(self, step: StepResult, metrics: Mapping[str, float], state: Mapping[str, Any]) -> None:
        """Save a finished step if it is due: every `save_every` steps, the last step, and steps whose evaluation may be
        the best.

        Args:
            state: state for a resume in addition to the weights, such as the position of the task source.
        """
        self._unsaved = (step, metrics, state)
        every = self._keeping.train.save_every
        due = every and step.version % every == 0 or self._is_evaluated(step.version)
        if step.version == self._keeping.last_step or due:
            await self.save_last()

    async def save_last(self) -> None:
        """Save the last finished step, unless saved, for a run that ends early. The trainer must not have stepped since
        then."""
        if self._unsaved is None or not self._keeping.saves:
            return
        step, metrics, state = self._unsaved
        path = self._folder / f"step-{step.version:06d}"
        ref = await self._trainer.save(str(path), stage=self._stage, metrics=metrics)
        for use, other in self._beside.items():  # after the folder exists: the policy's trainer replaces it
            await other.save(_of_use(use, ref).path, stage=self._stage, metrics={})
        self._store.checkpoint(ref, state)
        self._unsaved = None
        if self._refs is None:  # include those from before a resume; read once
            self._refs = list(self._store.checkpoints(self._stage))
        else:
            self._refs = [other for other in self._refs if other.step != ref.step] + [ref]
        self._retain()

    def finish(self) -> dict[str, Any]:
        """Delete unneeded checkpoints after the last evaluation, and return step, metric and value of the best one as
        `best`; nothing if no checkpoint has the metric."""
        if not self._keeping.saves:
            return {}
        if self._refs is None:
            self._refs = list(self._store.checkpoints(self._stage))
        best = self._retain()
        if best is None:
            return {}
        metric, folder = self._keeping.train.best_metric, self._folder.parent / BEST
        self._say(
            f"the best checkpoint is that of step {best['step']}: {metric} {best['value']:.4g}; its name is {folder}"
        )
        return {"best": best}

    def _retain(self) -> dict[str, Any] | None:
        """Delete the checkpoints that are not kept, and the weights written from them. Mark and return the best
        checkpoint."""
        from sparring.train.checkpoint import retain

        train, refs = self._keeping.train, self._refs or []
        retained = retain(
            with_eval_metrics(self._store, self._stage, refs, train.best_metric),
            keep_last=train.keep_last,
            best_metric=train.best_metric,
            best_is_highest=train.best_is_highest,
            also=self._awaiting_evaluation(refs),
        )
        deleted = {other.step for other in refs} - {other.step for other in retained}
        if deleted:
            self._store.retire(self._stage, deleted)
        for step in deleted:
            shutil.rmtree(self._folder.parent / WEIGHTS / f"step-{step:06d}", ignore_errors=True)
        self._refs = [ref for ref in refs if ref.step not in deleted]
        best = best_saved(retained, train)
        if best is not None:
            file = self._folder.parent / f"{BEST}.json"
            staging = file.with_name(file.name + ".tmp")
            staging.write_text(json.dumps(best) + "\n", encoding="utf-8")
            staging.rename(file)
        return best

    def _is_evaluated(self, step: int) -> bool:
        every, metric = self._keeping.eval_every, self._keeping.train.best_metric
        return bool(every) and step % every == 0 and is_held_out(self._stage, metric)

    def _awaiting_evaluation(self, refs: list[CheckpointRef]) -> set[int]:
        latest = max(evaluated_steps(self._store, self._stage), default=0)
        return {ref.step for ref in refs if ref.step > latest and self._is_evaluated(ref.step)}


def _of_use(use: str, ref: CheckpointRef) -> CheckpointRef:
    return replace(ref, model=use, path=str(Path(ref.path) / use))
