"""Sparring trains language-model agents with reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from sparring.config import RunConfig


def run(config: RunConfig) -> Path:
    """Run a recipe from Python: the same as `sparring run`.

    Args:
        config: such as `sparring.config.load("recipes/quickstart.toml")` gives.

    Returns:
        The run's folder, with `summary.json` and the checkpoint in it.

    Raises:
        BadInput: something is wrong that can be known before the work starts.
    """
    from sparring.launch.run import run_recipe

    return run_recipe(config)
