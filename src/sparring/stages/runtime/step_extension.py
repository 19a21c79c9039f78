"""Record of numbers of steps that were raised after a run began; learning-rate schedules keep the first number."""

from __future__ import annotations

from sparring.protocols import Store
from sparring.recipe.run_config import RunConfig


def raises_key(stage: str) -> str:
    """Return the store's key for the raises of a stage, oldest first: number of steps `before` and after (`steps`), and
    `results` of the stages that were finished."""
    return f"raised/{stage}"


def first_steps(store: Store, stage: str, steps: int) -> int:
    """Return the number of steps that the recipe had when the stage first started; it has `steps` now."""
    raises = store.get(raises_key(stage))
    return int(raises[0]["before"]) if raises else steps


def rl_optimiser_steps(config: RunConfig, store: Store) -> int:
    """Return the number of optimiser steps in the schedules of the rl stage."""
    section = config.rl
    return first_steps(store, "rl", section.steps) * section.passes * section.minibatches
