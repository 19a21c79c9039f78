"""The process that checks texts for `workers`: one JSON object a line in, one out, until its input ends.

A check has a limit of processor time, so that a busy machine takes nothing from an answer. When it is over, a signal
stops the check; where that is stuck in code that hears no signals, the kernel ends the process soon after.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

import msgspec

from sparring.envs.rubrics.config import Part
from sparring.envs.rubrics.text import Text, worth
from sparring.errors import JudgeError, boundary

MEMORY_BYTES = 4 << 30
GRACE_S = 1.0
"""Processor time between the signal that stops a check and the one that ends the process."""


class TimeIsUp(BaseException):
    """The check's processor time is over. Not an `Exception`, so that no library takes it for its own."""


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, which closes the input
    signal.signal(signal.SIGPROF, _stop)
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    part: Text = msgspec.convert(request["part"], Part)
    try:
        with boundary(JudgeError, "check"):
            if request["completion"] is None:
                return {"unread": _unread(part, request["target"])}
            _ready(part, request["target"])
            _limit(part.time_limit_s)
            value = worth(part, request["completion"], request["target"])
            _limit(0)
        return {"value": value}
    except (TimeIsUp, MemoryError, RecursionError):
        return {"value": 0.0, "unread": "more than its time or memory allows"}
    except JudgeError as error:
        return {"error": str(error)}
    finally:
        _limit(0)


def _ready(part: Text, target: Any) -> None:
    """Do what costs time and is not the answer's doing."""
    if part.__struct_config__.tag == "math":
        from sparring.envs.rubrics.mathematics import right

        for option in target:
            right(option)


def _unread(part: Text, target: str) -> str:
    from sparring.envs.rubrics.mathematics import unread

    _limit(part.time_limit_s)
    return unread(target)


def _limit(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds + GRACE_S if seconds else 0)  # SIGVTALRM, which ends the process


def _stop(number: int, frame: Any) -> None:
    raise TimeIsUp


if __name__ == "__main__":
    main()
