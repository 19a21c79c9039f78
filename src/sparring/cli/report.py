"""`sparring report RUN`: writes the run's page again, while it runs or after."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "report",
        help="write a run's report.html",
        description="Write RUN/report.html: curves, evaluation, timings and a token-by-token viewer, in one file.",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="the folder of a run, like runs/quickstart")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report and print its path.

    Raises:
        BadInput: the folder holds no run.
    """
    from sparring.dashboard.report import write_report
    from sparring.observe.terminal import say

    say(str(write_report(args.folder)))
    return 0
