"""Replay of a recorded run, of some of its steps, or of one rollout: sampled and trained again from the log, and
compared bit by bit (law 8)."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from sparring.cluster.inline import InlineCluster
from sparring.errors import BadInput, refusal
from sparring.launch.block import block
from sparring.launch.checkpoint import CONFIG, STORE
from sparring.launch.run import opened
from sparring.model.peft import is_adapter
from sparring.protocols import Engine
from sparring.recipe.load import load_recorded
from sparring.recipe.run_config import RunConfig, dump
from sparring.rollout.group_log import GroupLog
from sparring.rollout.resample import RecordedTurn, Resampling, resample, turns_of
from sparring.stages.context import ONLINE_STAGES, POLICY, Context, Replay, RunFiles, renderer_of
from sparring.stages.models.adapters import start_adapter
from sparring.stages.models.written import write_weights
from sparring.stages.pipeline import STAGES
from sparring.stages.runtime.versions import OtherWeights
from sparring.store.copy import copy_store
from sparring.store.sqlite import SqliteStore
from sparring.types import Rollout, WeightRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Steps of a live stage that are replayed.

    Attributes:
        stage: name of the stage.
        start: step after which the training begins: that of a checkpoint, or 0, the stage's input.
        first: first step whose rollouts are sampled again.
        last: last step that is sampled again and trained.
        rollout: id of the only rollout that is sampled again, by versions up to `last`; None: all of these steps.
    """

    stage: str
    start: int
    first: int
    last: int
    rollout: str | None = None


@dataclass(kw_only=True, slots=True)
class Replayed:
    """Result of a replay: true if every bit came back, and the report in words."""

    identical: bool = True
    lines: list[str] = field(default_factory=list)


def replay_run(
    folder: Path,
    *,
    stage: str | None = None,
    steps: tuple[int | None, int | None] = (None, None),
    sampling: bool = True,
    threads: int | None = None,
) -> Replayed:
    """Do the recorded steps of a run again, in a copy of it, and compare every token, every log-probability and the
    weights of every step with the record.

    Args:
        folder: of the run, which is not changed.
        stage: a live stage; None is every one that has published weights.
        steps: the first and the last; None is the stage's.
        sampling: sample the turns again; else the steps are trained again from the recorded turns alone.
        threads: in the place of the recipe's `[run] threads`.

    Raises:
        BadInput: there is no such run, stage or step; or its engine cannot sample the same tokens again.
    """
    return block(_replayed_run(folder, stage, steps, sampling, threads))


def replay_rollout(folder: Path, rollout_id: str, threads: int | None = None) -> Replayed:
    """Sample a recorded rollout again, alone, under the weights that sampled it: the checkpoint of that version where
    it is there, else the stage's input (version 0). Weights of which there is no checkpoint, and those of a rollout
    that several versions sampled, are trained again from the run's log.

    Args:
        folder: of the run.
        rollout_id: as the report shows it.
        threads: in the place of the recipe's `[run] threads`.

    Raises:
        BadInput: there is no such run or rollout, or its weights can be had in neither way.
    """
    return block(_replayed_rollout(folder, rollout_id, threads))


async def _replayed_run(
    folder: Path, stage: str | None, steps: tuple[int | None, int | None], sampling: bool, threads: int | None
) -> Replayed:
    config = _recipe(folder)
    result = Replayed()
    for name in [stage] if stage is not None else ONLINE_STAGES:
        with closing(SqliteStore(folder / STORE, read_only=True)) as store:
            if stage is None and not GroupLog(store, name).last_published(0):
                continue
            chosen = _steps(store, config, folder, name, steps, sampling)
        await _replay_steps(config, folder, chosen, sampling, threads, result)
        if not result.identical:
            return result
    if not result.lines:
        got = f"a run of {', '.join(config.run.stages)} that has published no weights"
        raise refusal(str(folder), f"a run with steps of {' or '.join(ONLINE_STAGES)}", got, "choose another run")
    return result


async def _replayed_rollout(folder: Path, rollout_id: str, threads: int | None) -> Replayed:
    config, result = _recipe(folder), Replayed()
    with tempfile.TemporaryDirectory(prefix="sparring-replay-") as made:
        with closing(SqliteStore(folder / STORE, read_only=True)) as store:
            rollout = store.load(rollout_id)
            turns = list(turns_of([rollout], POLICY))
            if not turns:
                got = f"no sampled token ({rollout.outcome.kind})"
                raise refusal(rollout_id, "a rollout that the policy sampled", got, "choose another")
            versions = set[int]().union(*(turn.versions for turn in turns))
            weights = _weights(config, folder, store, rollout_id, versions, Path(made))
            steps = None if weights is not None else _steps_behind(store, folder, rollout_id, versions)
        if steps is not None:
            await _replay_steps(config, folder, steps, True, threads, result)
        elif weights is not None:
            report = await _replay_alone(config, weights, turns, threads)
            done = f"{report.turns} turns, {report.tokens} tokens sampled again under version {max(versions)}"
            result.lines += [f"{rollout_id}: {done}", *([str(report.difference)] if report.difference else [])]
            result.identical = report.identical
    models = {t.role: {segment.model for segment in t.segments} - {None} for t in rollout.trajectories}
    others = [role for role, names in models.items() if names and POLICY not in names]
    result.lines += [f"role {role}: another model than the policy spoke; it is not sampled again" for role in others]
    return result


async def _replay_alone(
    config: RunConfig, weights: Path, turns: Sequence[RecordedTurn], threads: int | None
) -> Resampling:
    """Sample turns of one version again on an engine that does nothing else."""
    cluster = InlineCluster(
        models=config.models,
        train=config.train,
        engine=config.engine,
        device=config.run.device,
        threads=threads or config.run.threads,
    )
    try:
        engine = cluster.engine(POLICY, path=str(weights))
        return await resample([turn.under(0) for turn in turns], engine, renderer_of(config, weights))
    finally:
        await cluster.close()


def _recipe(folder: Path) -> RunConfig:
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
        offline = f"{stage}, which trains nothing that it samples"
        got = f"{published} published steps" if stage in ONLINE_STAGES else offline
        do = "choose another stage or rollout; what was recorded before there was a log has no published steps"
        raise refusal(f"{folder}, stage {stage}", expected, got, do)
    return published


def _steps_behind(store: SqliteStore, folder: Path, rollout: str, versions: set[int]) -> Steps:
    """Return the steps that trained all versions which sampled a rollout of a live stage, from the last checkpoint
    before them.

    Raises:
        BadInput: the run has not recorded how these versions were trained.
    """
    stage, last = rollout.partition("/")[0], max(versions)
    _check_published(store, folder, stage, f"weights of version {last}", last)
    start = max((ref.step for ref in store.checkpoints(stage) if ref.step <= min(versions)), default=0)
    return Steps(stage=stage, start=start, first=start + 1, last=last, rollout=rollout)


def _copy(config: RunConfig, folder: Path, stage: str, made: Path, threads: int | None) -> RunConfig:
    """Copy what a replay of a stage changes of a run's folder, link the rest, and return the recipe for it: nothing
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


async def _replay_steps(
    config: RunConfig, folder: Path, steps: Steps, sampling: bool, threads: int | None, result: Replayed
) -> None:
    """Do the steps of one stage again in a copy of the run, and add what came of it to the result.

    Raises:
        BadInput: something of the run is gone or has changed since.
    """
    with tempfile.TemporaryDirectory(prefix="sparring-replay-") as made:
        async with opened(_copy(config, folder, steps.stage, Path(made), threads)) as context:
            context.store.truncate(steps.stage, steps.start)
            updates: list[ReplayedUpdates] = []

            def serve(engine: Engine, source: Path) -> ReplayedUpdates:
                resampling = Resampling(engine, renderer_of(context.config, source)) if sampling else None
                updates.append(ReplayedUpdates(engine, resampling, RecordedSteps(context, steps)))
                return updates[0]

            try:
                await STAGES[steps.stage](replace(context, replay=Replay(last_step=steps.last, updates=serve)))
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
    """End of a replay that sampled others than the recorded bits."""


class RecordedSteps:
    """Recorded rollouts of some steps.

    Args:
        context: context of the run's copy.
        steps: the steps.
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


class ReplayedUpdates:
    """Updates of an engine that samples nothing but recorded turns. An update waits until all that the version before
    it sampled is sampled again; meanwhile the next step is trained. Implements `loop.ServesWeights`.

    Args:
        engine: engine of the policy.
        resampling: samples turns again on this engine; None: the steps are trained again alone.
        record: recorded rollouts of the steps.
    """

    def __init__(self, engine: Engine, resampling: Resampling | None, record: RecordedSteps) -> None:
        self._engine, self._resampling, self._record = engine, resampling, record
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
        if self._resampling is not None and self._resampling.difference is not None:
            raise Differs

    async def _sample(self) -> None:
        if self._resampling is not None:
            version = self._engine.version
            self._resampling.add(turns_of(self._record.upto(version), POLICY))
            await self._resampling.under(version)

    def stop(self) -> None:
        """Stop what is under way."""
        if self._under is not None:
            self._under.cancel()
        if self._resampling is not None:
            self._resampling.stop()

    def report(self, steps: Steps, result: Replayed) -> None:
        """Add to the result how much was sampled again, or the first difference, and which weights came again."""
        done = self._resampling
        if done is not None:
            across = f", {done.across} of them across versions" if done.across else ""
            result.lines.append(f"{steps.stage}: {done.turns} turns{across}, {done.tokens} tokens sampled again")
            if done.unclear:
                result.lines.append(f"{done.unclear} turns not compared: two versions read their prompt")
            if done.crowded:
                do = "the cache is too small; raise engine.kv_tokens"
                result.lines.append(f"{done.crowded} turns not compared: {do}")
            if done.difference is not None:
                result.lines.append(str(done.difference))
            result.identical = result.identical and done.difference is None and not done.crowded
        if result.identical:
            after = f" from the checkpoint of step {steps.start}" if steps.start else ""
            weights = f"weights of steps {steps.start + 1} to {steps.last} are the recorded ones{after}"
            result.lines.append(f"{steps.stage}: {weights}")


def _weights(
    config: RunConfig, folder: Path, store: SqliteStore, rollout: str, versions: set[int], made: Path
) -> Path | None:
    """Return a folder with the weights that sampled a rollout: a stage's output, or its input with a checkpoint's
    tensors. None where several versions sampled it, or the checkpoint of the one is no longer there."""
    files = RunFiles(config=config, folder=folder, store=store)
    stage, _, rest = rollout.partition("/")
    if stage == "eval":
        label, _, number = rest.partition("/")
        if not number:  # of `sparring eval`, whose recipe names what was evaluated
            return files.output("init")
        tried = [stage for stage in config.eval.checkpoints if files.done(stage) is not None]
        return files.output(tried[-1] if label == "no_tool" else label)
    source = files.output(files.before(stage) or "init")
    if config.models[POLICY].lora is not None and not is_adapter(source):
        source = start_adapter(folder)
    if versions == {0}:
        return source
    file = folder / stage / "checkpoints" / f"step-{max(versions):06d}" / "model.safetensors"
    if len(versions) > 1 or not file.is_file():
        return None
    from safetensors.torch import load_file

    write_weights(load_file(file), source, made / "model")
    return made / "model"
