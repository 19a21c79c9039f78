"""The reference model of `[algo.kl]`, and the annotators that ask for its log-probabilities."""

from __future__ import annotations

from pathlib import Path

from sparring.algo.annotate.trainer_quantity import TeacherTag, TrainerQuantity
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.generation import ScoreRequest, Scores
from sparring.model.hub import model_folder
from sparring.protocols import Annotator, Trainer
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import POLICY, Context, given_checkpoint
from sparring.stages.models.model_use import ModelUse, UsedModel
from sparring.stages.models.objective import needs_reference

AVERAGE, LAST, START = "average", "last", "start"
"""References that are earlier weights of the policy."""


class TrainerTeacher:
    """Model that a trainer computes without gradients, with the interface of an engine."""

    def __init__(self, trainer: Trainer, name: str) -> None:
        self._trainer, self._name = trainer, name

    async def score(self, request: ScoreRequest) -> Scores:
        """Score given tokens as `Engine.score` does, one request at a time."""
        return await self._trainer.score(self._name, request)


class ReferenceUse(ModelUse):
    """Use of the reference model that `[algo.kl]` compares with the policy."""

    name, metrics = "reference", ("kl*",)

    def models(self, config: RunConfig, stage: str) -> list[UsedModel]:
        if stage != "rl" or not has_reference_model(config):
            return []
        decay = {AVERAGE: config.algo.kl.decay, LAST: 0.0}.get(config.algo.kl.reference)
        model = reference_model(config)
        return [UsedModel(use=self.name, model=model, kind="frozen", trainer=POLICY, decay=decay)]

    def check(self, context: Context) -> list[str]:
        """Refuse a reference that cannot be computed or that always equals the policy."""
        if "rl" in context.config.run.stages and needs_reference(context.config):
            _check(context.config)
        return []


def has_reference_model(config: RunConfig) -> bool:
    """Return whether the trainer has a separate reference model. The reference "last", the policy before the update,
    needs none unless the algorithm compares whole distributions: the trainer computes its log-probabilities before the
    update."""
    return needs_reference(config) and (config.algo.kl.reference != LAST or _compares_whole(config))


def reference_model(config: RunConfig) -> str:
    """Return the name of the reference in the trainer."""
    name = config.algo.kl.reference
    return POLICY if name == START else name


def reference_annotators(config: RunConfig, trainer: Trainer) -> list[Annotator]:
    """Return the annotators that name the reference on rows, and that ask for its log-probabilities if a rule reads
    them."""
    if not needs_reference(config):
        return []
    if not has_reference_model(config):
        return [TrainerQuantity(trainer.forward, Annotation.REFERENCE)]
    is_read = config.rl.preference is not None or config.algo.reads_reference
    return [
        TeacherTag(reference_model(config)),
        *([TrainerQuantity(trainer.forward, Annotation.REFERENCE, "teacher")] if is_read else []),
    ]


def reference_folder(config: RunConfig) -> Path:
    """Return the checkpoint folder of a reference that `[models.<name>]` describes.

    Raises:
        BadInput: the recipe does not have the model, or the model has no path.
    """
    name, models = config.algo.kl.reference, config.models
    if name not in models or models[name].path is None:
        actual = f"{name!r}, which {'has no path' if name in models else 'no [models] section describes'}"
        expected = "start, last, average or a model with a path"
        raise refusal("algo.kl.reference", expected, actual, f"add [models.{name}] with a path")
    return model_folder(models[name])


def check_reserved_name(config: RunConfig, name: str, where: str) -> None:
    """Refuse a model of the recipe whose name stands for earlier weights of the policy."""
    if name in (START, LAST, AVERAGE) and name in config.models:
        expected = f'another name, because {where} = "{name}" means earlier weights of the policy'
        raise refusal(f"models.{name}", expected, "this one", "rename the model")


def _check(config: RunConfig) -> None:
    kl = config.algo.kl
    check_reserved_name(config, kl.reference, "algo.kl.reference")
    if kl.reference == LAST:
        if kl.coefficient and config.rl.passes * config.rl.minibatches == 1:
            fix = "set rl.minibatches or rl.passes, or choose another reference"
            raise refusal(
                "algo.kl.reference", 'several optimiser steps per update with "last"', "one, at which the KL is 0", fix
            )
    elif kl.reference not in (START, AVERAGE):
        reference_tokenizer = reference_folder(config) / "tokenizer.json"
        start = given_checkpoint(config)
        if (
            start is not None
            and reference_tokenizer.exists()
            and reference_tokenizer.read_bytes() != (start / "tokenizer.json").read_bytes()
        ):
            raise refusal(
                "algo.kl.reference",
                "a model with the policy's tokenizer",
                f"{reference_tokenizer}, which has a different one",
                "choose such a model",
            )


def _compares_whole(config: RunConfig) -> bool:
    return config.rl.preference is None and config.algo.compares_whole
