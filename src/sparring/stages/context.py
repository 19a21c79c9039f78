"""Parts of a run that every stage gets, and the files that stages write."""

from __future__ import annotations

import asyncio
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
"""Key in the store: the last sentence of `sparring check` about the run's memory."""
CHOSEN = "memory/token_budget"
"""Key in the store: the sentence about the `train.token_budget` chosen for this machine when the run began."""
ORDER = ("init", "collect", "sft", "preference", "reward_model", "rl", "distill", "eval", "export")
ONLINE_STAGES = ("rl", "distill")
"""Stages in which the policy samples while it is trained, so they publish weights to the engine."""
TRAINING_STAGES = ("sft", "preference", "reward_model", *ONLINE_STAGES)
SERVING_STAGES = (*ONLINE_STAGES, "eval")
"""Stages that sample from the policy."""
PLAYING_STAGES = ("init", "collect", "sft", *SERVING_STAGES)
"""Stages that play the environment; their judges answer until the stage ends."""
NON_POLICY_STAGES = ("collect", "reward_model", "eval")
"""Stages whose output is not the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Replay of recorded steps of an online stage, in a copy of its run.

    Attributes:
        updates: function of the policy's engine and the engine's checkpoint folder; returns the receiver of published
            weights.
    """

    last_step: int
    updates: Callable[[Engine, Path], ServesWeights]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """Recipe, folder and record of a run, with the weights that each stage reads and writes."""

    config: RunConfig
    folder: Path
    store: Store

    def output(self, stage: str) -> Path:
        """Return the Hugging Face or adapter folder that `stage` writes, whether or not it exists yet."""
        start = given_checkpoint(self.config) if stage == "init" else None
        return start or self.folder / stage / "model"

    def input(self, stage: str) -> Path:
        """Return the Hugging Face or adapter folder that `stage` starts from: the output of the nearest finished stage
        before it, or else the checkpoint that the recipe names.

        Raises:
            BadInput: no earlier stage and no checkpoint of the recipe gives weights, or the weights were deleted.
        """
        before = self.before(stage)
        if before is not None:
            weights = self.output(before)
            if not weights.is_dir():
                fix = "restore it from a copy, or start a new run folder (--name)"
                raise refusal(f"stage {stage}", f"the weights that stage {before} wrote", f"no {weights}", fix)
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
        """Return the nearest finished stage before `stage` whose output is the policy; None without one."""
        stages = reversed(ORDER[: ORDER.index(stage)])
        return next((each for each in stages if each not in NON_POLICY_STAGES and self.done(each) is not None), None)

    def done(self, stage: str) -> dict[str, Any] | None:
        """Return the recorded result of a finished stage; None for an unfinished one."""
        return self.store.get(f"stage/{stage}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Context(RunFiles):
    """Parts that all stages of a run share. The code that opened them closes them.

    Attributes:
        box_starts: limit on boxes that start at once, shared by training, baselines and evaluation.
    """

    sink: Sink
    cluster: Cluster
    boxes: Boxes
    box_starts: asyncio.Semaphore
    factory: EnvFactory
    harness: Harness
    judges: Judges
    replay: Replay | None = None


def given_checkpoint(config: RunConfig) -> Path | None:
    """Return the folder of the checkpoint that a recipe starts from, or None for a recipe that makes a fresh model."""
    spec = config.models[POLICY]
    return None if spec.path is None else model_folder(spec)


def renderer_of(config: RunConfig, path: Path, model: str = POLICY) -> Renderer:
    """Load the renderer of a checkpoint folder, for an adapter of its base, with the recipe's settings of `model`."""
    from sparring.render.load import load_renderer

    spec, render = config.models[model], config.render
    return load_renderer(base_folder(path), spec.renderer, spec.thinking, render.control_tokens, render.thoughts)
