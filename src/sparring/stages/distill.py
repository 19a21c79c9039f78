"""On-policy distillation: the policy samples in live rollouts, and teachers say what they would have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from sparring.algo.annotate.observed import observing
from sparring.algo.annotate.watch import Watch
from sparring.algo.credit.distilled import Distilled
from sparring.batch.batches import Plan, batches
from sparring.loop import run_loop
from sparring.observe.spans import Spans
from sparring.protocols import Annotator, Divergence, Loss, TrainPlan
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.stages.checkpoints import Checkpoints
from sparring.stages.context import POLICY, Context
from sparring.stages.lora import trained_folder
from sparring.stages.rewarded import scorers
from sparring.stages.rl import Totals, runner
from sparring.stages.teachers import annotator, teacher_folder
from sparring.stages.watch import StepClock, WatchedEngine, WatchedTrainer
from sparring.types import Batch, Group, StepResult

STAGE = "distill"


async def run(context: Context) -> dict[str, Any]:
    """Train the stage's input and write a Hugging Face folder, or an adapter's.

    Returns:
        As of the rl stage: the token account, `logprob_max_abs_diff` and `model`, the folder.
    """
    from sparring.stages.export import write_model

    config = context.config
    stage = config.distill
    source = trained_folder(context, context.input(STAGE))
    spans = Spans()
    engine = WatchedEngine(context.cluster.engine(POLICY, path=str(source)), spans)
    trainer = WatchedTrainer(context.cluster.trainer(POLICY, path=str(source), plan=_plan(context)), spans)
    watch = Watch()
    teachers = annotator(context, watch, engine, source)
    window = Window(stage.groups_per_step, config.rollout.max_lag, stage.steps)
    scheduler = Scheduler(
        runner(context, engine, source),
        context.factory.tasks("train", config.run.seed),
        window,
        run_seed=config.run.seed,
        engine_version=lambda: engine.version,
        stage=STAGE,
        scorers=scorers(context),
    )
    checkpoints = Checkpoints(
        trainer=trainer,
        store=context.store,
        stage=STAGE,
        folder=context.folder / STAGE,
        config=msgspec.structs.replace(config.train, **stage.train),
        last_step=stage.steps,
    )
    done, state = await checkpoints.resume()
    context.store.truncate(STAGE, done, first_group=done * stage.groups_per_step)
    totals = Totals(state.get("totals"))
    if done:
        scheduler.restore(state["scheduler"], context.store.groups(stage=STAGE))
        await engine.pull(await trainer.push())
    context.sink.start(STAGE, stage.steps)
    clock = StepClock(spans)

    async def after_step(step: StepResult, batch: Batch, metrics: Mapping[str, float]) -> None:
        metrics = {**metrics, **scheduler.metrics(), **engine.lap(), **clock.lap(batch.account.sampled)}
        totals.add(batch, metrics)
        context.store.metric(STAGE, step.version, metrics)
        context.sink.log(STAGE, step.version, metrics)
        await checkpoints.after(step, metrics, {"scheduler": scheduler.state(step.version), "totals": totals.as_dict()})

    async with aclosing(scheduler.groups()) as groups:
        steps = _batches(context, watch.groups(groups), done, (teachers, *observing(watch, stage.observations), watch))
        await run_loop(steps, {POLICY: trainer}, {POLICY: engine}, window, after_step)
    await write_model(trainer, source, context.output(STAGE))
    return {**totals.as_dict(), "model": str(context.output(STAGE))}


def _batches(
    context: Context, groups: AsyncIterator[Group], done: int, annotators: Sequence[Annotator]
) -> AsyncIterator[Batch]:
    stage = context.config.distill
    return batches(
        groups,
        steps=range(done + 1, stage.steps + 1),
        groups_per_step=stage.groups_per_step,
        annotators=annotators,
        credit=Distilled(stage.aggregation),
        model=POLICY,
        store=context.store,
        plan=Plan(stage=STAGE),
    )


def _plan(context: Context) -> TrainPlan:
    from sparring.algo.loss.distill import DistillLoss, SampledDistillLoss
    from sparring.algo.loss.imitate import ImitateLoss

    stage = context.config.distill
    teachers: dict[str, str] = {}
    loss: Loss
    if stage.over == "token":
        loss = SampledDistillLoss(stage.estimator, ratio_cap=stage.ratio_cap)
    else:
        loss = DistillLoss(Divergence(kind=stage.divergence, over=stage.over, beta=stage.beta))
        if stage.over == "vocabulary":
            teachers = {name: str(teacher_folder(context, name)) for name in sorted(set(stage.teachers.values()))}
    losses = [loss, *([ImitateLoss(scale=stage.observations)] if stage.observations else [])]
    return TrainPlan(losses=losses, total_steps=stage.steps, overrides=stage.train, teachers=teachers)
