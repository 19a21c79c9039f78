"""`sparring export CHECKPOINT OUT`: writes a plain Hugging Face folder in a given data type."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "export",
        help="write a checkpoint as a plain Hugging Face folder",
        description="Copy a checkpoint, with its tokenizer, to a folder that the transformers library loads. "
        "That of a run gets a chat template that writes the run's prompts.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a Hugging Face folder, a run, or a saved step of it: RUN/rl/best, RUN/rl/last, RUN/rl/step-000146",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write; must not exist")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the weights")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export, report on the chat template, and print the folder.

    Raises:
        BadInput: the checkpoint is invalid, or OUT exists.
    """
    from sparring.errors import refusal
    from sparring.launch.checkpoint import export_checkpoint
    from sparring.observe.terminal import say

    if args.out.exists():
        raise refusal(
            str(args.out), "a folder that does not exist yet", "one that does", "choose another, or remove it"
        )
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal(str(args.out), "a folder that can be made", str(error), "choose another") from error
    for line in export_checkpoint(args.checkpoint, args.out, args.dtype):
        say(line, stream=sys.stderr)
    say(str(args.out))
    return 0
