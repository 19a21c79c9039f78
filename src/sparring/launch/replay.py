"""One recorded rollout of a run, sampled again under the weights that made it."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sparring.cluster.inline import InlineCluster
from sparring.config import RunConfig, load
from sparring.errors import refusal
from sparring.model.hub import local_folder
from sparring.rollout.replay import replay
from sparring.stages.context import ORDER, POLICY
from sparring.store.sqlite import SqliteStore
from sparring.types import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """Whether every bit came back, and the finding in words."""

    identical: bool
    lines: list[str]


async def replay_recorded(folder: Path, rollout_id: str) -> Replayed:
    """Sample `rollout_id` of the run in `folder` again, alone.

    Raises:
        BadInput: there is no such run or rollout, or the weights of its version are not kept.
    """
    config = load(folder / "config.toml")
    store = SqliteStore(folder / "store.sqlite", read_only=True)
    try:
        rollout = store.load(rollout_id)
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
                report = await replay(_from_zero(rollout), cluster.engine(POLICY, path=str(weights)))
            finally:
                await cluster.close()
    finally:
        store.close()
    lines = [f"{rollout_id}: {report.turns} turns, {report.tokens} tokens sampled again under version {version_of(rollout)}"]
    if report.difference is not None:
        found = report.difference
        lines.append(f"segment {found.segment}, position {found.position}: {found.what} {found.expected} -> {found.got}")
    return Replayed(identical=report.identical, lines=lines)


def version_of(rollout: Rollout) -> int:
    """The one weight version that sampled a rollout.

    Raises:
        BadInput: several did.
    """
    versions = {
        version
        for trajectory in rollout.trajectories
        for segment in trajectory.segments
        if segment.versions is not None
        for version in segment.versions.values
    }
    if len(versions) != 1:
        raise refusal(rollout.id, "one weight version", f"{sorted(versions)}", "pick a rollout of one version")
    return versions.pop()


def _weights(config: RunConfig, folder: Path, store: SqliteStore, rollout: Rollout, made: Path) -> Path:
    """A folder with the weights of the rollout's version: a stage's output, or its input with a checkpoint's tensors."""
    stage, _, rest = rollout.id.partition("/")
    version = version_of(rollout)
    if stage == "eval":
        label = rest.partition("/")[0]
        return folder / ("rl" if label == "no_tool" else label) / "model"
    before = [s for s in ORDER[: ORDER.index(stage)] if store.get(f"stage/{s}") is not None and s != "eval"]
    given = config.models[POLICY].path
    source = local_folder(given) if given and before[-1] == "init" else folder / before[-1] / "model"
    if version == 0:
        return source
    tensors = folder / stage / "checkpoints" / f"step-{version:06d}" / "model.safetensors"
    if not tensors.is_file():
        kept = sorted(int(p.name[5:]) for p in (folder / stage / "checkpoints").glob("step-??????"))
        raise refusal(rollout.id, f"the checkpoint of version {version}", f"versions {kept}", "pick a rollout of one of those")
    from safetensors.torch import load_file

    from sparring.model.save import save

    shutil.rmtree(made / "model", ignore_errors=True)
    save(load_file(tensors), str(source), str(made / "model"))
    return made / "model"


def _from_zero(rollout: Rollout) -> Rollout:
    """The rollout as if its weights were an engine's first: version 0, which is what a fresh engine serves."""
    from dataclasses import replace

    from sparring.types import Runs

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
