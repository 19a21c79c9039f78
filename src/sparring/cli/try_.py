"""`sparring try COMMAND...`: plays an agent program on a scripted policy, without a run or a model."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "try",
        help="play an agent program on a scripted policy, without a run",
        description="Start a program whose model is a script behind the gateway, and print of each of its requests "
        "what a run would make of it. Addresses and keys are in the environment variables of OpenAI's, Anthropic's and "
        "Google's clients. The program runs as it is, in no box.",
    )
    parser.add_argument(
        "--replies", type=Path, metavar="FILE", help="what the policy says, a JSON object a line; docs/agents.md"
    )
    parser.add_argument("--max-turns", type=int, default=40, help="replies that the rollout has")
    parser.add_argument("--context", type=int, default=400_000, help="ids of a prompt and its reply together")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which the program is killed")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the program and its arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Play the program.

    Raises:
        BadInput: the command or program is missing, or the replies or a limit are invalid.
    """
    from sparring.errors import refusal
    from sparring.launch.scripted_replies import read_replies
    from sparring.launch.trial import ProgramTrial, try_program
    from sparring.observe.terminal import say

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise refusal("COMMAND", "a program and its arguments", "nothing", "name it: sparring try python agent.py")
    for name, least in (("max_turns", 1), ("context", 2)):
        if getattr(args, name) < least:
            option = f"--{name.replace('_', '-')}"
            raise refusal(option, f"at least {least}", str(getattr(args, name)), "raise it")
    if not args.timeout > 0:
        raise refusal("--timeout", "more than 0 seconds", str(args.timeout), "raise it")
    trial = ProgramTrial(
        command=command,
        replies=read_replies(args.replies) if args.replies is not None else (),
        max_turns=args.max_turns,
        max_context=args.context,
        timeout_s=args.timeout,
    )
    return 0 if try_program(trial, say) else 1
