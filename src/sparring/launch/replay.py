"""One recorded rollout of a run, sampled again under the weights that made it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from sparring.cluster.inline import InlineCluster
from sparring.errors import refusal
from sparring.launch.block import block
from sparring.launch.checkpoint import STORE
from sparring.launch.repeat import Repeated, read_recipe, repeat_rollout
from sparring.model.hub import base_folder, model_folder
from sparring.model.peft import is_adapter
from sparring.recipe.run_config import RunConfig
from sparring.render.load import load_renderer
from sparring.rollout.replay import replay
from sparring.stages.context import NON_POLICY_STAGES, ORDER, POLICY
from sparring.stages.models.adapters import start_adapter
from sparring.stages.models.written import write_weights
from sparring.store.sqlite import SqliteStore
from sparring.types import Rollout


def replay_rollout(folder: Path, rollout_id: str, threads: int | None = None) -> Repeated:
    """Sample a recorded rollout again, alone, under the weights that sampled it: the checkpoint of that version where
    it is there, else the stage's input (version 0). Weights of which there is no checkpoint, and those of a rollout
    that several versions sampled, are trained again from the run's log.

    Args:
        rollout_id: as the report shows it.
        threads: in the place of the recipe's `[run] threads`.

    Raises:
        BadInput: there is no such run or rollout, or its weights can be had in neither way.
    """
    return block(_replayed(folder, rollout_id, threads))


async def _replayed(folder: Path, rollout_id: str, threads: int | None) -> Repeated:
    config = read_recipe(folder)
    store = SqliteStore(folder / STORE, read_only=True)
    try:
        rollout, others = _of_policy(store.load(rollout_id))
        with tempfile.TemporaryDirectory(prefix="sparring-replay-") as made:
            versions = _versions(rollout)
            weights = _weights(config, folder, store, rollout, versions, Path(made))
            if weights is None:
                result = await repeat_rollout(folder, rollout, threads)
            else:
                result = await _alone(config, weights, rollout, threads)
    finally:
        store.close()
    result.lines += [f"role {role}: another model than the policy spoke; it is not sampled again" for role in others]
    return result


async def _alone(config: RunConfig, weights: Path, rollout: Rollout, threads: int | None) -> Repeated:
    """Sample a rollout of one version again, turn by turn, on an engine that does nothing else."""
    cluster = InlineCluster(
        models=config.models,
        train=config.train,
        engine=config.engine,
        device=config.run.device,
        threads=threads or config.run.threads,
    )
    try:
        policy = config.models[POLICY]
        renderer = load_renderer(
            base_folder(weights), policy.renderer, policy.thinking, config.render.control_tokens, config.render.thoughts
        )
        report = await replay(_from_zero(rollout), cluster.engine(POLICY, path=str(weights)), renderer)
    finally:
        await cluster.close()
    (version,) = _versions(rollout)
    done = f"{report.turns} turns, {report.tokens} tokens sampled again under version {version}"
    lines = [f"{rollout.id}: {done}", *([] if report.difference is None else [str(report.difference)])]
    return Repeated(identical=report.identical, lines=lines)


def _of_policy(rollout: Rollout) -> tuple[Rollout, list[str]]:
    """Return the rollout with the trajectories of the policy alone, and the roles of the others."""
    models = {t.role: {s.model for s in t.segments} - {None} for t in rollout.trajectories}
    others = [role for role, names in models.items() if names and POLICY not in names]
    of_policy = tuple(t for t in rollout.trajectories if t.role not in others)
    return replace(rollout, trajectories=of_policy) if of_policy else rollout, others if of_policy else []


def _versions(rollout: Rollout) -> set[int]:
    """Return the weight versions that sampled a rollout.

    Raises:
        BadInput: none did.
    """
    versions = {
        version
        for trajectory in rollout.trajectories
        for segment in trajectory.segments
        if segment.versions is not None
        for version in segment.versions.values
    }
    if not versions:
        got = f"no sampled token ({rollout.outcome.kind})"
        raise refusal(rollout.id, "a rollout that the policy sampled", got, "choose another")
    return versions


def _weights(
    config: RunConfig, folder: Path, store: SqliteStore, rollout: Rollout, versions: set[int], made: Path
) -> Path | None:
    """Return a folder with the weights that sampled a rollout: a stage's output, or its input with a checkpoint's
    tensors. None where several versions sampled it, or the checkpoint of the one is no longer there."""
    stage, _, rest = rollout.id.partition("/")
    if stage == "eval":
        label, _, number = rest.partition("/")
        if not number:  # of `sparring eval`, whose recipe names what was evaluated
            return _output(config, folder, "init")
        tried = [s for s in config.eval.checkpoints if store.get(f"stage/{s}") is not None]
        return _output(config, folder, tried[-1] if label == "no_tool" else label)
    finished = [
        s for s in ORDER[: ORDER.index(stage)] if store.get(f"stage/{s}") is not None and s not in NON_POLICY_STAGES
    ]
    source = _output(config, folder, finished[-1] if finished else "init")
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


def _output(config: RunConfig, folder: Path, stage: str) -> Path:
    """Return the Hugging Face folder that a stage wrote; of init, the checkpoint that the recipe names if it names
    one."""
    spec = config.models[POLICY]
    return model_folder(spec) if stage == "init" and spec.path is not None else folder / stage / "model"


def _from_zero(rollout: Rollout) -> Rollout:
    """Return the rollout as if its weights were an engine's first: version 0, which is what a fresh engine serves."""
    from sparring.generation import Runs

    trajectories = tuple(
        replace(
            trajectory,
            segments=tuple(
                segment if segment.versions is None else replace(segment, versions=Runs.of(0, len(segment.tokens)))
                for segment in trajectory.segments
            ),
        )
        for trajectory in rollout.trajectories
    )
    return replace(rollout, trajectories=trajectories)
