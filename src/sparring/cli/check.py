"""`sparring check RECIPE`: finds whatever would stop a run, in seconds."""

from __future__ import annotations

import argparse


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    from sparring.cli.recipe import add_recipe

    parser = subparsers.add_parser(
        "check",
        help="find what is wrong with a recipe or this machine",
        description="Resolve the recipe, estimate memory; open tokenizer, environment, sandbox and model. "
        "Nothing is trained.",
    )
    add_recipe(parser)
    parser.add_argument(
        "--worker",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="COMMAND",
        help="last: a worker that plays what workers will, with {keys}, {url} and {key} in its arguments",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check a recipe and print what was found, one fact per line; return 0."""
    from sparring.cli.recipe import load_recipe
    from sparring.launch.run import check_recipe
    from sparring.observe.terminal import say

    for line in check_recipe(load_recipe(args), args.worker):
        say(line)
    say(f"{args.recipe}: ready to run")
    return 0
