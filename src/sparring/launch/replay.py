"""Replay of a recorded run, of some of its steps, or of one rollout: samples and trains them again from the log, and
compares every bit (law 8)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from sparring.cluster.config import ClusterConfig
from sparring.errors import BadInput, refusal
from sparring.launch.checkpoint import CONFIG, STORE, recorded_run
from sparring.launch.interrupts import block
from sparring.launch.run import cluster_of, opened
from sparring.model.peft import is_adapter
from sparring.protocols import Engine
from sparring.recipe.run_config import RunConfig, dump
from sparring.rollout.group_log import GroupLog
from sparring.rollout.resample import RecordedTurn, Resampling, resample, turns_of
from sparring.scratch import scratch
from sparring.stages.context import ONLINE_STAGES, POLICY, Context, Replay, RunFiles, renderer_of
from sparring.stages.models.adapters import START
from sparring.stages.models.weight_files import write_weights
from sparring.stages.pipeline import STAGES
from sparring.stages.runtime.versions import OtherWeights
from sparring.store.connection import copy_store
from sparring.types import Rollout, WeightRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Steps of a live stage that are replayed.

    Attributes:
        start: step of the checkpoint that training starts from; 0 is the stage's input.
        first: first step whose rollouts are sampled again.
        last: last step that is sampled again and trained.
        rollout: id of the only rollout to sample again; None samples the rollouts of all steps.
    """

    stage: str
    start: int
    first: int
    last: int
    rollout: str | None = None


@dataclass(kw_only=True, slots=True)
class ReplayResult:
    """Result of a replay: whether every bit equals the record, and a report for the user."""

    identical: bool = True
    lines: list[str] = field(default_factory=list)


def replay_run(
    folder: Path,
    *,
    stage: str | None = None,
    steps: tuple[int | None, int | None] = (None, None),
    sampling: bool = True,
    threads: int | None = None,
) -> ReplayResult:
    """Replay the recorded steps of a run in a copy of its folder. Every token, every log-probability and the weights of
    every step are compared with the record.

    Args:
        stage: name of a live stage; None replays each one that has published weights.
        steps: first and last step; None is the first or last of the stage.
        sampling: whether the turns are sampled again. If not, the steps are trained again from the recorded turns.
        threads: number of CPU threads instead of `[run] threads`.

    Raises:
        BadInput: the run, stage or step does not exist, or its engine cannot sample the same tokens again.
    """
    result = ReplayResult()
    with _exact_run(folder, threads) as run:
        for name in [stage] if stage is not None else ONLINE_STAGES:
            if stage is None and not GroupLog(run.store, name).last_published(0):
                continue
            block(_replay_steps(run, _steps(run, name, steps, sampling), sampling, result))
            if not result.identical:
                return result
    if not result.lines:
        without = f"a run of {', '.join(run.config.run.stages)} that has published no weights"
        raise refusal(str(folder), f"a run with steps of {' or '.join(ONLINE_STAGES)}", without, "choose another run")
    return result


def replay_rollout(folder: Path, rollout_id: str, threads: int | None = None) -> ReplayResult:
    """Replay one recorded rollout under the weights that sampled it. The weights are the stage's input for version 0,
    and the version's checkpoint otherwise. If several versions sampled the rollout, or if the checkpoint is gone, the
    steps that made the weights are trained again.

    Args:
        rollout_id: id of the rollout, as in the report.
        threads: number of CPU threads instead of `[run] threads`.

    Raises:
        BadInput: the run or rollout does not exist, or its weights can neither be read nor trained again.
    """
    result = ReplayResult()
    with scratch() as made, _exact_run(folder, threads) as run:
        rollout = run.store.load(rollout_id)
        turns = list(turns_of([rollout], POLICY))
        if not turns:
            unsampled = f"no sampled token ({rollout.outcome.kind})"
            raise refusal(rollout_id, "a rollout that the policy sampled", unsampled, "choose another")
        versions = set[int]().union(*(turn.versions for turn in turns))
        weights = _weights(run, rollout_id, versions, made)
        if weights is None:
            block(_replay_steps(run, _steps_to(run, rollout_id, versions), True, result))
        else:
            block(_replay_alone(run.config, weights, rollout_id, turns, result))
    models = {t.role: {segment.model for segment in t.segments} - {None} for t in rollout.trajectories}
    others = [role for role, names in models.items() if names and POLICY not in names]
    result.lines += [f"role {role}: another model than the policy spoke; it is not sampled again" for role in others]
    return result


async def _replay_alone(
    config: RunConfig, weights: Path, rollout_id: str, turns: Sequence[RecordedTurn], result: ReplayResult
) -> None:
    """Sample the turns of a rollout again, on an engine with the weights that sampled them, which are of one
    version."""
    cluster = cluster_of(config)
    try:
        engine = cluster.engine(POLICY, path=str(weights))
        report = await resample([turn.under(0) for turn in turns], engine, renderer_of(config, weights))
    finally:
        await cluster.close()
    done = f"{report.turns} turns, {report.tokens} tokens sampled again under version {max(turns[0].versions)}"
    result.lines += [f"{rollout_id}: {done}", *([str(report.difference)] if report.difference else [])]
    result.identical = report.identical


@contextmanager
def _exact_run(folder: Path, threads: int | None) -> Iterator[RunFiles]:
    """Open a run, and refuse one whose turns cannot be sampled again. Its recipe is changed to an engine in this
    process."""
    with recorded_run(folder, runs_rules=True) as run:
        config = run.config
        if not config.engine.exact:
            other = f'"{config.engine.kind}", which cannot sample the same tokens again from seed and position'
            raise refusal(str(folder), 'a run with engine.kind = "native"', other, "choose such a run")
        section = msgspec.structs.replace(config.run, threads=threads or config.run.threads)
        engine = msgspec.structs.replace(config.engine, kind="native", urls=())
        config = msgspec.structs.replace(config, run=section, engine=engine, cluster=ClusterConfig())
        yield replace(run, config=config)


def _steps(run: RunFiles, stage: str, steps: tuple[int | None, int | None], sampling: bool) -> Steps:
    """Return the steps of a stage to replay; refuse steps that it has not recorded."""
    published = _check_published(run, stage, "steps whose weights were published", 1)
    first, last = 1 if steps[0] is None else steps[0], published if steps[1] is None else steps[1]
    if not 1 <= first <= last <= published:
        expected = f"steps from 1 to {published}, which {run.folder} has recorded"
        raise refusal("--steps", expected, f"{first}:{last}", "choose among them")
    needed = max(0, first - 1 - (run.config.rollout.max_lag if sampling else 0))  # oldest weights of step `first`
    return Steps(stage=stage, start=_last_saved(run, stage, needed), first=first, last=last)


def _last_saved(run: RunFiles, stage: str, step: int) -> int:
    """Return the step of the last checkpoint up to a step; 0 if there is none."""
    return max((ref.step for ref in run.store.checkpoints(stage) if ref.step <= step), default=0)


def _check_published(run: RunFiles, stage: str, expected: str, least: int) -> int:
    """Return the last step of a stage whose weights were published; refuse a step before `least`."""
    published = GroupLog(run.store, stage).last_published(0)
    if stage not in ONLINE_STAGES or published < least:
        offline = f"{stage}, which trains nothing that it samples"
        found = f"{published} published steps" if stage in ONLINE_STAGES else offline
        raise refusal(f"{run.folder}, stage {stage}", expected, found, "choose another stage or rollout")
    return published


def _steps_to(run: RunFiles, rollout: str, versions: set[int]) -> Steps:
    """Return the steps that trained all versions which sampled a rollout, from the last checkpoint before these
    versions."""
    stage, last = rollout.partition("/")[0], max(versions)
    _check_published(run, stage, f"weights of version {last}", last)
    start = _last_saved(run, stage, min(versions))
    return Steps(stage=stage, start=start, first=start + 1, last=last, rollout=rollout)


def _copy(run: RunFiles, stage: str, made: Path) -> RunConfig:
    """Copy the files of a run's folder that a replay of a stage changes, link the others, and return a recipe for the
    copy, with which nothing is reported, saved or evaluated."""
    config, copy = run.config, made / run.config.run.name
    copy.mkdir()
    for entry in run.folder.iterdir():
        if entry.is_dir() and entry.name != stage:
            (copy / entry.name).symlink_to(entry.absolute())
    copy_store(run.folder / STORE, copy / STORE)
    changed = msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, directory=str(made)),
        eval=msgspec.structs.replace(config.eval, every=0),
        observe=msgspec.structs.replace(config.observe, sinks=(), progress="off"),
    )
    (copy / CONFIG).write_text(dump(changed), encoding="utf-8")
    return changed


async def _replay_steps(run: RunFiles, steps: Steps, sampling: bool, result: ReplayResult) -> None:
    """Replay the steps of one stage in a copy of the run, and add the report to the result."""
    with scratch() as made:
        async with opened(_copy(run, steps.stage, made)) as context:
            context.store.truncate(steps.stage, steps.start)
            updates = ReplayedUpdates(context, steps, sampling)
            try:
                await STAGES[steps.stage](replace(context, replay=Replay(last_step=steps.last, updates=updates.serve)))
                await updates.finish()
            except OtherWeights as error:
                result.identical = False
                result.lines.append(str(error))
                with suppress(Differs):
                    await updates.finish()
            except Differs:
                pass
            except BadInput as error:
                raise BadInput(str(error).replace(str(context.folder), str(run.folder))) from error
            finally:
                updates.stop()
            updates.report(result)


class Differs(Exception):
    """End of a replay whose sampled bits differ from the recorded ones."""


class ReplayedUpdates:
    """Weight updates of an engine that only samples recorded turns. An update waits until all recorded turns of the
    version before are sampled again; meanwhile the next step is trained. Without `sampling`, the steps are trained from
    the recorded turns alone. Implements `loop.ServesWeights`."""

    _engine: Engine

    def __init__(self, context: Context, steps: Steps, sampling: bool) -> None:
        self._context, self._steps, self._sampling = context, steps, sampling
        self._next_step = steps.first
        self._resampling: Resampling | None = None
        self._under: asyncio.Task[None] | None = None

    def serve(self, engine: Engine, source: Path) -> ReplayedUpdates:
        """Set the engine of the policy, which serves the checkpoint `source`; the stage calls it before training."""
        self._engine = engine
        if self._sampling:
            self._resampling = Resampling(engine, renderer_of(self._context.config, source))
        return self

    async def pull(self, ref: WeightRef) -> None:
        """Serve published weights, after the turns of the version before were compared."""
        await self.finish()
        await self._engine.pull(ref)
        self._under = asyncio.get_running_loop().create_task(self._sample())

    async def finish(self) -> None:
        """Wait until the turns of the served version were compared.

        Raises:
            Differs: a bit differs from the record.
        """
        await (self._under or self._sample())
        if self._resampling is not None and self._resampling.difference is not None:
            raise Differs

    def stop(self) -> None:
        """Cancel the running requests."""
        if self._under is not None:
            self._under.cancel()
        if self._resampling is not None:
            self._resampling.stop()

    async def _sample(self) -> None:
        if self._resampling is not None:
            version = self._engine.version
            self._resampling.add(turns_of(self._rollouts(version), POLICY))
            await self._resampling.under(version)

    def _rollouts(self, version: int) -> Iterator[Rollout]:
        """Yield the recorded rollouts of the next steps, up to the last step that `version` may have sampled for."""
        store, steps = self._context.store, self._steps
        if steps.rollout is not None:
            if version == steps.start:
                yield store.load(steps.rollout)
            return
        last = min(steps.last, version + 1 + self._context.config.rollout.max_lag)
        first, self._next_step = self._next_step, max(self._next_step, last + 1)
        size = getattr(self._context.config, steps.stage).groups_per_step
        for group in (
            store.groups(stage=steps.stage, first=(first - 1) * size, end=last * size) if first <= last else ()
        ):
            yield from (*group.rollouts, *group.failed)

    def report(self, result: ReplayResult) -> None:
        """Add to the result the number of replayed turns, the first difference, and the steps whose weights are
        identical."""
        done, steps = self._resampling, self._steps
        if done is not None:
            across = f", {done.across} of them across versions" if done.across else ""
            result.lines.append(f"{steps.stage}: {done.turns} turns{across}, {done.tokens} tokens sampled again")
            if done.crowded:
                advice = "the cache is too small; raise engine.kv.tokens"
                result.lines.append(f"{done.crowded} turns not compared: {advice}")
            if done.difference is not None:
                result.lines.append(str(done.difference))
            result.identical = result.identical and done.difference is None and not done.crowded
        if result.identical:
            after = f" from the checkpoint of step {steps.start}" if steps.start else ""
            weights = f"weights of steps {steps.start + 1} to {steps.last} are the recorded ones{after}"
            result.lines.append(f"{steps.stage}: {weights}")


def _weights(run: RunFiles, rollout: str, versions: set[int], made: Path) -> Path | None:
    """Return a folder with the weights that sampled a rollout: a stage's output, or its input with the tensors of a
    checkpoint. Return None if several versions sampled the rollout, or if their checkpoint is gone."""
    stage, _, rest = rollout.partition("/")
    if stage == "eval":
        label, _, number = rest.partition("/")
        if not number:  # a run of `sparring eval`; its recipe names the checkpoint
            return run.output("init")
        evaluated = [stage for stage in run.config.eval.checkpoints if run.done(stage) is not None]
        return run.output(evaluated[-1] if label == "no_tool" else label)
    source = run.output(run.before(stage) or "init")
    if run.config.models[POLICY].lora is not None and not is_adapter(source):
        source = run.folder / START
    if versions == {0}:
        return source
    file = run.folder / stage / "checkpoints" / f"step-{max(versions):06d}" / "model.safetensors"
    if len(versions) > 1 or not file.is_file():
        return None
    from safetensors.torch import load_file

    write_weights(load_file(file), source, made / "model")
    return made / "model"
