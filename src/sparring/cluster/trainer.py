"""Parts of a trainer, as data that can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparring.model.config import ModelConfig
from sparring.protocols import TrainPlan
from sparring.train.config import TrainConfig

if TYPE_CHECKING:
    from sparring.model.causal import CausalModel
    from sparring.train.ranks import Ranks
    from sparring.train.trainer import LocalTrainer


def load_model(spec: ModelConfig, path: str, device: str, **how: Any) -> CausalModel:
    """Load a model of `[models]` from a folder; `how`: further arguments of `model.load.load`."""
    from sparring.model.load import load

    return load(path, dtype=spec.dtype, device=device, numerics=spec.numerics, **how)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerParts:
    """Parts of a trainer.

    Attributes:
        path: checkpoint folder from which the trainer starts.
        train: config of `[train]`, before the stage's keys are applied.
        device: resolved device, `cpu` or `cuda`.
        sharded: hold the parameters in shards too (`[cluster] shard`).
    """

    name: str
    path: str
    plan: TrainPlan
    models: dict[str, ModelConfig]
    train: TrainConfig
    device: str
    threads: int
    sharded: bool = False

    def trainer(self, ranks: Ranks | None = None) -> LocalTrainer:
        """Make the trainer in this process; with `ranks`, the trainer of this rank."""
        from sparring.train.average import Average
        from sparring.train.ranks import ALONE, RankLayout
        from sparring.train.trainer import LocalTrainer

        spec, plan = self.models[self.name], self.plan
        model = load_model(
            spec,
            self.path,
            self.device,
            gradient_checkpointing=spec.gradient_checkpointing,
            head=plan.head,
            packs=not self.sharded,
        )
        moving = {
            teacher: load_model(self.models.get(teacher, spec), folder or self.path, self.device)
            for teacher, folder in plan.teachers.items()
        }
        averages = {average: Average(moving[average], decay) for average, decay in plan.averages.items()}
        return LocalTrainer(
            model,
            self.train.replaced(plan.overrides),
            plan.losses,
            name=plan.name or self.name,
            total_steps=plan.total_steps,
            threads=self.threads,
            teachers={**moving, **averages},
            layout=RankLayout(ranks or ALONE, self.sharded),
        )
