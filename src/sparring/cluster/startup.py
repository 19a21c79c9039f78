"""Reports of the start of several processes, line by line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sparring.log import Report
from sparring.observe.wait_reports import waiting

Ready = Callable[[int, str], None]
"""Function of a ready process's number and location, such as its address, to call in any thread."""


@contextmanager
def starting(kind: str, count: int, report: Report, on: int = 0) -> Iterator[Ready]:
    """Report that `count` engines or ranks (`kind`) start, and yield a function to call for each process that is ready.
    After the last one, all are reported ready. `on`: number of nodes, 0 for this machine."""
    begun, missing, one_at_a_time = time.monotonic(), set(range(count)), threading.Lock()
    every = f"{count} {kind}{'s' * (count > 1)}"

    def tell(text: str, **number: int) -> None:
        report(text.format(f"{time.monotonic() - begun:.1f} s"), {"kind": f"{kind} starts", **number})

    def ready(number: int, where: str) -> None:
        with one_at_a_time:
            tell(f"{kind} {number} is ready ({where}, {{}})", **{kind: number})
            missing.discard(number)
            if not missing:
                tell(f"{every} ready after {{}}")

    tell(f"starting {every}{f' on {on} nodes' if on else ''}")
    with waiting(f"{kind}s to start:", lambda: ", ".join(map(str, sorted(missing)))):
        yield ready
