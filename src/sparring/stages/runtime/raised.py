"""The record of steps that were raised after a run had begun: schedules keep the length that they began with."""

from __future__ import annotations

from sparring.protocols import Store
from sparring.recipe.run_config import RunConfig


def raises_key(stage: str) -> str:
    """Return the key of the store under which the raises of a stage's steps are, oldest first: steps `before`, `steps`
    since, and the `results` of the stages that had been done."""
    return f"raised/{stage}"


def first_steps(store: Store, stage: str, steps: int) -> int:
    """Return the number of steps that a stage was begun with.

    Args:
        stage: whose steps may have been raised.
        steps: of its recipe now.
    """
    raises = store.get(raises_key(stage))
    return int(raises[0]["before"]) if raises else steps


def rl_optimiser_steps(config: RunConfig, store: Store) -> int:
    """Return the optimiser steps that the schedules of the stage rl are made for."""
    section = config.rl
    return first_steps(store, "rl", section.steps) * section.passes * section.minibatches
