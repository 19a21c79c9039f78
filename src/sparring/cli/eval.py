"""`sparring eval RECIPE CHECKPOINT`: a checkpoint on a recipe's held-out tasks."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction) -> None:
    """Register the verb."""
    from sparring.cli.recipe import add_recipe

    parser = subparsers.add_parser(
        "eval",
        help="evaluate a checkpoint on a recipe's held-out tasks",
        description="Sample a checkpoint on the held-out tasks of a recipe's environment, with 95 % intervals.",
    )
    add_recipe(parser)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a Hugging Face folder")
    parser.add_argument("--tasks", type=int, help="how many, in place of the recipe's [eval] tasks")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print success by dataset.

    Raises:
        BadInput: the recipe or the checkpoint is refused.
    """
    from sparring.cli.checkpoint import find_checkpoint
    from sparring.cli.recipe import load_recipe
    from sparring.cli.result import print_rates
    from sparring.launch.run import evaluate_checkpoint

    if args.tasks is not None:
        args.overrides.append(f"eval.tasks={args.tasks}")
    print_rates(evaluate_checkpoint(load_recipe(args), find_checkpoint(args.checkpoint)))
    return 0
