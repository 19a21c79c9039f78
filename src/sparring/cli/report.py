"""`sparring report RUN`: writes a run's page, serves it live, or writes its curves."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "report",
        help="write a run's report.html, or serve it live",
        description="Write RUN/report.html: curves, evaluation, timings and a token-by-token viewer, in one file.",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="the folder of a run, like runs/quickstart")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--serve", action="store_true", help="serve the page, with every rollout and curves that follow the run"
    )
    instead.add_argument("--csv", action="store_true", help="write RUN/curves/STAGE.csv: every metric of every step")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to serve on (a free one)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report or the curves and print their path, or serve the page."""
    from sparring.observe.terminal import say

    if args.serve:
        from sparring.dashboard.live import serve_report

        serve_report(args.folder, args.host, args.port, say)
    elif args.csv:
        from sparring.dashboard.curves import write_curves

        for file in write_curves(args.folder):
            say(str(file))
    else:
        from sparring.dashboard.report import write_report

        say(str(write_report(args.folder)))
    return 0
