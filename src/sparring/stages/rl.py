"""Reinforcement learning over live multi-turn rollouts: what is the stage's own. `stages/runtime/online.py` runs it."""

from __future__ import annotations

from typing import Any

from sparring.algo.annotate.kl import KlCoefficient
from sparring.annotations import Annotation
from sparring.batch.batches import Plan
from sparring.batch.critic import value_rows
from sparring.batch.implicit import implicit_rows
from sparring.protocols import TrainPlan
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import POLICY, Context
from sparring.stages.models.annotators import annotators
from sparring.stages.models.auxiliary import write_learned
from sparring.stages.models.critic import CRITIC, critic_folder, open_critic
from sparring.stages.models.implicit_reward import IMPLICIT, implicit_folder, open_implicit
from sparring.stages.models.objective import credit_chosen, imitation_scale, preference_loss
from sparring.stages.models.reference import reference_beside
from sparring.stages.runtime.online import OnlineObjective, OnlineTraining
from sparring.stages.runtime.raised import rl_optimiser_steps
from sparring.stages.runtime.training_tasks import training_tasks

STAGE = "rl"
ANNOTATIONS = frozenset({Annotation.REFERENCE, Annotation.VALUE, Annotation.IMPLICIT, Annotation.PROBABILITY_SQUARES})
"""Annotations that the stage can write for a credit rule."""


async def run(context: Context) -> dict[str, Any]:
    """Train the stage's input and write a Hugging Face folder, or an adapter's.

    Returns:
        The result of `OnlineTraining.train`, and the folder of each model that learns beside the policy, by its role:
        `critic`, `implicit`.
    """
    config = context.config
    training = OnlineTraining(context, STAGE, config.rl, _losses(context))
    context.sink.event(STAGE, correction_chosen(config))
    critic, implicit = open_critic(context, training.source), open_implicit(context, training.source)
    for role, beside in ((CRITIC, critic), (IMPLICIT, implicit)):
        if beside is not None:
            training.add(role, beside)
    coefficient = KlCoefficient(config.algo.adaptive)
    objective = OnlineObjective(
        tasks=training_tasks(context, config.rl.pools, drops_equal=config.algo.zero_variance_filter),
        annotators=annotators(context, training.trainers, coefficient),
        credit=credit_chosen(config),
        plan=_plan(config),
        kept={"kl": coefficient},
        metrics=coefficient.metrics,
        baseline=config.rl.preference is None and config.algo.credit.needs_baselines,
    )
    result = await training.train(objective)
    if critic is not None:
        result |= {CRITIC: await write_learned(context, critic, CRITIC, critic_folder(context, training.source))}
    if implicit is not None:
        result |= {
            IMPLICIT: await write_learned(context, implicit, IMPLICIT, implicit_folder(context, training.source))
        }
    return result


def _plan(config: RunConfig) -> Plan:
    critic = config.rl.critic
    learners = {CRITIC: (critic, value_rows), IMPLICIT: (config.rl.implicit, implicit_rows)}
    return Plan(
        minibatches=config.rl.minibatches,
        passes=config.rl.passes,
        seed=config.run.seed,
        idle_rows=config.algo.needs_idle_rows,
        whole_trajectories=config.algo.unit == "sequence",
        learners={role: rows for role, (section, rows) in learners.items() if section is not None},
        warmup_steps=0 if critic is None else critic.warmup_steps,
    )


def _losses(context: Context) -> TrainPlan:
    from sparring.algo.loss.imitate import ImitateLoss
    from sparring.algo.loss.policy import PolicyLoss

    config, total = context.config, rl_optimiser_steps(context)
    loss = preference_loss(config) or PolicyLoss(config.algo)
    scale, beside = imitation_scale(config), reference_beside(config)._asdict()
    losses = [loss, *([ImitateLoss(scale=scale)] if scale else [])]
    return TrainPlan(losses=losses, total_steps=total, overrides=config.rl.train, **beside)


def correction_chosen(config: RunConfig) -> str:
    """Return the correction of a resolved config in words, with what it is for."""
    numerics = config.models[POLICY].numerics
    engine = f"engine {config.engine.kind} in {numerics} numerics"
    exact = config.engine.exact and numerics == "exact"
    agrees = "samples with the trainer's own probabilities" if exact else "does not agree with the trainer to the bit"
    return f"correction {config.algo.correction_rule.in_words()}: {engine} {agrees}"
