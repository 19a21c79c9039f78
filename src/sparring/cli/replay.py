"""`sparring replay RUN ROLLOUT`: samples one recorded rollout again, alone, and compares bit by bit."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "replay",
        help="sample one recorded rollout again and compare bit by bit",
        description="Sample a recorded rollout again, alone, with the same weights, and compare every token and "
        "log-probability.",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="the folder of a run, like runs/quickstart")
    parser.add_argument("rollout", metavar="ROLLOUT", help="the id of a rollout, as the report shows it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay and print every turn's comparison. Exit code 1 when a bit differs.

    Raises:
        BadInput: there is no such run or rollout.
    """
    from sparring.launch.replay import replay_rollout

    result = replay_rollout(args.folder, args.rollout)
    for line in result.lines:
        print(line)
    print("identical, bit for bit" if result.identical else "DIFFERENT")
    return 0 if result.identical else 1
