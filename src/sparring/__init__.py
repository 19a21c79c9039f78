"""Sparring trains language-model agents with reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from sparring.recipe.run_config import RunConfig


def run(config: RunConfig) -> Path:
    """Run a recipe from Python: the same as `sparring run`. Also in a notebook, whose event loop waits meanwhile.

    Args:
        config: from `sparring.recipe.load.load("recipes/quickstart.toml")`, or from `sparring.recipe.load.from_data`
            for a dictionary.

    Returns:
        The run's folder, with `summary.json` and the checkpoint in it.

    Raises:
        BadInput: something is wrong that can be known before the work starts.
    """
    import msgspec

    from sparring.errors import refusal
    from sparring.launch.run import run_recipe
    from sparring.recipe.load import from_data
    from sparring.recipe.run_config import RunConfig

    if not isinstance(config, RunConfig):
        do = "load a file with sparring.recipe.load.load, a dictionary with sparring.recipe.load.from_data"
        raise refusal("sparring.run", "a RunConfig", type(config).__name__, do)
    # a struct that was built in Python has not been asked about its types yet
    return run_recipe(from_data(msgspec.to_builtins(config), "sparring.run"))
