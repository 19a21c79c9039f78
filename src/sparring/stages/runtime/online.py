"""Online training: a policy is trained on what it has just sampled. The one wiring of `loop.run_loop`, for every such
stage.

    training = OnlineTraining(context, "rl", section, plan)     engine and trainer of the policy
    await training.train(OnlineObjective(...))                  from the last checkpoint to the written model

A stage adds what is its own: its losses (`plan`), and how rollouts become something to learn (`OnlineObjective`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
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
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.scorers.reward_scale import RewardScale
from sparring.rollout.window import Window
from sparring.stages.context import POLICY, Context
from sparring.stages.models.adapters import trained_folder
from sparring.stages.models.reward_scorers import scorers
from sparring.stages.models.role_models import open_role_engines
from sparring.stages.models.written import write_model
from sparring.stages.runtime.checkpoints import Checkpoints, Keeping
from sparring.stages.runtime.garbage import fewer_collections
from sparring.stages.runtime.periodic_evaluation import periodic_evaluator
from sparring.stages.runtime.reports import StepReports
from sparring.stages.runtime.rollouts import rollout_runner
from sparring.stages.runtime.saved import train_of
from sparring.stages.runtime.shown_samples import sample_rows
from sparring.stages.runtime.stopping import Stopping
from sparring.stages.runtime.timing import ENGINE_SPANS, EVAL_SPANS, TRAINER_SPANS, EngineCounters, StepClock
from sparring.stages.runtime.totals import Totals
from sparring.stages.runtime.training_tasks import data_files, domain_metrics
from sparring.stages.runtime.updates import RetriedUpdates
from sparring.stages.runtime.versions import VersionLog
from sparring.tasks.again import LostTasksAgain
from sparring.types import Batch, Group, StepResult


class Stateful(Protocol):
    """Something whose state is saved with every checkpoint."""

    def state(self) -> Mapping[str, Any]:
        """Return what `restore` needs."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; an empty one where the checkpoint is older than the part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineObjective:
    """Objective of a stage: how its rollouts become batches.

    Attributes:
        tasks: source of the tasks that are rolled out.
        annotators: add values to rows, in this order; after them the tokens that tools answered are added where the
            section trains them.
        credit: turns scores into advantages.
        plan: says how an update is made of its groups.
        kept: by name, what a resume needs beside weights and scheduler.
        metrics: reports figures of each step.
        baseline: whether every task is rolled out once more, greedily.
    """

    tasks: TaskSource
    annotators: Sequence[Annotator]
    credit: Credit
    plan: Plan
    kept: Mapping[str, Stateful] = field(default_factory=dict)
    metrics: Callable[[], Mapping[str, float]] = dict
    baseline: bool = False


class OnlineTraining:
    """One stage of live training.

    Args:
        stage: its name.
        section: of the recipe.
        plan: what the policy's trainer is made for.

    Attributes:
        source: the checkpoint folder that the stage starts from.
        engine: of the policy, whose requests are timed.
        trainers: by role, the policy's first; others may be added before `train`, with `add`.
        watch: which group and rollout a row is of.
    """

    def __init__(self, context: Context, stage: str, section: RlConfig | DistillConfig, plan: TrainPlan) -> None:
        self._context, self._stage, self._section = context, stage, section
        self._spans = Spans()
        self.source = trained_folder(context, context.input(stage))
        self._served = context.cluster.engine(POLICY, path=str(self.source))
        self.engine = timed(self._served, self._spans, ENGINE_SPANS)
        self._others = open_role_engines(context)
        self.trainers: dict[str, Trainer] = {}
        self.add(POLICY, context.cluster.trainer(POLICY, path=str(self.source), plan=plan))
        self.watch = SampleProvenance()
        context.sink.start(stage, section.steps)

    def add(self, role: str, trainer: Trainer) -> None:
        """Train another model beside the policy, on the batches of its role."""
        self.trainers[role] = timed(trainer, self._spans, TRAINER_SPANS)

    async def train(self, objective: OnlineObjective) -> dict[str, Any]:
        """Do every update that is left, then write a Hugging Face folder, or an adapter's.

        Returns:
            `Totals` of the whole stage and `model`, the folder.
        """
        context, stage, config = self._context, self._stage, self._context.config
        last_step = self._section.steps if context.repetition is None else context.repetition.last_step
        window = Window(self._section.groups_per_step, config.rollout.max_lag, last_step)
        judges = scorers(context)
        log = GroupLog(context.store, stage, data_files(context))
        scheduler = self._scheduler(objective, window, judges, log)
        checkpoints, stopping = self._checkpoints(self._section.steps), self._stopping()
        self.trainers[POLICY] = VersionLog(context.store, stage).logged(self.trainers[POLICY])
        updates = self._updates()
        kept = {"credit": objective.credit, **objective.kept}
        done, state = await checkpoints.resume()
        trained = self._rewind(log, done)
        totals, metrics_of = Totals(state.get("totals")), dict(context.store.metrics(stage, after=done))
        if done:
            scheduler.restore(state["scheduler"])
            for name, part in kept.items():
                part.restore(state.get(name, {}))
            await updates.pull(await self.trainers[POLICY].push())
        scheduler.resume(trained)
        counters, reports = EngineCounters(self.engine), self._reports()

        async def after_step(step: StepResult, batch: Batch, metrics: Mapping[str, float]) -> None:
            metrics = {**metrics, **scheduler.metrics(), **context.judges.metrics(), **objective.metrics()}
            metrics |= domain_metrics(objective.tasks)
            metrics |= {**counters.lap(), **clock.lap(batch.account.sampled)}
            if step.version in metrics_of:  # trained again: what the first time took is what it took
                metrics = metrics_of.pop(step.version)
            else:
                context.store.metric(stage, step.version, metrics)
            totals.add(batch, metrics)
            reports.log(step.version, metrics)
            states: dict[str, Mapping[str, Any]] = {"scheduler": scheduler.state(step.version)}
            states |= {"totals": totals.as_dict(), **{name: part.state() for name, part in kept.items()}}
            with self._spans.span("saving"):
                await checkpoints.after(step, metrics, states)
            evaluator.after(step.version)
            if await stopping.after(step.version, metrics, evaluator):
                await checkpoints.save_last()

        batches_of = self._batches(objective, stopping.left(range(done + 1, last_step + 1)), log)
        async with self._beside(judges, self._share(scheduler, window), done, trained) as evaluator:
            await stopping.resume(done, evaluator)
            with fewer_collections():
                clock = StepClock(self._spans)
                try:
                    await run_loop(scheduler.groups(), batches_of, self.trainers, {POLICY: updates}, window, after_step)
                except (Outage, WeightsError):
                    await checkpoints.save_last()
                    raise
        if context.repetition is None:
            await write_model(self.trainers[POLICY], self.source, context.output(stage))
        model = {"model": str(context.output(stage))}
        return {**totals.as_dict(), **model, **stopping.result(), **checkpoints.finish()}

    def _share(self, scheduler: Scheduler, window: Window) -> EvalShare:
        config = self._context.config.eval
        most = config.max_concurrent_rollouts
        return EvalShare(scheduler.places, config.share, most, lambda: window.next_index)

    def _stopping(self) -> Stopping:
        context = self._context
        config = self._section.stop if context.repetition is None else None
        return Stopping(config, self._stage, context.store, lambda text: context.sink.event(self._stage, text))

    def _beside(
        self, judges: Sequence[Scorer], share: EvalShare, done: int, trained: int
    ) -> AbstractAsyncContextManager[Evaluator]:
        context, engine = self._context, timed(self._served, self._spans, EVAL_SPANS)
        runner = rollout_runner(context, engine, self.source, self._others)
        return periodic_evaluator(runner, context, judges, share=share, stage=self._stage, done=done, trained=trained)

    def _reports(self) -> StepReports:
        rows = partial(sample_rows, self._context, self._stage, self._section.groups_per_step)
        return StepReports(self._context.sink, self._stage, rows)

    def _updates(self) -> ServesWeights:
        context = self._context
        if context.repetition is not None:
            return context.repetition.updates(self.engine, self.source)
        return RetriedUpdates(self.engine, context.config.engine, lambda text: context.sink.event(self._stage, text))

    def _rewind(self, log: GroupLog, done: int) -> int:
        """Let what the record has after the last step that was published count no longer, and return that step. What a
        store without a log has after the checkpoint, which is of step `done`, is done again; so is all of it where the
        recipe says so."""
        context, first_group = self._context, done * self._section.groups_per_step
        trained = log.last_published(done)
        again = context.config.run.redo == "sample" and context.repetition is None
        if again and trained > done:
            steps = f"steps {done + 1} to {trained}"
            context.sink.event(self._stage, f"{steps} are sampled and trained again: run.redo is sample")
            trained = done
        keeps_groups = not again and log.admission(first_group) is not None
        context.store.truncate(self._stage, trained, first_group=None if keeps_groups else first_group)
        return trained

    def _scheduler(
        self, objective: OnlineObjective, window: Window, judges: Sequence[Scorer], log: GroupLog
    ) -> Scheduler:
        context, engine, others = self._context, self.engine, self._others
        scales = {name: domain.reward_scale for name, domain in context.config.envs.items()}
        runner = rollout_runner(context, engine, self.source, others, rebuilds=True)
        runner.places = Places(context.config.rollout.max_concurrent_rollouts, lambda: engine.metrics)
        runner.waits.spans = self._spans
        return Scheduler(
            runner,
            LostTasksAgain(objective.tasks, context.config.rollout.task_retries),
            window,
            run_seed=context.config.run.seed,
            engine_version=lambda: engine.version,
            scorers=[*judges, *([RewardScale(scales)] if scales else [])],
            baseline=rollout_runner(context, engine, self.source, others, greedy=True) if objective.baseline else None,
            log=log,
        )

    def _batches(
        self, objective: OnlineObjective, steps: Iterable[int], log: GroupLog
    ) -> Callable[[AsyncIterator[Group]], AsyncIterator[Batch]]:
        """Return what makes the batches of `steps` of scored groups, and records which groups each step takes."""

        targets = observation_targets(self.watch, self._section.observations)
        annotators = [*objective.annotators, *targets, self.watch]

        async def batches_of(groups: AsyncIterator[Group]) -> AsyncIterator[Batch]:
            made = batches(
                self.watch.groups(groups),
                steps=steps,
                groups_per_step=self._section.groups_per_step,
                credit=objective.credit,
                model=POLICY,
                annotators=annotators,
                plan=objective.plan,
            )
            async for batch in made:
                if batch.ends_update:
                    log.train(batch.step, batch.groups)
                yield batch

        return batches_of

    def _checkpoints(self, last_step: int) -> Checkpoints:
        context, train = self._context, train_of(self._context.config, self._stage)
        return Checkpoints(
            trainer=self.trainers[POLICY],
            store=context.store,
            stage=self._stage,
            folder=context.folder / self._stage,
            keeping=Keeping.of(context.config, train, last_step, saves=context.repetition is None),
            beside={role: trainer for role, trainer in self.trainers.items() if role != POLICY},
            say=lambda text: context.sink.event(self._stage, text),
        )
