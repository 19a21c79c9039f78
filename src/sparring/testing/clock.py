"""Event loop with a virtual clock, which passes minutes of latency in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Event loop that sets its clock to the next timer instead of sleeping.

    `asyncio.sleep`, timeouts and `loop.time()` read the virtual clock. Without a timer it waits for input and other
    threads like any loop; work in threads does not stop the clock.
    """

    def __init__(self) -> None:
        super().__init__(_JumpingSelector())
        self._selector.loop = self  # type: ignore[attr-defined]
        self.now_s = 0.0

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self.now_s


class _JumpingSelector(selectors.DefaultSelector):
    loop: VirtualClockLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.loop.now_s += timeout
        return ready


def run_virtual(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run a coroutine to its end on a virtual clock; return its result and the virtual seconds that passed."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        result = runner.run(main)
        return result, runner.get_loop().time()
