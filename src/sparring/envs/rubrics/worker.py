"""Process that checks texts for `workers`: reads a JSON object per line and writes one per line, until its input ends.

The limit of a check is processor time, so that a busy machine costs no answer its reward. At the limit a signal stops
the check; if the check is stuck in code that ignores the signal, the kernel ends the process soon after.
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
"""Seconds of processor time between the signal that stops a check and the one that ends the process."""


class TimeIsUp(BaseException):
    """End of the check's processor time. Not an `Exception`, so that no library catches it."""


def main() -> None:
    """Answer lines until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the input
    signal.signal(signal.SIGPROF, _stop)
    answers, sys.stdout = sys.stdout, sys.stderr  # keeps prints of libraries out of the answers
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
    """Do slow work that does not depend on the answer, before the time limit starts."""
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
