"""`sparring show RUN [GROUP]`: prints rollouts of a run."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "show",
        help="print rollouts of a run as text",
        description="Print the newest scored rollouts of each stage, or GROUP: task, reward, outcome, conversation.",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="the folder of a run, like runs/quickstart")
    parser.add_argument("group", metavar="GROUP", nargs="?", help="the id of a group or rollout, like rl/12 or rl/12/3")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the rollouts."""
    from sparring.dashboard.show import show
    from sparring.observe.terminal import say

    for line in show(args.folder, args.group):
        say(line)
    return 0
