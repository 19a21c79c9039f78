"""Command-line arguments for a recipe, and its config."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparring.recipe.run_config import RunConfig


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add `RECIPE`, `--set` and `--name` to a parser."""
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="A.B=VALUE",
        action="append",
        default=[],
        help="replace one key of the recipe; the value is TOML; may be repeated",
    )
    parser.add_argument("--name", help="the run's name, in place of the recipe's")


def load_recipe(args: argparse.Namespace) -> RunConfig:
    """Return the config from the arguments of `add_recipe`, resolved for this machine."""
    from sparring.recipe.load import load
    from sparring.recipe.run_config import resolve

    # as a TOML string, so that a name like `3` stays text
    named = [f"run.name={json.dumps(args.name, ensure_ascii=False)}"] if args.name is not None else []
    return resolve(load(args.recipe, [*args.overrides, *named]))
