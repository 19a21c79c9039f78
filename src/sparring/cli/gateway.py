"""`sparring gateway RUN`: connects external programs with the rollouts of a run."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "gateway",
        help="let programs elsewhere reach the rollouts of a run",
        description="Answer agent programs for the rollouts of a run, in all dialects, until it is over. "
        "The run's process samples and records: this one may be killed and started again at any time.",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the folder of a run with `rollout.gateway.url`")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=9000, help="port to listen on; 0 takes a free one")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until the run is over."""
    from sparring.launch.gateway import serve_gateway
    from sparring.observe.terminal import say

    serve_gateway(args.folder, args.host, args.port, say)
    return 0
