"""One recorded rollout of a run, sampled again under the weights that made it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from sparring.cluster.inline import InlineCluster
from sparring.errors import refusal
from sparring.launch.block import block
from sparring.model.hub import base_folder, local_folder
from sparring.model.peft import is_adapter
from sparring.recipe.load import load
from sparring.recipe.run_config import RunConfig
from sparring.render.load import load_renderer
from sparring.rollout.replay import replay
from sparring.stages.context import APART, ORDER, POLICY
from sparring.stages.export import write_weights
from sparring.store.sqlite import SqliteStore
from sparring.types import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """Result of a replay: true if every bit came back, and the report in words."""

    identical: bool
    lines: list[str]


def replay_rollout(folder: Path, rollout_id: str) -> Replayed:
    """Sample a recorded rollout again, alone, under the weights that sampled it: the checkpoint of that version
    where it is kept, else the stage's input (version 0).

    Args:
        folder: of the run.
        rollout_id: as the report shows it.

    Raises:
        BadInput: there is no such run or rollout, or the weights of its version are not kept.
    """
    return block(_replayed(folder, rollout_id))


async def _replayed(folder: Path, rollout_id: str) -> Replayed:
    if not (folder / "config.toml").is_file():
        got = "a folder without config.toml" if folder.is_dir() else "no folder"
        raise refusal(str(folder), "the folder of a run", got, "give one, like runs/quickstart")
    config = load(folder / "config.toml")
    if not config.engine.exact:
        got = f'"{config.engine.kind}", which cannot sample the same tokens again from seed and position'
        raise refusal(str(folder), 'a run with engine.kind = "native"', got, "choose such a run")
    store = SqliteStore(folder / "store.sqlite", read_only=True)
    try:
        rollout, others = _of_policy(store.load(rollout_id))
        with tempfile.TemporaryDirectory() as made:
            weights = _weights(config, folder, store, rollout, Path(made))
            cluster = InlineCluster(
                models=config.models,
                train=config.train,
                engine=config.engine,
                device=config.run.device,
                threads=config.run.threads,
            )
            try:
                policy = config.models[POLICY]
                renderer = load_renderer(
                    base_folder(weights), policy.renderer, policy.thinking, config.render.control_tokens
                )
                report = await replay(_from_zero(rollout), cluster.engine(POLICY, path=str(weights)), renderer)
            finally:
                await cluster.close()
    finally:
        store.close()
    lines = [
        f"{rollout_id}: {report.turns} turns, {report.tokens} tokens sampled again under version {version_of(rollout)}"
    ]
    lines += [f"role {role}: another model than the policy spoke; it is not sampled again" for role in others]
    if report.difference is not None:
        change = report.difference
        lines.append(
            f"segment {change.segment}, position {change.position}: {change.what} {change.expected} -> {change.got}"
        )
    return Replayed(identical=report.identical, lines=lines)


def _of_policy(rollout: Rollout) -> tuple[Rollout, list[str]]:
    """Return the rollout with the trajectories of the policy alone, and the roles of the others."""
    models = {t.role: {s.model for s in t.segments} - {None} for t in rollout.trajectories}
    others = [role for role, names in models.items() if names and POLICY not in names]
    of_policy = tuple(t for t in rollout.trajectories if t.role not in others)
    return replace(rollout, trajectories=of_policy) if of_policy else rollout, others if of_policy else []


def version_of(rollout: Rollout) -> int:
    """Return the one weight version that sampled a rollout.

    Raises:
        BadInput: none or several did.
    """
    versions = {
        version
        for trajectory in rollout.trajectories
        for segment in trajectory.segments
        if segment.versions is not None
        for version in segment.versions.values
    }
    if len(versions) != 1:
        got = f"versions {sorted(versions)}" if versions else f"no sampled token ({rollout.outcome.kind})"
        raise refusal(rollout.id, "a rollout sampled by one weight version", got, "choose another")
    return versions.pop()


def _weights(config: RunConfig, folder: Path, store: SqliteStore, rollout: Rollout, made: Path) -> Path:
    """Return a folder with the weights of the rollout's version: a stage's output, or its input with a checkpoint's
    tensors.

    Raises:
        BadInput: its checkpoint is no longer kept; says which rollouts can be replayed.
    """
    stage, _, rest = rollout.id.partition("/")
    version = version_of(rollout)
    if stage == "eval":
        label, _, number = rest.partition("/")
        if not number:  # of `sparring eval`, whose recipe names what was evaluated
            return _output(config, folder, "init")
        tried = [s for s in config.eval.checkpoints if store.get(f"stage/{s}") is not None]
        return _output(config, folder, tried[-1] if label == "no_tool" else label)
    finished = [s for s in ORDER[: ORDER.index(stage)] if store.get(f"stage/{s}") is not None and s not in APART]
    source = _output(config, folder, finished[-1] if finished else "init")
    if config.models[POLICY].lora is not None and not is_adapter(source):
        source = folder / "lora"
    if version == 0:
        return source
    checkpoints = {
        int(path.parent.name[5:]): path for path in (folder / stage).glob("checkpoints/step-??????/model.safetensors")
    }
    if version not in checkpoints:
        raise refusal(
            rollout.id,
            f"the checkpoint of version {version}, which sampled it",
            f"{'none' if not checkpoints else 'only those of ' + ', '.join(map(str, sorted(checkpoints)))}",
            f"replay {_replayable(store, stage, {0, *checkpoints})}; a run with a higher train.keep_last keeps more",
        )
    from safetensors.torch import load_file

    write_weights(load_file(checkpoints[version]), source, made / "model")
    return made / "model"


def _output(config: RunConfig, folder: Path, stage: str) -> Path:
    """Return the Hugging Face folder that a stage wrote; of init, the checkpoint that the recipe names if it names
    one."""
    start = config.models[POLICY].path
    return local_folder(start) if stage == "init" and start is not None else folder / stage / "model"


def _replayable(store: SqliteStore, stage: str, versions: set[int]) -> str:
    """Return the groups of a stage that these versions sampled, in words."""
    indices = [group.index for group in store.groups(stage=stage) if group.version in versions]
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ", ".join(f"{stage}/{first}/* to {stage}/{last}/*" for first, last in spans) + " or eval/*"


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
