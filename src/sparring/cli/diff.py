"""`sparring diff A B`: prints the first event, token or tensor that differs between two runs."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "diff",
        help="name the first event, token or tensor in which two runs part",
        description="Compare two runs in the order of training: what was admitted, sampled, scored, trained and "
        "published, to the bit. Exit status 0: equal; 1: they part.",
    )
    parser.add_argument("first", metavar="A", type=Path, help="the folder of a run, like runs/quickstart")
    parser.add_argument("second", metavar="B", type=Path, help="the folder of another run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare and print the first difference. Return exit code 1 if there is one."""
    from sparring.launch.diff import compare_runs
    from sparring.observe.terminal import say

    compared = compare_runs(args.first, args.second)
    for line in compared.lines:
        say(line)
    say("equal, bit for bit" if compared.equal else "DIFFERENT")
    return 0 if compared.equal else 1
