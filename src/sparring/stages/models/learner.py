"""Models that learn from the policy's rollouts in the rl stage, each by a section `[rl.<name>]`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from sparring.algo.base import name_of
from sparring.algo.rules import credits_with
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.model.hub import model_folder
from sparring.observe.hooks import prefixed
from sparring.protocols import Loss, Trainer, TrainPlan
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import POLICY, Context, RunFiles
from sparring.stages.models.model_use import ModelUse, UsedModel
from sparring.stages.models.reward_model import OWN
from sparring.types import Sample


class LearnerSection(Protocol):
    """Keys that the sections of learners share."""

    model: str
    train: dict[str, int | float | str | bool]


class Learner(ModelUse):
    """Use of a model that learns in addition to the policy, in as many optimiser steps.

    Attributes:
        title: name in messages, with its article.
        rank: name of a process that trains a part of the model.
        scalar: whether the model has a scalar head.
        annotation: annotation that the model writes on rows before the update. A credit rule that reads the annotation
            needs the section. None: the model writes no annotation.
        quantity: quantity that the model's trainer computes for the annotation.
        preset: preset of `[algo]` that needs the section.
        rows: function that makes the model's rows from the policy's rows with advantages.
    """

    title: ClassVar[str]
    rank: ClassVar[str]
    scalar: ClassVar[bool] = False
    annotation: ClassVar[Annotation | None] = None
    quantity: ClassVar[str] = "logprob"
    preset: ClassVar[str] = ""
    rows: ClassVar[staticmethod[[Sequence[Sample]], list[Sample]]]

    @abstractmethod
    def loss(self, config: RunConfig) -> Loss:
        """Return the model's loss."""

    def head(self, folder: Path) -> str:
        """Return the head to train, as in `model.load`."""
        return "tokens"

    def reported(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics to report of a batch, without the model's name as prefix."""
        return metrics

    def warmup_steps(self, config: RunConfig) -> int:
        """Return the number of first updates in which the policy is not trained."""
        return 0

    def check_model(self, files: RunFiles, name: str) -> None:
        """Refuse initial weights that cannot learn from the policy's tokens."""

    def section(self, config: RunConfig) -> LearnerSection | None:
        """Return the section `[rl.<name>]` of the recipe; None: the run does not train this model."""
        section: LearnerSection | None = getattr(config.rl, self.name)
        return section

    def folder(self, files: RunFiles, source: Path) -> Path:
        """Return the folder of the model's initial weights; `source` is the policy's folder."""
        name = self._given(files.config).model
        if name == POLICY:
            return source
        return files.output(OWN) if name == OWN else model_folder(files.config.models[name])

    def open(self, context: Context, folder: Path, total_steps: int) -> Trainer:
        """Open the model's trainer on a checkpoint folder, for `total_steps` optimiser steps."""
        config = context.config
        plan = TrainPlan(
            losses=[self.loss(config)],
            total_steps=total_steps,
            overrides=self._given(config).train,
            head=self.head(folder),
            name=self.name,
        )
        name = self._given(config).model
        trainer = context.cluster.trainer(POLICY if name == OWN else name, path=str(folder), plan=plan)
        return prefixed(trainer, self.name, self.reported)

    def models(self, config: RunConfig, stage: str) -> list[UsedModel]:
        section = self.section(config) if stage == "rl" else None
        if section is None:
            return []
        train = config.train.replaced(section.train)
        return [
            UsedModel(
                use=self.name, model=section.model, kind="trained", scalar=self.scalar, train=train, rank=self.rank
            )
        ]

    def check(self, context: Context) -> list[str]:
        """Refuse a missing section whose annotation a credit rule reads, a section that no rule needs, and weights that
        `check_model` refuses."""
        config, section = context.config, self.section(context.config)
        if "rl" not in config.run.stages:
            return []
        if self.annotation is not None:
            self._check_wanted(config, self.annotation)
        if section is None:
            return []
        self.check_model(context, section.model)
        steps = self.warmup_steps(config)
        warmup = f"; learns alone through {steps} updates" if steps else ""
        return [f"rl: {self.title} that begins as {section.model}{warmup}"]

    def _check_wanted(self, config: RunConfig, annotation: Annotation) -> None:
        configured, where = self.section(config) is not None, f"rl.{self.name}"
        wanted = config.rl.preference is None and config.algo.reads(annotation)
        credit = " or ".join(repr(name) for name in credits_with(lambda rule: annotation in rule.reads))
        if wanted and not configured:
            raise refusal(where, f"a table, which credit {credit} needs", "none", f"write [{where}]")
        if configured and not wanted:
            actual = "rl.preference" if config.rl.preference is not None else f"credit {name_of(config.algo.credit)!r}"
            fix = f'leave it out, or set [algo] preset = "{self.preset}"'
            raise refusal(where, f"no table, because only credit {credit} uses it", actual, fix)

    def _given(self, config: RunConfig) -> LearnerSection:
        section = self.section(config)
        assert section is not None, "a run without the section opens no such learner"
        return section
