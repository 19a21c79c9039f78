"""A virtual clock: an event loop that jumps over waiting, so that minutes of latency pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Event loop that moves its clock to the next timer instead of sleeping until then.

    `asyncio.sleep`, timeouts and `loop.time()` all live on the virtual clock. With no timer set it waits for
    input and for other threads as any loop does; work in threads does not hold the clock back.
    """

    def __init__(self) -> None:
        super().__init__(_JumpingSelector())
        self._selector.loop = self  # type: ignore[attr-defined]
        self.now_s = 0.0

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
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
    """Run a coroutine to its end on a virtual clock.

    Returns:
        Its result and the virtual seconds that passed.
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        result = runner.run(main)
        return result, runner.get_loop().time()
