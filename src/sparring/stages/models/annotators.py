"""Annotators that the algorithm needs. An annotator adds values to rows before credit is computed."""

from __future__ import annotations

from collections.abc import Mapping

from sparring.algo.annotate.kl import KlCoefficient
from sparring.algo.annotate.trainer_quantity import ProximalShare, TrainerQuantity
from sparring.annotations import Annotation
from sparring.protocols import Annotator, Trainer
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import POLICY
from sparring.stages.models.learner import Learner
from sparring.stages.models.reference import reference_annotators
from sparring.stages.models.uses import USES, learners


def writable() -> set[Annotation]:
    """Return the annotations that the rl stage can write for a credit rule."""
    written = {use.annotation for use in USES if isinstance(use, Learner) and use.annotation is not None}
    return written | {Annotation.REFERENCE, Annotation.PROBABILITY_SQUARES}


def annotators(config: RunConfig, trainers: Mapping[str, Trainer], coefficient: KlCoefficient) -> list[Annotator]:
    """Return the annotators of the rl stage in the order in which they run."""
    trainer = trainers[POLICY]
    chain: list[Annotator] = [
        TrainerQuantity(trainers[learner.name].forward, learner.annotation, learner.quantity)
        for learner in learners(config)
        if learner.annotation is not None
    ]
    algo, steps = config.algo, config.rl.passes * config.rl.minibatches
    by_algo = config.rl.preference is None
    # a batch that is trained once needs no extra forward: the one with gradients has the same values
    if by_algo and algo.needs_proximal and steps > 1:
        guessed = algo.anchor == "loglinear"
        chain.append(
            ProximalShare(lambda: trainer.version) if guessed else TrainerQuantity(trainer.forward, Annotation.PROXIMAL)
        )
    if by_algo and algo.reads(Annotation.PROBABILITY_SQUARES):
        chain.append(TrainerQuantity(trainer.forward, Annotation.PROBABILITY_SQUARES, "probability_squares"))
    chain += reference_annotators(config, trainer)
    if by_algo and algo.adaptive.target is not None:
        chain.append(coefficient)
    if by_algo and algo.kl_reward is not None:
        chain.append(algo.kl_reward)
    return chain
