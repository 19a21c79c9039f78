"""Live training: a policy is trained on what it has just sampled. The one wiring of `loop.run_loop`, for every such
stage.

    live = Live(context, "rl", section, plan)       engine and trainer of the policy, on what the stage starts from
    await live.train(Lesson(...))                   on from the last checkpoint, update by update, to the written model

A stage adds what is its own: its losses (`plan`), and how rollouts become something to learn (`Lesson`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sparring.algo.annotate.observed import observing
from sparring.algo.annotate.watch import Watch
from sparring.batch.batches import Plan, batches
from sparring.harness.chat import ChatHarness
from sparring.loop import run_loop
from sparring.observe.spans import Spans
from sparring.protocols import Annotator, Credit, Engine, Scorer, TaskSource, Trainer, TrainPlan
from sparring.record.recorder import Recorder
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.stages.runtime.periodic_evaluation import evaluated
from sparring.stages.runtime.checkpoints import Checkpoints
from sparring.recipe.sections import DistillConfig, RlConfig
from sparring.stages.context import POLICY, Context
from sparring.stages.export import write_model
from sparring.stages.models.adapters import trained_folder
from sparring.stages.models.reward_scorers import scorers
from sparring.stages.preflight.dimensions import context_room, folder_shape
from sparring.stages.runtime.timing import StepClock, WatchedEngine, WatchedTrainer
from sparring.types import Batch, Group, StepResult, TokenAccount


class Kept(Protocol):
    """Something whose state is saved with every checkpoint; `restore` takes what `state` gave, or nothing where the
    checkpoint is of before there was any."""

    def state(self) -> Mapping[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """How a stage's rollouts become something to learn.

    tasks: what is rolled out. annotators: asked in this order, then the tokens that tools answered are added where the
        section
    trains them. credit: scores into advantages. plan: how an update is made of its groups. kept: what else a resume
    needs, by name. metrics: of each step. baseline: every task is rolled out once more, greedily.
    """

    tasks: TaskSource
    annotators: Sequence[Annotator]
    credit: Credit
    plan: Plan
    kept: Mapping[str, Kept] = field(default_factory=dict)
    metrics: Callable[[], Mapping[str, float]] = dict
    baseline: bool = False


class Live:
    """One stage of live training.

    Args:
        context: of the run.
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
        self.engine = WatchedEngine(self._served, self._spans)
        self.trainers: dict[str, Trainer] = {}
        self.add(POLICY, context.cluster.trainer(POLICY, path=str(self.source), plan=plan))
        self.watch = Watch()
        context.sink.start(stage, section.steps)

    def add(self, role: str, trainer: Trainer) -> None:
        """Train another model beside the policy, on the batches of its role."""
        self.trainers[role] = WatchedTrainer(trainer, self._spans)

    async def train(self, lesson: Lesson) -> dict[str, Any]:
        """Every update that is still to do, then write a Hugging Face folder, or an adapter's.

        Returns:
            `Totals` of the whole stage and `model`, the folder.
        """
        context, stage, config = self._context, self._stage, self._context.config
        window = Window(self._section.groups_per_step, config.rollout.max_lag, self._section.steps)
        judges = scorers(context)
        scheduler = self._scheduler(lesson, window, judges)
        checkpoints = self._checkpoints()
        kept = {"credit": lesson.credit, **lesson.kept}
        done, state = await checkpoints.resume()
        context.store.truncate(stage, done, first_group=done * self._section.groups_per_step)
        totals = Totals(state.get("totals"))
        if done:
            scheduler.restore(state["scheduler"], context.store.groups(stage=stage))
            for name, each in kept.items():
                each.restore(state.get(name, {}))
            await self.engine.pull(await self.trainers[POLICY].push())
        clock = StepClock(self._spans)

        async def after_step(step: StepResult, batch: Batch, metrics: Mapping[str, float]) -> None:
            metrics = {**metrics, **scheduler.metrics(), **context.judges.metrics(), **lesson.metrics()}
            metrics |= {**self.engine.lap(), **clock.lap(batch.account.sampled)}
            totals.add(batch, metrics)
            context.store.metric(stage, step.version, metrics)
            context.sink.log(stage, step.version, metrics)
            states = {"scheduler": scheduler.state(step.version), "totals": totals.as_dict()}
            await checkpoints.after(step, metrics, {**states, **{name: each.state() for name, each in kept.items()}})
            evaluator.after(step.version)

        beside = evaluated(runner(context, self._served, self.source), context, judges, stage=stage, done=done)
        async with beside as evaluator, aclosing(scheduler.groups()) as groups:
            updates = self._updates(groups, lesson, range(done + 1, self._section.steps + 1))
            await run_loop(updates, self.trainers, {POLICY: self.engine}, window, after_step)
        await write_model(self.trainers[POLICY], self.source, context.output(stage))
        return {**totals.as_dict(), "model": str(context.output(stage))}

    def _scheduler(self, lesson: Lesson, window: Window, judges: Sequence[Scorer]) -> Scheduler:
        """What rolls tasks out and scores them."""
        context, engine = self._context, self.engine
        return Scheduler(
            runner(context, engine, self.source),
            lesson.tasks,
            window,
            run_seed=context.config.run.seed,
            engine_version=lambda: engine.version,
            stage=self._stage,
            scorers=judges,
            baseline=runner(context, engine, self.source, greedy=True) if lesson.baseline else None,
        )

    def _updates(self, groups: AsyncIterator[Group], lesson: Lesson, steps: range) -> AsyncIterator[Batch]:
        """The batches of `steps`."""
        return batches(
            self.watch.groups(groups),
            steps=steps,
            groups_per_step=self._section.groups_per_step,
            credit=lesson.credit,
            model=POLICY,
            annotators=[*lesson.annotators, *observing(self.watch, self._section.observations), self.watch],
            store=self._context.store,
            plan=replace(lesson.plan, stage=self._stage),
        )

    def _checkpoints(self) -> Checkpoints:
        """Where the stage saves, and goes on from."""
        context = self._context
        return Checkpoints(
            trainer=self.trainers[POLICY],
            store=context.store,
            stage=self._stage,
            folder=context.folder / self._stage,
            config=msgspec.structs.replace(context.config.train, **self._section.train),
            last_step=self._section.steps,
            beside={role: trainer for role, trainer in self.trainers.items() if role != POLICY},
        )


def runner(context: Context, engine: Engine, model: Path, *, greedy: bool = False) -> RolloutRunner:
    """What runs one rollout of this run's environment on `engine`, which serves the checkpoint folder `model`. A greedy
    one is not kept turn by turn: it is no part of what is trained."""
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


class Totals:
    """What a stage's result says about all its steps; saved with every checkpoint so that a resume loses none. Of these
    `logprob_max_abs_diff` is None where no fresh token was trained."""

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
