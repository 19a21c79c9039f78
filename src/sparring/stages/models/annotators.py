"""Annotators that the algorithm needs: they add values to rows before credit."""

from __future__ import annotations

from collections.abc import Mapping

from sparring.algo.annotate.kl import KlCoefficient
from sparring.algo.annotate.trainer_quantity import ProximalShare, TrainerQuantity
from sparring.annotations import Annotation
from sparring.protocols import Annotator, Trainer
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import POLICY
from sparring.stages.models.critic import CRITIC
from sparring.stages.models.implicit_reward import IMPLICIT
from sparring.stages.models.reference import reference_annotators


def annotators(config: RunConfig, trainers: Mapping[str, Trainer], coefficient: KlCoefficient) -> list[Annotator]:
    """Return the annotators of the rl stage in the order in which they run.

    Args:
        trainers: trainers by role: the policy's, and those of a critic or implicit reward model.
        coefficient: coefficient of an adaptive KL penalty.
    """
    trainer = trainers[POLICY]
    chain: list[Annotator] = (
        [TrainerQuantity(trainers[CRITIC].forward, Annotation.VALUE, "value")] if CRITIC in trainers else []
    )
    if IMPLICIT in trainers:  # before the update, as in the paper
        chain.append(TrainerQuantity(trainers[IMPLICIT].forward, Annotation.IMPLICIT))
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
