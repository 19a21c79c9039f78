"""Recorded steps of a run, done again from its log: the sampling, the training, or both (law 8)."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from sparring.errors import BadInput, refusal
from sparring.launch.block import block
from sparring.launch.checkpoint import CONFIG, STORE
from sparring.launch.run import opened
from sparring.protocols import Engine
from sparring.recipe.load import load_recorded
from sparring.recipe.run_config import RunConfig, dump
from sparring.rollout.group_log import GroupLog
from sparring.rollout.resampling import Resampling, turns_of
from sparring.stages.context import ONLINE_STAGES, POLICY, Context, Repetition, renderer_of
from sparring.stages.runtime.versions import OtherWeights
from sparring.store.copy import copy_store
from sparring.store.sqlite import SqliteStore
from sparring.types import Rollout, WeightRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Steps of a live stage that are done again.

    Attributes:
        stage: its name.
        start: the step after which the training begins: of a checkpoint, or 0, the stage's input.
        first: the first step whose rollouts are sampled again.
        last: the last one of these, and the last one that is trained.
        rollout: the only one that is sampled again, which versions up to `last` sampled; None: all of these steps.
    """

    stage: str
    start: int
    first: int
    last: int
    rollout: str | None = None


@dataclass(kw_only=True, slots=True)
class Repeated:
    """Result of a repetition: true if every bit came back, and the report in words."""

    identical: bool = True
    lines: list[str] = field(default_factory=list)


def repeat_run(
    folder: Path,
    *,
    stage: str | None = None,
    steps: tuple[int | None, int | None] = (None, None),
    sampling: bool = True,
    threads: int | None = None,
) -> Repeated:
    """Do the recorded steps of a run again, in a copy of it, and compare every token, every log-probability and the
    weights of every step with the record.

    Args:
        folder: of the run, which is not changed.
        stage: a live stage; None is every one that has published weights.
        steps: the first and the last; None is the stage's.
        sampling: sample the turns again; else the steps are trained again from the recorded turns alone.
        threads: in the place of the recipe's `[run] threads`.

    Raises:
        BadInput: there is no such run, stage or step; or its engine cannot repeat what it sampled.
    """
    return block(_repeated(folder, stage, steps, sampling, threads))


async def repeat_rollout(folder: Path, rollout: Rollout, threads: int | None = None) -> Repeated:
    """Sample the turns of one rollout of a live stage again under all versions that sampled it, which are trained again
    from the last checkpoint before them.

    Args:
        rollout: as the run's store gives it.
        threads: in the place of the recipe's.

    Raises:
        BadInput: the run has not recorded how these versions were trained.
    """
    config, stage, result = read_recipe(folder), rollout.id.partition("/")[0], Repeated()
    versions = {v for turn in turns_of([rollout], POLICY) for v in turn.recorded.versions.values}
    store = SqliteStore(folder / STORE, read_only=True)
    try:
        _check_published(store, folder, stage, f"weights of version {max(versions)}", max(versions))
        start = max((ref.step for ref in store.checkpoints(stage) if ref.step <= min(versions)), default=0)
    finally:
        store.close()
    steps = Steps(stage=stage, start=start, first=start + 1, last=max(versions), rollout=rollout.id)
    with tempfile.TemporaryDirectory(prefix="sparring-replay-") as made:
        await _repeat(folder, _copy(config, folder, stage, Path(made), threads), steps, True, result)
    return result


async def _repeated(
    folder: Path,
    stage: str | None,
    steps: tuple[int | None, int | None],
    sampling: bool,
    threads: int | None,
) -> Repeated:
    config = read_recipe(folder)
    result = Repeated()
    for name in [stage] if stage is not None else ONLINE_STAGES:
        with tempfile.TemporaryDirectory(prefix="sparring-replay-") as made:
            store = SqliteStore(folder / STORE, read_only=True)
            try:
                if stage is None and not GroupLog(store, name).last_published(0):
                    continue
                chosen = _steps(store, config, folder, name, steps, sampling)
            finally:
                store.close()
            await _repeat(folder, _copy(config, folder, name, Path(made), threads), chosen, sampling, result)
        if not result.identical:
            return result
    if not result.lines:
        got = f"a run of {', '.join(config.run.stages)} that has published no weights"
        raise refusal(str(folder), f"a run with steps of {' or '.join(ONLINE_STAGES)}", got, "choose another run")
    return result


def read_recipe(folder: Path) -> RunConfig:
    """Return the recipe of a run whose turns can be sampled again.

    Raises:
        BadInput: there is no run, or its engine does not sample the same tokens again.
    """
    if not (folder / CONFIG).is_file():
        got = "a folder without config.toml" if folder.is_dir() else "no folder"
        raise refusal(str(folder), "the folder of a run", got, "give one, like runs/quickstart")
    config = load_recorded(folder / CONFIG)
    if not config.engine.exact:
        got = f'"{config.engine.kind}", which cannot sample the same tokens again from seed and position'
        raise refusal(str(folder), 'a run with engine.kind = "native"', got, "choose such a run")
    return config


def _steps(
    store: SqliteStore,
    config: RunConfig,
    folder: Path,
    stage: str,
    steps: tuple[int | None, int | None],
    sampling: bool,
) -> Steps:
    """Return the steps of a stage that are done again.

    Raises:
        BadInput: the stage has not recorded them.
    """
    published = _check_published(store, folder, stage, "steps whose weights were published", 1)
    first, last = 1 if steps[0] is None else steps[0], published if steps[1] is None else steps[1]
    if not 1 <= first <= last <= published:
        got = f"{first}:{last}"
        raise refusal("--steps", f"steps from 1 to {published}, which {folder} has recorded", got, "choose among them")
    needed = max(0, first - 1 - (config.rollout.max_lag if sampling else 0))  # the oldest weights that sampled for it
    starts = [ref.step for ref in store.checkpoints(stage) if ref.step <= needed]
    return Steps(stage=stage, start=max(starts, default=0), first=first, last=last)


def _check_published(store: SqliteStore, folder: Path, stage: str, expected: str, least: int) -> int:
    """Return the last step of a stage whose weights were published.

    Raises:
        BadInput: that is below `least`.
    """
    published = GroupLog(store, stage).last_published(0)
    if stage not in ONLINE_STAGES or published < least:
        got = (
            f"{published} published steps"
            if stage in ONLINE_STAGES
            else f"{stage}, which trains nothing that it samples"
        )
        do = "choose another stage or rollout; what was recorded before there was a log has no published steps"
        raise refusal(f"{folder}, stage {stage}", expected, got, do)
    return published


def _copy(config: RunConfig, folder: Path, stage: str, made: Path, threads: int | None) -> RunConfig:
    """Copy what a repetition of a stage changes of a run's folder, link the rest, and return the recipe for it: nothing
    is reported, saved or evaluated, and the engine is in this process."""
    copy = made / config.run.name
    copy.mkdir()
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != stage:
            (copy / entry.name).symlink_to(entry.absolute())
    copy_store(folder / STORE, copy / STORE)
    run = msgspec.structs.replace(config.run, directory=str(made), threads=threads or config.run.threads)
    changed = msgspec.structs.replace(
        config,
        run=run,
        eval=msgspec.structs.replace(config.eval, every=0),
        engine=msgspec.structs.replace(config.engine, kind="native"),
        observe=msgspec.structs.replace(config.observe, sinks=(), progress="off"),
    )
    (copy / CONFIG).write_text(dump(changed), encoding="utf-8")
    return changed


async def _repeat(folder: Path, config: RunConfig, steps: Steps, sampling: bool, result: Repeated) -> None:
    """Do the steps of one stage again, in the copy of `folder` that `config` is of.

    Raises:
        BadInput: something of the run is gone or has changed since.
    """
    from sparring.stages.pipeline import STAGES

    async with opened(config) as context:
        context.store.truncate(steps.stage, steps.start)
        updates: list[RepeatedUpdates] = []

        def serve(engine: Engine, source: Path) -> RepeatedUpdates:
            if sampling:
                resampling = Resampling(engine, renderer_of(context.config, source))
                updates.append(ResampledUpdates(engine, resampling, RecordedSteps(context, steps)))
            else:
                updates.append(RepeatedUpdates(engine))
            return updates[0]

        try:
            await STAGES[steps.stage](replace(context, repetition=Repetition(last_step=steps.last, updates=serve)))
            await updates[0].finish()
        except OtherWeights as error:
            result.identical = False
            result.lines.append(str(error))
            with suppress(Differs):
                await updates[0].finish()
        except Differs:
            pass
        except BadInput as error:
            raise BadInput(str(error).replace(str(context.folder), str(folder))) from error
        finally:
            for part in updates:
                part.stop()
        updates[0].report(steps, result)


class Differs(Exception):
    """End of a repetition that sampled others than the recorded bits."""


class RecordedSteps:
    """Recorded turns of some steps.

    Args:
        context: of the run's copy.
        steps: of which.
    """

    def __init__(self, context: Context, steps: Steps) -> None:
        section = getattr(context.config, steps.stage)
        self._context, self._steps = context, steps
        self._groups_per_step = section.groups_per_step
        self._next = steps.first

    def upto(self, version: int) -> Iterator[Rollout]:
        """Yield the rollouts of further steps, up to the last one that `version` may have sampled for."""
        if self._steps.rollout is not None:
            if version == self._steps.start:
                yield self._context.store.load(self._steps.rollout)
            return
        end = min(self._steps.last, version + 1 + self._context.config.rollout.max_lag)
        first, self._next = self._next, max(self._next, end + 1)
        bounds = {"first": (first - 1) * self._groups_per_step, "end": end * self._groups_per_step}
        for group in self._context.store.groups(stage=self._steps.stage, **bounds) if first <= end else ():
            yield from (*group.rollouts, *group.failed)


class RepeatedUpdates:
    """Updates of an engine that samples nothing. Implements `loop.ServesWeights`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def pull(self, ref: WeightRef) -> None:
        await self._engine.pull(ref)

    async def finish(self) -> None:
        """Wait for what the last version sampled."""

    def stop(self) -> None:
        """Stop what is under way."""

    def report(self, steps: Steps, result: Repeated) -> None:
        """Add to the result what was done."""
        if result.identical:
            result.lines.append(_weights(steps))


class ResampledUpdates(RepeatedUpdates):
    """Updates of an engine that samples the record again: an update waits until all that the version before it sampled
    is sampled again. Meanwhile the next step is trained.

    Args:
        engine: of the policy.
        resampling: on this engine.
        record: the turns.
    """

    def __init__(self, engine: Engine, resampling: Resampling, record: RecordedSteps) -> None:
        super().__init__(engine)
        self._resampling, self._record = resampling, record
        self._under: asyncio.Task[None] | None = None

    async def pull(self, ref: WeightRef) -> None:
        """Serve published weights once what the version before them sampled is compared.

        Raises:
            Differs: a bit is another one.
        """
        await self.finish()
        await self._engine.pull(ref)
        self._under = asyncio.get_running_loop().create_task(self._sample())

    async def finish(self) -> None:
        """Wait for what the last version sampled.

        Raises:
            Differs: a bit is another one.
        """
        await (self._under or self._sample())
        if self._resampling.difference is not None:
            raise Differs

    async def _sample(self) -> None:
        version = self._engine.version
        rollouts = self._record.upto(version)
        self._resampling.add(turns_of(rollouts, POLICY))
        await self._resampling.under(version)

    def stop(self) -> None:
        if self._under is not None:
            self._under.cancel()
        self._resampling.stop()

    def report(self, steps: Steps, result: Repeated) -> None:
        """Add to the result how much was sampled again, or the first difference."""
        done = self._resampling
        across = f", {done.across} of them across versions" if done.across else ""
        lines = [f"{steps.stage}: {done.turns} turns{across}, {done.tokens} tokens sampled again"]
        if done.unclear:
            lines.append(f"{done.unclear} turns not compared: two versions read their prompt")
        if done.crowded:
            lines.append(f"{done.crowded} turns not compared: the cache is too small; raise engine.kv_tokens")
        if done.difference is not None:
            lines.append(str(done.difference))
        result.identical = result.identical and done.difference is None and not done.crowded
        result.lines += lines
        super().report(steps, result)


def _weights(steps: Steps) -> str:
    after = f" from the checkpoint of step {steps.start}" if steps.start else ""
    return f"{steps.stage}: weights of steps {steps.start + 1} to {steps.last} are the recorded ones{after}"
