"""`sparring run RECIPE`: runs or resumes the whole pipeline."""

from __future__ import annotations

import argparse


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    from sparring.cli.recipe import add_recipe

    parser = subparsers.add_parser(
        "run",
        help="run a recipe; run it again to go on after a stop",
        description="Run the stages of a recipe. A run that was stopped, by Ctrl-C or otherwise, goes on where it was. "
        "SIGTERM and SIGUSR1 end it with exit status 75: send the same command again.",
    )
    add_recipe(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the recipe, print its result and the path of the report."""
    from sparring.cli.recipe import load_recipe
    from sparring.cli.result import print_result
    from sparring.dashboard.report import write_report
    from sparring.launch.run import run_with_earlier
    from sparring.observe.terminal import say

    folder = run_with_earlier(load_recipe(args))
    print_result(folder)
    say(f"report: {write_report(folder)}")
    return 0
