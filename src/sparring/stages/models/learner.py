"""Models that learn from the policy's rollouts in the rl stage, each by a section `[rl.<name>]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from sparring.algo.base import name_of
from sparring.algo.rules import credits_with
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.model.hub import model_folder
from sparring.observe.hooks import prefixed
from sparring.protocols import Annotator, Trainer, TrainPlan
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import POLICY, Context, RunFiles
from sparring.stages.models.model_use import ModelUse, UsedModel
from sparring.stages.models.reward_model import OWN
from sparring.types import Sample


class LearnerSection(Protocol):
    """Keys that the sections of learners share."""

    @property
    def model(self) -> str:
        """Initial weights: `policy`, `reward_model` or a name in `[models]`."""

    @property
    def train(self) -> Mapping[str, Any]:
        """Keys of `[train]` that the learner replaces."""


class Learner(ModelUse):
    """Use of a model that learns beside the policy, in as many optimiser steps.

    Attributes:
        rank: name of a process that trains a part of it.
        annotation: annotation that it writes on the policy's rows; a credit rule that reads it needs the section.
        preset: preset of `[algo]` that needs the section.
        scalar: whether it has a scalar head.
    """

    rank: ClassVar[str]
    annotation: ClassVar[Annotation]
    preset: ClassVar[str]
    scalar: ClassVar[bool] = False

    def section(self, config: RunConfig) -> LearnerSection | None:
        """Return the section of the recipe; None: the run has no such learner."""
        section: LearnerSection | None = getattr(config.rl, self.name)
        return section

    def plan(self, config: RunConfig, folder: Path, total_steps: int) -> TrainPlan:
        """Return the settings of its trainer.

        Args:
            folder: checkpoint folder that it begins as.
            total_steps: number of optimiser steps of the stage.
        """
        raise NotImplementedError

    def rows(self, rows: Sequence[Sample]) -> list[Sample]:
        """Return its rows for the policy's credited rows."""
        raise NotImplementedError

    def annotators(self, trainer: Trainer) -> list[Annotator]:
        """Return the annotators that add what it computes to the policy's rows, before the update."""
        return []

    def reported(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics to report of a batch, without the prefix of its name."""
        return metrics

    def warmup_steps(self, config: RunConfig) -> int:
        """Return the number of first updates in which the policy is not trained."""
        return 0

    def folder(self, files: RunFiles, source: Path) -> Path:
        """Return the checkpoint folder that it begins as.

        Args:
            source: checkpoint folder that the policy begins as.
        """
        name = self._given(files.config).model
        if name == POLICY:
            return source
        return files.output(OWN) if name == OWN else model_folder(files.config.models[name])

    def open(self, context: Context, folder: Path, total_steps: int) -> Trainer:
        """Open its trainer, as in `plan`."""
        name, plan = self._given(context.config).model, self.plan(context.config, folder, total_steps)
        trainer = context.cluster.trainer(POLICY if name == OWN else name, path=str(folder), plan=plan)
        return prefixed(trainer, self.name, self.reported)

    def models(self, config: RunConfig, stage: str) -> list[UsedModel]:
        section = self.section(config) if stage == "rl" else None
        if section is None:
            return []
        train = config.train.replaced(section.train)
        trained = UsedModel(
            use=self.name, model=section.model, kind="trained", scalar=self.scalar, train=train, rank=self.rank
        )
        return [trained]

    def is_configured(self, config: RunConfig) -> bool:
        """Return whether the run trains it. The section must be there if the rl stage runs with a credit rule that
        reads the annotation, and may not be there otherwise.

        Raises:
            BadInput: the section is missing or superfluous.
        """
        if "rl" not in config.run.stages:
            return False
        configured, where = self.section(config) is not None, f"rl.{self.name}"
        wanted = config.rl.preference is None and config.algo.reads(self.annotation)
        credit = " or ".join(repr(name) for name in credits_with(lambda rule: self.annotation in rule.reads))
        if wanted and not configured:
            raise refusal(where, f"a table, which credit {credit} needs", "none", f"write [{where}]")
        if configured and not wanted:
            got = "rl.preference" if config.rl.preference is not None else f"credit {name_of(config.algo.credit)!r}"
            do = f'leave it out, or set [algo] preset = "{self.preset}"'
            raise refusal(where, f"no table, because only credit {credit} uses it", got, do)
        return configured

    def _given(self, config: RunConfig) -> LearnerSection:
        section = self.section(config)
        assert section is not None, "a run without the section opens no such learner"
        return section
