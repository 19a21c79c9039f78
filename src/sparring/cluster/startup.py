"""Start of several processes, reported line by line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sparring.log import Report
from sparring.observe.wait_reports import waiting

Ready = Callable[[int, str], None]
"""Function, for any thread, that reports the number of a process that is ready, and where it is."""


@contextmanager
def starting(kind: str, count: int, report: Report, on: int = 0) -> Iterator[Ready]:
    """Report that engines or ranks (`kind`) start, and yield a function that reports each one that is ready, and after
    the last one that all are. `on`: number of nodes, 0 for this machine."""
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
