"""The distill stage, on-policy distillation: teachers give log-probabilities for the tokens that the policy samples in
live rollouts. `stages/runtime/online.py` has the training."""

from __future__ import annotations

from typing import Any

from sparring.algo.credit.distilled import Distilled
from sparring.batch.batches import Plan
from sparring.protocols import Divergence, Loss, Store, TrainPlan
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import POLICY, Context
from sparring.stages.models.teacher import teacher_annotator
from sparring.stages.models.uses import teachers_of
from sparring.stages.runtime.online import OnlineObjective, OnlineTraining
from sparring.stages.runtime.step_extension import first_steps
from sparring.stages.runtime.training_tasks import training_tasks

STAGE = "distill"


async def run(context: Context) -> dict[str, Any]:
    """Train the stage's input and write a Hugging Face or adapter folder."""
    config = context.config
    training = OnlineTraining(context, STAGE, config.distill, _losses(config, context.store))
    objective = OnlineObjective(
        tasks=training_tasks(config, context.factory, None, drops_equal=False),
        annotators=[
            teacher_annotator(
                config,
                context.cluster,
                training.watch,
                engine=training.engine,
                trainer=training.trainers[POLICY],
                source=training.source,
            )
        ],
        credit=Distilled(config.distill.aggregation),
        plan=Plan(),
    )
    return await training.train(objective)


def _losses(config: RunConfig, store: Store) -> TrainPlan:
    from sparring.algo.loss.distill import DistillLoss, SampledDistillLoss
    from sparring.algo.loss.imitate import ImitateLoss

    stage = config.distill
    loss: Loss
    if stage.over == "token":
        loss = SampledDistillLoss(stage.estimator, ratio_cap=stage.ratio_cap)
    else:
        loss = DistillLoss(Divergence(kind=stage.divergence, over=stage.over, beta=stage.beta))
    teachers, averages = teachers_of(config, STAGE, POLICY)
    total = first_steps(store, STAGE, stage.steps)
    losses = [loss, *([ImitateLoss(scale=stage.observations)] if stage.observations else [])]
    return TrainPlan(losses=losses, total_steps=total, overrides=stage.train, teachers=teachers, averages=averages)
