"""Reinforcement learning over live multi-turn rollouts: what is the stage's own. `stages/live.py` runs it."""

from __future__ import annotations

from typing import Any

from sparring.algo.annotate.kl import KlCoefficient
from sparring.batch.batches import Plan
from sparring.config import RunConfig
from sparring.protocols import TaskSource, TrainPlan
from sparring.stages.annotators import annotators
from sparring.stages.context import POLICY, Context
from sparring.stages.critic import CRITIC, open_critic, write_critic
from sparring.stages.live import Lesson, Live
from sparring.stages.online import credit_chosen, preference_loss
from sparring.stages.reference import reference_beside

STAGE = "rl"
ANNOTATIONS = frozenset({"reference", "value", "baseline", "probability_squares"})
"""What the stage can give a credit rule beside scores and what was recorded."""


async def run(context: Context) -> dict[str, Any]:
    """Train the stage's input and write a Hugging Face folder, or an adapter's.

    Returns:
        As `Live.train`; where there is a critic, `critic`, that one's folder.
    """
    config = context.config
    live = Live(context, STAGE, config.rl, _losses(config))
    context.sink.event(STAGE, correction_chosen(config))
    critic = open_critic(context, live.source)
    if critic is not None:
        live.add(CRITIC, critic)
    coefficient = KlCoefficient(config.algo.adaptive)
    lesson = Lesson(
        tasks=_tasks(context),
        annotators=annotators(context, live.trainers, coefficient),
        credit=credit_chosen(config),
        plan=_plan(config),
        kept={"kl": coefficient},
        metrics=coefficient.metrics,
        baseline=config.rl.preference is None and config.algo.reads("baseline"),
        eval_every=config.eval.every,
    )
    result = await live.train(lesson)
    return result if critic is None else {**result, "critic": await write_critic(context, critic, live.source)}


def _tasks(context: Context) -> TaskSource:
    """The training tasks, passed over as `[rl] pools` says."""
    seed, pools = context.config.run.seed, context.config.rl.pools
    source = context.factory.tasks("train", seed)
    return source if pools is None else pools.open(source, seed=seed)


def _plan(config: RunConfig) -> Plan:
    critic = config.rl.critic
    return Plan(
        minibatches=config.rl.minibatches,
        passes=config.rl.passes,
        seed=config.run.seed,
        idle_tokens=config.algo.needs_idle_tokens,
        critic=None if critic is None else CRITIC,
        warmup_steps=0 if critic is None else critic.warmup_steps,
    )


def _losses(config: RunConfig) -> TrainPlan:
    from sparring.algo.loss.imitate import ImitateLoss
    from sparring.algo.loss.policy import PolicyLoss

    total = config.rl.steps * config.rl.passes * config.rl.minibatches
    loss = preference_loss(config) or PolicyLoss(config.algo)
    imitate = [ImitateLoss(scale=config.rl.observations)] if config.rl.observations else []
    beside = reference_beside(config)._asdict()
    return TrainPlan(losses=[loss, *imitate], total_steps=total, overrides=config.rl.train, **beside)


def correction_chosen(config: RunConfig) -> str:
    """The correction of a resolved config in words, with what it is for."""
    numerics = config.models[POLICY].numerics
    engine = f"engine {config.engine.kind} in {numerics} numerics"
    exact = config.engine.exact and numerics == "exact"
    agrees = "samples with the trainer's own probabilities" if exact else "does not agree with the trainer to the bit"
    return f"correction {config.algo.correction_rule.in_words()}: {engine} {agrees}"
