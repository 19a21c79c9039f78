"""`sparring replay RUN [ROLLOUT]`: replays a recorded run, some of its steps, or one rollout, and compares bit by
bit."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "replay",
        help="do a recorded run or rollout again and compare bit by bit",
        description="Do the recorded steps of a run again from its log, in a copy of it: sample every turn under the "
        "weights that sampled it, train every step, and compare every token, log-probability and weight. With ROLLOUT, "
        "sample that one again.",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="the folder of a run, like runs/quickstart")
    parser.add_argument("rollout", metavar="ROLLOUT", nargs="?", help="the id of a rollout, as the report shows it")
    parser.add_argument("--stage", metavar="NAME", help="rl or distill; without it, each of them that the run has")
    parser.add_argument("--steps", metavar="A:B", type=_steps, default=(None, None), help="from step A to step B")
    parser.add_argument("--no-sampling", action="store_true", help="train again from the recorded turns alone")
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads, in the place of the recipe's")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay and print the comparison. Return exit code 1 if a bit differs.

    Raises:
        BadInput: the run, stage, step or rollout does not exist.
    """
    from sparring.errors import refusal
    from sparring.launch.replay import replay_rollout, replay_run
    from sparring.observe.terminal import say

    if args.rollout is not None and (args.stage or args.no_sampling or args.steps != (None, None)):
        options = "--stage, --steps and --no-sampling"
        raise refusal("sparring replay", f"either ROLLOUT or {options}", "both", "leave one out")
    if args.threads is not None and args.threads < 1:
        raise refusal("--threads", "at least 1", str(args.threads), "raise it, or leave it out")
    if args.rollout is None:
        result = replay_run(
            args.folder,
            stage=args.stage,
            steps=args.steps,
            sampling=not args.no_sampling,
            threads=args.threads,
        )
    else:
        result = replay_rollout(args.folder, args.rollout, args.threads)
    for line in result.lines:
        say(line)
    say("identical, bit for bit" if result.identical else "DIFFERENT")
    return 0 if result.identical else 1


def _steps(text: str) -> tuple[int | None, int | None]:
    """Parse `A:B` as first and last step; A or B may be missing, and a number alone is one step."""
    first, colon, last = text.partition(":")
    try:
        bounds = int(first) if first else None, int(last) if last else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected A:B, two step numbers, got {text!r}") from None
    return bounds if colon else (bounds[0], bounds[0])
