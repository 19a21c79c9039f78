"""On-policy distillation: the policy samples in live rollouts, and teachers say what they would have."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from sparring.algo.annotate.teacher import TeacherRows
from sparring.algo.credit.distilled import Distilled
from sparring.batch.batches import batches
from sparring.errors import refusal
from sparring.loop import run_loop
from sparring.model.hub import base_folder, local_folder
from sparring.observe.spans import Spans
from sparring.protocols import Divergence, Engine, Loss, TrainPlan
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.stages.checkpoints import Checkpoints
from sparring.stages.context import POLICY, Context
from sparring.stages.lora import trained_folder
from sparring.stages.rl import Totals, runner
from sparring.stages.watch import StepClock, WatchedEngine, WatchedTrainer
from sparring.types import Batch, StepResult

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
    teachers = _teachers(context)
    window = Window(stage.groups_per_step, config.rollout.max_lag, stage.steps)
    scheduler = Scheduler(
        runner(context, engine, source),
        context.factory.tasks("train", config.run.seed),
        window,
        run_seed=config.run.seed,
        engine_version=lambda: engine.version,
        stage=STAGE,
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
        steps = batches(
            teachers.watch(groups),
            steps=range(done + 1, stage.steps + 1),
            groups_per_step=stage.groups_per_step,
            annotators=(teachers,),
            credit=Distilled(stage.aggregation),
            model=POLICY,
            store=context.store,
            stage=STAGE,
        )
        await run_loop(steps, {POLICY: trainer}, {POLICY: engine}, window, after_step)
    await write_model(trainer, source, context.output(STAGE))
    return {**totals.as_dict(), "model": str(context.output(STAGE))}


def check_distill(context: Context) -> list[str]:
    """Every teacher is there, reads the student's tokens, and judges the distribution that the student samples from.

    Returns:
        What was found, one sentence each.

    Raises:
        BadInput: it is not so.
    """
    config = context.config
    if STAGE not in config.run.stages:
        return []
    teachers, rollout = config.distill.teachers, config.rollout
    if not teachers:
        raise refusal("distill.teachers", "at least one teacher", "none", 'write { "*" = "teacher" } and [models.teacher]')
    for domain, name in teachers.items():
        if name not in config.models:
            got = f"one of {', '.join(sorted(config.models))}"
            raise refusal(f"distill.teachers.{domain}", f"a model of the recipe, {got}", repr(name), f"add [models.{name}]")
        if config.models[name].path is None:
            raise refusal(f"models.{name}.path", "the checkpoint of a teacher", "none", "name one")
        teacher_folder(context, name)
    changes = {
        "top_p": rollout.top_p < 1,
        "top_k": rollout.top_k > 0,
        "min_p": rollout.min_p > 0,
        "logit_bias": bool(rollout.logit_bias),
        "min_turn_tokens": rollout.min_turn_tokens > 0,
        "constraint": rollout.constraint is not None,
    }
    for key, changed in changes.items():
        if changed:
            expected = "its default while the run distils: a teacher judges its whole distribution, of which this leaves a part"
            raise refusal(f"rollout.{key}", expected, str(getattr(rollout, key)), "leave it out")
    names = ", ".join(f"{name} for {domain}" for domain, name in sorted(teachers.items()))
    return [f"distill: {config.distill.divergence} over {config.distill.over}; teachers: {names}"]


def teacher_folder(context: Context, name: str) -> Path:
    """The checkpoint folder of a teacher, or its adapter's.

    Raises:
        BadInput: there is none, or its tokenizer is not the student's.
    """
    folder = local_folder(str(context.config.models[name].path))
    given = context.given()
    student = given if given is not None else context.output("init")
    if (student / "tokenizer.json").exists() or given is not None:
        if _vocabulary(base_folder(folder)) != _vocabulary(base_folder(student)):
            expected = f"a teacher with the student's tokenizer, that of {student}"
            raise refusal(f"models.{name}.path", expected, f"another in {folder}", "take a student that has the teacher's tokenizer")
    return folder


def _vocabulary(folder: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()


def _teachers(context: Context) -> TeacherRows:
    stage = context.config.distill
    engines: dict[str, Engine] = {}
    if stage.over != "vocabulary":
        for name in sorted(set(stage.teachers.values())):
            engines[name] = context.cluster.engine(name, path=str(teacher_folder(context, name)))
    return TeacherRows(
        stage.teachers,
        engines,
        top_k=stage.top_k if stage.over == "top_k" else 0,
        max_concurrent=stage.max_concurrent_scores,
        retries=stage.retries,
        retry_delay_s=stage.retry_delay_s,
    )


def _plan(context: Context) -> TrainPlan:
    from sparring.algo.loss.distill import DistillLoss, SampledDistillLoss

    stage = context.config.distill
    teachers: dict[str, str] = {}
    loss: Loss
    if stage.over == "token":
        loss = SampledDistillLoss(stage.estimator, ratio_cap=stage.ratio_cap)
    else:
        loss = DistillLoss(Divergence(kind=stage.divergence, over=stage.over, beta=stage.beta))
        if stage.over == "vocabulary":
            teachers = {name: str(teacher_folder(context, name)) for name in sorted(set(stage.teachers.values()))}
    return TrainPlan(losses=[loss], total_steps=stage.steps, overrides=stage.train, teachers=teachers)
