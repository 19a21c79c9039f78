"""`sparring VERB ...`: parses the command line and turns errors into messages and exit codes.

Exit codes: 0 done, 1 it failed while running, 2 the input or the machine is refused, 75 ended by SIGTERM or SIGUSR1
(`run` and `eval`; the same command resumes), 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NoReturn

from sparring.allocator import share_freed_memory
from sparring.cli import (
    chat,
    check,
    convert,
    diff,
    eval,
    export,
    gateway,
    replay,
    report,
    run,
    sandbox,
    serve,
    show,
    try_,
)
from sparring.errors import BadInput, SparringError
from sparring.observe.terminal import guard_terminal, printable, say

if TYPE_CHECKING:
    from sparring.launch.interrupts import Ending

CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of a path that this user cannot open, or that names no file."""

YOUNG_OBJECTS = 50_000
"""Number of new objects that starts a garbage collection of the youngest generation; Python's default is 700. Imports
make two million permanent objects, and collections that walked them took a third of the start-up time."""

VERBS = (run, check, eval, export, convert, chat, serve, gateway, try_, sandbox, replay, diff, show, report)


REFUSALS = (
    (r"the following arguments are required: (.+)", r"expected \1, got nothing"),
    (r"unrecognized arguments: (.+)", r"expected no more arguments, got \1"),
    (r"argument (\S+): invalid choice: (.+) \(choose from (.+)\)", r"argument \1: expected one of \3, got \2"),
    (r"argument (\S+): invalid (\w+) value: (.+)", r"argument \1: expected a value of type \2, got \3"),
    (r"argument (\S+): expected one argument", r"argument \1: expected a value, got nothing"),
)
"""Messages of argparse, as patterns, each with its wording as a refusal."""


class _Parser(argparse.ArgumentParser):
    """Parser whose errors say what is wrong and where help is, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        for pattern, refused in REFUSALS:
            message = re.sub(f"^{pattern}$", refused, message)
        self.exit(2, printable(f"{self.prog}: {message}; see {self.prog} --help\n"))


class _Version(argparse.Action):
    """Option that prints the versions of Sparring, Python and the packages that affect numerical results."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version  # 30 ms that no other start needs

        packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "renderers"))
        say(f"sparring {version('sparring')} (Python {platform.python_version()}, {packages})")
        parser.exit(0)


def parser() -> argparse.ArgumentParser:
    """Return the whole command line."""
    top = _Parser(
        prog="sparring",
        description="Train language-model agents with reinforcement learning.",
        epilog="sparring VERB --help says more about a verb.",
    )
    top.add_argument("--version", action=_Version, help="print the versions that a report of a bug needs, and leave")
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=_Parser)
    for verb in VERBS:
        verb.add(verbs)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. `argv`: arguments after the program's name; None uses those of the
    process."""
    if argv is None:  # this process is the program
        gc.set_threshold(YOUNG_OBJECTS)
        share_freed_memory()
        guard_terminal()
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    return guarded(lambda: args.run(args), f"sparring {shlex.join(arguments)}")


def guarded(verb: Callable[[], int], command: str, ending: Ending | None = None) -> int:
    """Call `verb` and return its exit code. An interrupt, a signal that ends a resumable command, a full disk, a path
    that cannot be opened or an error of Sparring becomes a message on stderr and an exit code; a closed output pipe
    becomes exit code 1. Any other exception is raised.

    Args:
        command: command line of the user, quoted in the advice of error messages.
        ending: handler of the signals that end `run` and `eval`; None makes one.
    """
    from sparring.disk import shortage  # not for --help, and while files can be opened
    from sparring.launch.interrupts import STATUS, Ending
    from sparring.observe.wait_reports import telling_waits

    ending = ending or Ending()
    resumes = command.startswith(("sparring run ", "sparring eval "))
    goes_on = f"; the same command goes on where it stopped: {command}" if resumes else ""
    try:
        with telling_waits(), ending.listening() if resumes else nullcontext():
            return verb()
    except BadInput as error:
        return _say(str(error), 2)
    except KeyboardInterrupt as interrupt:
        during = f" while waiting for {interrupt}" if str(interrupt) else ""
        if ending.came is not None:
            return _say(f"\nended by {ending.came.name}{during}{goes_on}", STATUS)
        return _say(f"\ninterrupted{during}{goes_on}", 130)
    except BrokenPipeError:
        # whoever read our output has left; keep the interpreter from complaining about it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        lacking = shortage(error)
        if isinstance(error, OSError) and error.errno in CLOSED and error.filename is not None:
            shortfall, advice = lacking or (
                error.strerror,
                "check the path, and whether this user may read and write it",
            )
            return _say(f"{error.filename}: expected a path that can be opened, got {shortfall}; {advice}", 2)
        if lacking is not None:
            again = f"{lacking[1]}, then the same command goes on, nothing is lost: {command}"
            shortfall = f"{lacking[0]} ({str(error).partition(';')[0]})"
            return _say(f"disk: expected room to write, got {shortfall}; {again}", 2)
        if isinstance(error, SparringError):
            # a system may signal every process of a job, so that a part has ended before it could be closed
            ended = "" if ending.came is None else f"\nended by {ending.came.name}{goes_on}"
            return _say(f"{type(error).__name__}: {error}{ended}", STATUS if ended else 1)
        raise


def _say(message: str, code: int) -> int:
    say(message, stream=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
