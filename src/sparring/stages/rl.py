"""Reinforcement learning over live multi-turn rollouts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from sparring.algo.annotate.kl import KlCoefficient
from sparring.algo.annotate.observed import observing
from sparring.algo.annotate.watch import Watch
from sparring.batch.batches import Plan, batches
from sparring.config import RunConfig
from sparring.harness.chat import ChatHarness
from sparring.loop import run_loop
from sparring.observe.spans import Spans
from sparring.protocols import Annotator, Credit, Engine, Scorer, Trainer, TrainPlan
from sparring.record.recorder import Recorder
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.stages.annotators import annotators
from sparring.stages.beside import evaluated
from sparring.stages.checkpoints import Checkpoints
from sparring.stages.context import POLICY, Context
from sparring.stages.critic import CRITIC, open_critic, write_critic
from sparring.stages.lora import trained_folder
from sparring.stages.online import credit_chosen, preference_loss
from sparring.stages.reference import reference_beside
from sparring.stages.rewarded import scorers
from sparring.stages.shape import context_room, folder_shape
from sparring.stages.watch import StepClock, WatchedEngine, WatchedTrainer
from sparring.types import Batch, Group, StepResult, TokenAccount

ANNOTATIONS = frozenset({"reference", "value", "baseline", "probability_squares"})
"""What the stage can give a credit rule beside scores and what was recorded."""


async def run(context: Context) -> dict[str, Any]:
    """Train the stage's input and write a Hugging Face folder, or an adapter's.

    Returns:
        The token account, `logprob_max_abs_diff` over the whole stage (None where no fresh token was trained) and `model`, the
        folder; where there is a critic, `critic`, that one's.
    """
    config = context.config
    source = trained_folder(context, context.input("rl"))
    spans = Spans()
    engine = WatchedEngine(served := context.cluster.engine(POLICY, path=str(source)), spans)
    trainer = WatchedTrainer(context.cluster.trainer(POLICY, path=str(source), plan=_plan(context, source)), spans)
    critic = open_critic(context, source)
    beside_it = {} if critic is None else {CRITIC: WatchedTrainer(critic, spans)}
    trainers: dict[str, Trainer] = {POLICY: trainer, **beside_it}
    window = Window(config.rl.groups_per_step, config.rollout.max_lag, config.rl.steps)
    credit = credit_chosen(config)
    scheduler = _scheduler(context, engine, source, window, judges := scorers(context))
    checkpoints = Checkpoints(
        trainer=trainer,
        store=context.store,
        stage="rl",
        folder=context.folder / "rl",
        config=msgspec.structs.replace(config.train, **config.rl.train),
        last_step=config.rl.steps,
        beside=beside_it,
    )
    done, state = await checkpoints.resume()
    context.store.truncate("rl", done, first_group=done * config.rl.groups_per_step)
    totals, coefficient = Totals(state.get("totals")), KlCoefficient(config.algo.adaptive)
    if done:
        coefficient.restore(state.get("kl", {}))
        scheduler.restore(state["scheduler"], context.store.groups(stage="rl"))
        credit.restore(state.get("credit", {}))
        await engine.pull(await trainer.push())
    context.sink.start("rl", config.rl.steps)
    context.sink.event("rl", correction_chosen(config))
    clock = StepClock(spans)
    async def after_step(step: StepResult, batch: Batch, metrics: Mapping[str, float]) -> None:
        metrics = {**metrics, **scheduler.metrics(), **context.judges.metrics(), **coefficient.metrics()}
        metrics |= {**engine.lap(), **clock.lap(batch.account.sampled)}
        totals.add(batch, metrics)
        context.store.metric("rl", step.version, metrics)
        context.sink.log("rl", step.version, metrics)
        kept = {"scheduler": scheduler.state(step.version), "totals": totals.as_dict(), "credit": credit.state()}
        await checkpoints.after(step, metrics, {**kept, "kl": coefficient.state()})
        evaluator.after(step.version)

    beside = evaluated(runner(context, served, source), context, judges, done=done)
    async with beside as evaluator, aclosing(scheduler.groups()) as groups:
        steps = _batches(context, groups, credit, annotators(context, trainers, coefficient), done)
        await run_loop(steps, trainers, {POLICY: engine}, window, after_step)
    from sparring.stages.export import write_model

    await write_model(trainer, source, context.output("rl"))
    result = {**totals.as_dict(), "model": str(context.output("rl"))}
    return result if critic is None else {**result, "critic": await write_critic(context, critic, source)}


def _scheduler(context: Context, engine: Engine, model: Path, window: Window, judges: Sequence[Scorer]) -> Scheduler:
    seed, pools = context.config.run.seed, context.config.rl.pools
    source = context.factory.tasks("train", seed)
    return Scheduler(
        runner(context, engine, model),
        source if pools is None else pools.open(source, seed=seed),
        window,
        run_seed=seed,
        engine_version=lambda: engine.version,
        scorers=judges,
        baseline=runner(context, engine, model, greedy=True) if _wants_baseline(context.config) else None,
    )


def _batches(
    context: Context, groups: AsyncIterator[Group], credit: Credit, asked: Sequence[Annotator], done: int
) -> AsyncIterator[Batch]:
    """The stage's batches after `done` updates."""
    config, watch = context.config, Watch()
    critic = config.rl.critic
    return batches(
        watch.groups(groups),
        steps=range(done + 1, config.rl.steps + 1),
        groups_per_step=config.rl.groups_per_step,
        credit=credit,
        model=POLICY,
        annotators=[*asked, *observing(watch, config.rl.observations), watch],
        store=context.store,
        plan=Plan(
            minibatches=config.rl.minibatches,
            passes=config.rl.passes,
            seed=config.run.seed,
            idle_tokens=config.algo.needs_idle_tokens,
            critic=None if critic is None else CRITIC,
            warmup_steps=0 if critic is None else critic.warmup_steps,
        ),
    )


def _wants_baseline(config: RunConfig) -> bool:
    return config.rl.preference is None and config.algo.reads("baseline")


def runner(context: Context, engine: Engine, model: Path, *, greedy: bool = False) -> RolloutRunner:
    """What runs one rollout of this run's environment on `engine`, which serves the checkpoint folder `model`. A greedy one is
    not kept turn by turn: it is no part of what is trained."""
    sampling = context.config.rollout.sampling()
    recorder = Recorder(
        engine,
        context.renderer(model),
        None if greedy else context.store,
        sampling=replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0) if greedy else sampling,
        model=POLICY,
        max_context=context_room(folder_shape(model), context.config.engine, context.config.models[POLICY].dtype),
    )
    return RolloutRunner(context.factory, context.boxes, recorder, ChatHarness(), context.config.rollout)


def correction_chosen(config: RunConfig) -> str:
    """The correction of a resolved config in words, with what it is for."""
    numerics = config.models[POLICY].numerics
    engine = f"engine {config.engine.kind} in {numerics} numerics"
    exact = config.engine.exact and numerics == "exact"
    agrees = "samples with the trainer's own probabilities" if exact else "does not agree with the trainer to the bit"
    return f"correction {config.algo.correction_rule.in_words()}: {engine} {agrees}"


def _plan(context: Context, source: Path) -> TrainPlan:
    from sparring.algo.loss.imitate import ImitateLoss
    from sparring.algo.loss.policy import PolicyLoss

    config = context.config
    total = config.rl.steps * config.rl.passes * config.rl.minibatches
    loss = preference_loss(config) or PolicyLoss(config.algo)
    imitate = [ImitateLoss(scale=config.rl.observations)] if config.rl.observations else []
    beside = reference_beside(context, source)._asdict()
    return TrainPlan(losses=[loss, *imitate], total_steps=total, overrides=config.rl.train, **beside)


class Totals:
    """What the stage's result says about all its steps; saved with every checkpoint so that a resume loses none."""

    def __init__(self, saved: Mapping[str, Any] | None) -> None:
        saved = saved or {}
        self.account = TokenAccount(**saved.get("account", {}))
        self.logprob_max_abs_diff: float | None = saved.get("logprob_max_abs_diff")
        self.lag_max = float(saved.get("lag_max", 0.0))
        self.overlap_s = float(saved.get("overlap_s", 0.0))
        self.step_s = float(saved.get("step_s", 0.0))
        self.steps = int(saved.get("steps", 0))

    def add(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """One step."""
        self.account += batch.account
        self.logprob_max_abs_diff = _larger(self.logprob_max_abs_diff, metrics.get("logprob_max_abs_diff"))
        self.lag_max = max(self.lag_max, metrics.get("rollout/lag_max", 0.0))
        self.overlap_s += metrics["time/overlap"] * metrics["time/step_s"]
        self.step_s += metrics["time/step_s"]
        self.steps += 1

    def as_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, and the stage's result says."""
        import dataclasses

        return {
            "account": dataclasses.asdict(self.account),
            "logprob_max_abs_diff": self.logprob_max_abs_diff,
            "lag_max": self.lag_max,
            "overlap_s": self.overlap_s,
            "step_s": self.step_s,
            "steps": self.steps,
        }


def _larger(known: float | None, found: float | None) -> float | None:
    """The larger of two, of which None is nothing and NaN is larger than everything."""
    if known is None or found is None:
        return found if known is None else known
    return found if found != found or found > known else known
