"""The context of a run: the parts that every stage is handed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.envs.rubrics.judges import Judges
from sparring.errors import refusal
from sparring.model.hub import base_folder, model_folder
from sparring.observe.sinks.sink import Sink
from sparring.protocols import Boxes, Cluster, EnvFactory, Harness, Store
from sparring.recipe.run_config import RunConfig
from sparring.types import POLICY as POLICY

if TYPE_CHECKING:
    from sparring.loop import ServesWeights
    from sparring.protocols import Engine, Renderer

MEMORY_WARNING_KEY = "memory"
"""Under this key of the store, what was last said of the run's memory."""
CHOSEN = "memory/token_budget"
"""Under this key of the store, what was said of the `train.token_budget` that the machine chose when the run began."""
ORDER = ("init", "collect", "sft", "preference", "reward_model", "rl", "distill", "eval", "export")
ONLINE_STAGES = ("rl", "distill")
"""Stages that train what they sample, and so publish what they train."""
NON_POLICY_STAGES = ("collect", "reward_model", "eval")
"""Stages whose output is not the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repetition:
    """Repetition of recorded steps of a live stage, in a copy of its run.

    Attributes:
        last_step: steps after it are not repeated.
        updates: makes the part that the loop publishes to, of the policy's engine and the checkpoint folder that it
            serves.
    """

    last_step: int
    updates: Callable[[Engine, Path], ServesWeights]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """Files of a run, by its recipe and its record: which weights a stage begins with, and which it wrote."""

    config: RunConfig
    folder: Path
    store: Store

    def output(self, stage: str) -> Path:
        """Return the Hugging Face or adapter folder that `stage` writes (whether or not it exists yet)."""
        start = given_checkpoint(self.config) if stage == "init" else None
        return start or self.folder / stage / "model"

    def input(self, stage: str) -> Path:
        """Return the Hugging Face or adapter folder that `stage` starts from: what the nearest finished stage before it
        wrote, or the checkpoint that the recipe names.

        Raises:
            BadInput: no stage before it has run, and no checkpoint is named; or what the stage wrote is gone.
        """
        before = self.before(stage)
        if before is not None:
            weights = self.output(before)
            if not weights.is_dir():
                do = "restore it from a copy, or start a new run folder (--name)"
                raise refusal(f"stage {stage}", f"the weights that stage {before} wrote", f"no {weights}", do)
            return weights
        start = given_checkpoint(self.config)
        if start is not None:
            return start
        raise refusal(
            f"stage {stage}",
            "weights to start from",
            "none",
            "set [models.policy] path, or put `init` into [run] stages",
        )

    def before(self, stage: str) -> str | None:
        """Return the nearest finished stage before one whose output is the policy; None where there is none."""
        stages = reversed(ORDER[: ORDER.index(stage)])
        return next((each for each in stages if each not in NON_POLICY_STAGES and self.done(each) is not None), None)

    def done(self, stage: str) -> dict[str, Any] | None:
        """Return the recorded result of a finished stage, or None."""
        return self.store.get(f"stage/{stage}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Context(RunFiles):
    """The parts that all stages of a run share. Whoever made it closes them.

    Attributes:
        repetition: of recorded steps, where a stage runs for that; None where it trains.
    """

    sink: Sink
    cluster: Cluster
    boxes: Boxes
    factory: EnvFactory
    harness: Harness
    judges: Judges
    repetition: Repetition | None = None


def given_checkpoint(config: RunConfig) -> Path | None:
    """Return the folder of the checkpoint that a recipe starts from, or None for a recipe that makes a fresh model.

    Raises:
        BadInput: there is no such checkpoint.
    """
    spec = config.models[POLICY]
    return None if spec.path is None else model_folder(spec)


def renderer_of(config: RunConfig, path: Path, model: str = POLICY) -> Renderer:
    """Load the renderer of a checkpoint folder, or of an adapter's base, with the settings of a model of the recipe."""
    from sparring.render.load import load_renderer

    spec, render = config.models[model], config.render
    return load_renderer(base_folder(path), spec.renderer, spec.thinking, render.control_tokens, render.thoughts)
