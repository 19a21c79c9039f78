"""The implicit process reward model of the rl stage (PRIME): `[rl.implicit]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparring.algo.annotate.trainer_quantity import TrainerQuantity
from sparring.annotations import Annotation
from sparring.batch.implicit import implicit_rows
from sparring.protocols import Annotator, Trainer, TrainPlan
from sparring.recipe.run_config import RunConfig
from sparring.recipe.sections.rl import ImplicitConfig
from sparring.stages.context import POLICY, Context, given_checkpoint
from sparring.stages.models.learner import Learner
from sparring.stages.models.reward_model import checkpoint_of
from sparring.types import Sample


class Implicit(Learner):
    """Use of a language model whose log-probabilities are process rewards, for credit prime."""

    name, metrics, rank = "implicit", ("implicit/*",), "reward rank"
    annotation, preset = Annotation.IMPLICIT, "prime"

    def section(self, config: RunConfig) -> ImplicitConfig | None:
        return config.rl.implicit

    def plan(self, config: RunConfig, folder: Path, total_steps: int) -> TrainPlan:
        from sparring.algo.loss.implicit import ImplicitReward

        scale = config.algo.credit.implicit_scale
        assert scale is not None and config.rl.implicit is not None, "check has seen the run"
        return TrainPlan(
            losses=[ImplicitReward(beta=scale)],
            total_steps=total_steps,
            overrides=config.rl.implicit.train,
            name=self.name,
        )

    def rows(self, rows: Sequence[Sample]) -> list[Sample]:
        return implicit_rows(rows)

    def annotators(self, trainer: Trainer) -> list[Annotator]:
        return [TrainerQuantity(trainer.forward, Annotation.IMPLICIT)]

    def check(self, context: Context) -> list[str]:
        """Refuse a missing or superfluous section, and a model that is no language model over the policy's tokens."""
        config, section = context.config, context.config.rl.implicit
        if not self.is_configured(config) or section is None:
            return []
        if (name := section.model) != POLICY:
            checkpoint_of(config, "rl.implicit.model", name, (POLICY,), given_checkpoint(config), head="tokens")
        return [f"rl: an implicit reward model that begins as {section.model}"]
