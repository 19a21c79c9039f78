"""Uses of models by the stages of a run, such as policy, critic and judge. Each use has a file in this folder and an
entry in `stages/models/uses.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from sparring.errors import BadInput, InfraError, refusal
from sparring.observe.wait_reports import waiting
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import Context
from sparring.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedModel:
    """Model that a stage computes for a use.

    Attributes:
        model: name in `[models]`, or name of earlier weights of a trained model.
        kind: trained; frozen, which is computed without gradients; or engine, with an engine of its own.
        scalar: whether the model has a scalar head.
        train: settings of the model's trainer. None: the model is not trained.
        rank: name of a process that trains a part of the model.
        trainer: use whose trainer computes this frozen model; "": another process, its own or the run's, does.
        decay: decay of a moving average of what `trainer` trains; None: the weights stay.
    """

    use: str
    model: str
    kind: Literal["trained", "frozen", "engine"]
    scalar: bool = False
    train: TrainConfig | None = None
    rank: str = ""
    trainer: str = ""
    decay: float | None = None


class ModelUse(ABC):
    """Purpose for which stages compute models of the recipe, such as critic or judge.

    Attributes:
        name: name of the use on batches, metrics, checkpoints and in messages.
        metrics: metrics of online stages that the use reports; a star stands for any name.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def models(self, config: RunConfig, stage: str) -> list[UsedModel]:
        """Return the models that a stage has for this use in the processes of the run."""

    def check(self, context: Context) -> list[str]:
        """Refuse settings with which the use cannot work, by the recipe and the checkpoints alone; return facts."""
        return []

    async def ask(self, context: Context) -> list[str]:
        """Refuse models that do not answer; return facts."""
        return []

    def engines(self, config: RunConfig, names: Iterable[str]) -> list[UsedModel]:
        """Return the models in `names` for which the run opens engines: all but models on servers outside the run."""
        here = (name for name in names if name not in config.models or config.models[name].served is None)
        return [UsedModel(use=self.name, model=name, kind="engine") for name in sorted(here)]


async def check_answers(config: RunConfig, model: str, use: str, ask: Callable[[str], Awaitable[None]]) -> None:
    """Refuse a model of the recipe that does not answer. `use`: words for its use in messages, such as "a judge"."""
    try:
        with waiting(f"models.{model}, {use}, to answer"):
            await ask(model)
    except (InfraError, BadInput) as error:
        if isinstance(error, BadInput) and config.models[model].served is None:
            raise
        fix = f"start its server, or correct models.{model}.served"
        raise refusal(f"models.{model}", f"{use} that answers", str(error), fix) from error
