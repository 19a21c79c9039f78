"""Online training: the policy is trained on what it has just sampled. The only wiring of `loop.run_loop` for such
stages.

    training = OnlineTraining(context, "rl", section, plan)     engine and trainer of the policy
    await training.train(OnlineObjective(...))                  from the last checkpoint to the written model

A stage adds its losses (`plan`) and its `OnlineObjective`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from sparring.algo.annotate.observations import observation_targets
from sparring.algo.annotate.provenance import SampleProvenance
from sparring.batch.batches import Plan, batches
from sparring.errors import Outage, WeightsError
from sparring.loop import ServesWeights, run_loop
from sparring.observe.hooks import timed
from sparring.observe.spans import Spans
from sparring.protocols import Annotator, Credit, Scorer, TaskSource, Trainer, TrainPlan
from sparring.recipe.sections.distill import DistillConfig
from sparring.recipe.sections.rl import RlConfig
from sparring.rollout.evaluator import Evaluator
from sparring.rollout.group_log import GroupLog
from sparring.rollout.load import EvalShare, Places
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.scorers.reward_scale import RewardScale
from sparring.rollout.window import Window
from sparring.stages.context import POLICY, Context
from sparring.stages.models.adapters import trained_folder
from sparring.stages.models.player import open_role_engines
from sparring.stages.models.policy import train_of
from sparring.stages.models.reward_model import scorers
from sparring.stages.models.weight_files import write_model
from sparring.stages.runtime.checkpoints import Checkpoints, Keeping
from sparring.stages.runtime.garbage import fewer_collections
from sparring.stages.runtime.periodic_evaluation import periodic_evaluator
from sparring.stages.runtime.reports import StepReports
from sparring.stages.runtime.rollouts import rollout_runner
from sparring.stages.runtime.sample_table import sample_rows
from sparring.stages.runtime.stopping import Stopping
from sparring.stages.runtime.timing import ENGINE_SPANS, EVAL_SPANS, TRAINER_SPANS, EngineCounters, StepClock
from sparring.stages.runtime.totals import Totals
from sparring.stages.runtime.training_tasks import data_files, domain_metrics
from sparring.stages.runtime.updates import RetriedUpdates
from sparring.stages.runtime.versions import VersionLog
from sparring.tasks.repetition import LostTasksAgain
from sparring.types import Batch, Group, StepResult


class Stateful(Protocol):
    """Part whose state is saved with every checkpoint."""

    def state(self) -> Mapping[str, Any]:
        """Return the state for `restore`."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineObjective:
    """Objective of a stage: how rollouts become batches.

    Attributes:
        tasks: source of the tasks.
        annotators: annotators in the order in which they run. `ObservationTargets` of the section's `observations` runs
            after them.
        credit: rule that turns scores into advantages.
        plan: division of an update into optimiser steps.
        kept: further parts with a state to save, by name.
        metrics: function that returns further metrics of a step.
        baseline: whether every task has a greedy rollout too.
    """

    tasks: TaskSource
    annotators: Sequence[Annotator]
    credit: Credit
    plan: Plan
    kept: Mapping[str, Stateful] = field(default_factory=dict)
    metrics: Callable[[], Mapping[str, float]] = dict
    baseline: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Progress:
    """Progress of a stage: where it continues, and the parts that follow every update.

    Attributes:
        done: steps of the last checkpoint; 0: none.
        published: last step whose weights were published. The steps after `done` up to this one are trained again and
            not sampled again.
        recorded: metrics of steps that are trained again, by step.
        stateful: parts whose state every checkpoint has, by name.
    """

    done: int
    published: int
    recorded: dict[int, Mapping[str, float]]
    stateful: Mapping[str, Stateful]
    totals: Totals
    checkpoints: Checkpoints
    updates: ServesWeights
    stopping: Stopping


class OnlineTraining:
    """Online training of one stage.

    Args:
        plan: settings of the policy's trainer.

    Attributes:
        source: checkpoint folder that the stage starts from.
        engine: engine of the policy, whose requests are timed.
        trainers: trainers by use, the policy's first; `add` adds others before `train`.
        watch: finds the group and the rollout of a row.
    """

    def __init__(self, context: Context, stage: str, section: RlConfig | DistillConfig, plan: TrainPlan) -> None:
        self._context, self._stage, self._section = context, stage, section
        self._spans = Spans()
        self.source = trained_folder(context, context.input(stage))
        self._served = context.cluster.engine(POLICY, path=str(self.source))
        self.engine = timed(self._served, self._spans, ENGINE_SPANS)
        self._others = open_role_engines(context.config, context.cluster)
        self.trainers: dict[str, Trainer] = {}
        self.add(POLICY, context.cluster.trainer(POLICY, path=str(self.source), plan=plan))
        self.watch = SampleProvenance()
        self._last_step = section.steps if context.replay is None else context.replay.last_step
        context.sink.start(stage, section.steps)

    def add(self, use: str, trainer: Trainer) -> None:
        """Add the trainer of another model, which trains on the batches of its use."""
        self.trainers[use] = timed(trainer, self._spans, TRAINER_SPANS)

    async def train(self, objective: OnlineObjective) -> dict[str, Any]:
        """Train the remaining updates, then write a Hugging Face or adapter folder.

        An update is four calls. `loop.run_loop`, in the fourth, runs all updates:

            generate     task -> rollouts: the engine samples, the environment answers and scores
            reward       rollouts of a task -> scored group: scorers see the whole group
            advantage    scored groups of a step -> batch: annotators, then credit
            update       batch -> weights: the trainer steps, the engine serves the new version

        Returns:
            `Totals` of the whole stage and `model`, the folder.
        """
        context, stage = self._context, self._stage
        log = GroupLog(context.store, stage, data_files(context.config))
        window = Window(self._section.groups_per_step, context.config.rollout.max_lag, self._last_step)
        judges = scorers(context)
        runner = self._generate()
        scheduler = self._reward(runner, judges, objective, window, log)
        progress = await self._resume(objective, scheduler, log)
        batches_of = self._advantage(objective, progress, log)
        async with self._evaluator(judges, scheduler, window, progress) as evaluator:
            await progress.stopping.resume(progress.done, evaluator)
            with fewer_collections():
                await self._update(objective, scheduler, batches_of, window, progress, evaluator)
        if context.replay is None:
            await write_model(self.trainers[POLICY], self.source, context.output(stage))
        model = {"model": str(context.output(stage))}
        return {**asdict(progress.totals), **model, **progress.stopping.result(), **progress.checkpoints.finish()}

    def _generate(self) -> RolloutRunner:
        engine, config = self.engine, self._context.config.rollout
        runner = rollout_runner(self._context, engine, self.source, self._others, rebuilds=True)
        runner.places = Places(config.max_concurrent_rollouts, lambda: engine.metrics)
        runner.waits.spans = self._spans
        return runner

    def _reward(
        self, runner: RolloutRunner, judges: Sequence[Scorer], objective: OnlineObjective, window: Window, log: GroupLog
    ) -> Scheduler:
        """Return the scheduler: it plays the tasks that the window admits and has the scorers score each group."""
        context, engine, others = self._context, self.engine, self._others
        scales = {name: domain.reward_scale for name, domain in context.config.envs.items()}
        return Scheduler(
            runner,
            LostTasksAgain(objective.tasks, context.config.rollout.retries.groups),
            window,
            run_seed=context.config.run.seed,
            engine_version=lambda: engine.version,
            scorers=[*judges, *([RewardScale(scales)] if scales else [])],
            baseline=rollout_runner(context, engine, self.source, others, greedy=True) if objective.baseline else None,
            log=log,
        )

    def _advantage(
        self, objective: OnlineObjective, progress: _Progress, log: GroupLog
    ) -> Callable[[AsyncIterator[Group]], AsyncIterator[Batch]]:
        """Return the function that makes the batches of the remaining steps from scored groups, and records which
        groups each step takes."""
        steps = progress.stopping.remaining(range(progress.done + 1, self._last_step + 1))
        targets = observation_targets(self.watch, self._section.observations)
        annotators = [*objective.annotators, *targets, self.watch]

        async def batches_of(groups: AsyncIterator[Group]) -> AsyncIterator[Batch]:
            with_advantages = batches(
                self.watch.groups(groups),
                steps=steps,
                groups_per_step=self._section.groups_per_step,
                credit=objective.credit,
                model=POLICY,
                annotators=annotators,
                plan=objective.plan,
            )
            async for batch in with_advantages:
                if batch.ends_update:
                    log.train(batch.step, batch.groups)
                yield batch

        return batches_of

    async def _update(
        self,
        objective: OnlineObjective,
        scheduler: Scheduler,
        batches_of: Callable[[AsyncIterator[Group]], AsyncIterator[Batch]],
        window: Window,
        progress: _Progress,
        evaluator: Evaluator,
    ) -> None:
        context, stage, checkpoints = self._context, self._stage, progress.checkpoints
        engines, reports = {POLICY: progress.updates}, self._reports()
        counters, clock = EngineCounters(self.engine), StepClock(self._spans)

        async def after_step(step: StepResult, batch: Batch, metrics: Mapping[str, float]) -> None:
            metrics = {**metrics, **scheduler.metrics(), **context.judges.metrics(), **objective.metrics()}
            metrics |= domain_metrics(objective.tasks)
            metrics |= {**counters.lap(), **clock.lap(batch.account.sampled)}
            if step.version in progress.recorded:  # trained again: the first record counts
                metrics = progress.recorded.pop(step.version)
            else:
                context.store.metric(stage, step.version, metrics)
            progress.totals.add(batch, metrics)
            reports.log(step.version, metrics)
            states: dict[str, Mapping[str, Any]] = {name: part.state() for name, part in progress.stateful.items()}
            states |= {"scheduler": scheduler.state(step.version), "totals": asdict(progress.totals)}
            with self._spans.span("saving"):
                await checkpoints.after(step, metrics, states)
            evaluator.after(step.version)
            await self._finished_in_turn(evaluator)
            if await progress.stopping.after(step.version, metrics, evaluator):
                await checkpoints.save_last()

        try:
            await self._finished_in_turn(evaluator)
            await run_loop(scheduler.groups(), batches_of, self.trainers, engines, window, after_step)
        except (Outage, WeightsError):
            await checkpoints.save_last()
            raise

    async def _finished_in_turn(self, evaluator: Evaluator) -> None:
        """Wait for a running evaluation if the engine sleeps while the trainer computes; otherwise the evaluation would
        continue with the next weights."""
        if self._context.config.cluster.colocate:
            await evaluator.finish()

    async def _resume(self, objective: OnlineObjective, scheduler: Scheduler, log: GroupLog) -> _Progress:
        """Restore the last checkpoint, if there is one, and return the progress of the stage."""
        context, stage = self._context, self._stage
        checkpoints, updates = self._checkpoints(), self._updates()
        self.trainers[POLICY] = VersionLog(context.store, stage).logged(self.trainers[POLICY])
        stateful = {"credit": objective.credit, **objective.kept}
        done, state = await checkpoints.resume()
        published = self._rewind(log, done)
        if done:
            scheduler.restore(state["scheduler"])
            for name, part in stateful.items():
                part.restore(state[name])
            await updates.pull(await self.trainers[POLICY].push())
        scheduler.resume(published)
        config = self._section.stop if context.replay is None else None
        return _Progress(
            done=done,
            published=published,
            recorded=dict(context.store.metrics(stage, after=done)),
            stateful=stateful,
            totals=Totals.of(state["totals"]) if done else Totals(),
            checkpoints=checkpoints,
            updates=updates,
            stopping=Stopping(config, stage, context.store, self._say),
        )

    def _evaluator(
        self, judges: Sequence[Scorer], scheduler: Scheduler, window: Window, progress: _Progress
    ) -> AbstractAsyncContextManager[Evaluator]:
        context, config = self._context, self._context.config.eval
        share = EvalShare(scheduler.places, config.share, config.max_concurrent_rollouts, lambda: window.next_index)
        engine = timed(self._served, self._spans, EVAL_SPANS)
        runner = rollout_runner(context, engine, self.source, self._others)
        done, trained = progress.done, progress.published
        return periodic_evaluator(runner, context, judges, share=share, stage=self._stage, done=done, trained=trained)

    def _say(self, text: str) -> None:
        self._context.sink.event(self._stage, text)

    def _reports(self) -> StepReports:
        context, stage = self._context, self._stage
        rows = partial(sample_rows, context.config.observe, context.store, stage, self._section.groups_per_step)
        return StepReports(context.sink, stage, rows)

    def _updates(self) -> ServesWeights:
        context = self._context
        if context.replay is not None:
            return context.replay.updates(self.engine, self.source)
        return RetriedUpdates(self.engine, context.config.engine, self._say)

    def _rewind(self, log: GroupLog, done: int) -> int:
        """Discard the record after the last published step, and return that step. Steps after `done`, the checkpoint's
        step, up to it are trained again without sampling.

        With `run.redo = "sample"`, except in a replay, return `done`: all later steps are sampled again.
        """
        context = self._context
        trained = log.last_published(done)
        again = context.config.run.redo == "sample" and context.replay is None
        if again and trained > done:
            steps = f"steps {done + 1} to {trained}"
            context.sink.event(self._stage, f"{steps} are sampled and trained again: run.redo is sample")
            trained = done
        first_group = done * self._section.groups_per_step if again else None
        context.store.truncate(self._stage, trained, first_group=first_group)
        return trained

    def _checkpoints(self) -> Checkpoints:
        context, train = self._context, train_of(self._context.config, self._stage)
        return Checkpoints(
            trainer=self.trainers[POLICY],
            store=context.store,
            stage=self._stage,
            folder=context.folder / self._stage,
            keeping=Keeping.of(context.config, train, self._section.steps, saves=context.replay is None),
            beside={use: trainer for use, trainer in self.trainers.items() if use != POLICY},
            say=self._say,
        )
