"""`KeptEngines`: the engine processes of a fleet, which stay up between stages and are restarted when they die."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from sparring.cluster.engine_process import DeadEngine
from sparring.cluster.startup import Ready
from sparring.errors import EngineError
from sparring.log import Report, log_event

if TYPE_CHECKING:
    from sparring.engine.adapters.remote import RemoteEngine
    from sparring.engine.fleet import Fleet


class PlacedEngine(Protocol):
    """Engine process, wherever it runs."""

    def find(self, within_s: float, last: bool = False) -> str:
        """Wait at most `within_s` seconds until the server answers, and return its address, which may differ after a
        restart.

        Args:
            last: whether no other engine of the run serves. Ranks are then ended if this engine finds no free
                processors.

        Raises:
            DeadEngine: the process is not restarted any more. A process that dies before its first answer is never
                restarted.
            EngineError: the server did not answer in time.
        """

    def kill(self) -> None:
        """Kill the process that `find` found last, unless it was replaced since. A new process is then started."""

    def replied(self) -> None:
        """Reset the count of deaths in a row: the process has answered a request."""

    def close(self) -> None:
        """End the process. Safe to call twice."""


class KeptEngines:
    """Engine processes that serve the fleets of several stages, one after the other. Implements `Keeper`.

    Args:
        words: arguments of `sparring serve`. A later fleet can use the processes again only if its arguments are equal.
        within_s: seconds within which a process has to start.
        dead: called, in any thread, with the error of a process that does not start while no other process serves.
        report: called, in any thread, when a process does not start while others serve.

    Attributes:
        fleet: fleet that uses the processes, or used them last; None before the first fleet.
    """

    def __init__(
        self,
        placed: Sequence[PlacedEngine],
        *,
        key: str,
        words: Sequence[str] = (),
        within_s: float,
        dead: Callable[[EngineError], None],
        report: Report = log_event,
    ) -> None:
        self._placed, self.key, self.words, self._within_s = placed, key, words, within_s
        self._dead, self._report = dead, report
        self._by_url: dict[str, PlacedEngine] = {}
        self._sought: set[PlacedEngine] = set()
        self._told: set[PlacedEngine] = set()  # those that are not started any more, of which the log has a line
        self.fleet: Fleet[RemoteEngine] | None = None

    @property
    def free(self) -> bool:
        """Whether no fleet uses the processes."""
        return self.fleet is None or self.fleet.closed

    @property
    def _serves(self) -> bool:
        return self.fleet is not None and self.fleet.metrics["engines_now"] > 0

    def find(self, ready: Ready = lambda number, url: None) -> list[str]:
        """Wait until all processes answer, and return their addresses. `ready` is called, in any thread, with the
        number and address of each process that answers. Raises EngineError if a process does not start, or does not
        answer in time."""
        deadline = time.monotonic() + self._within_s

        def tell(number: int, process: PlacedEngine) -> None:
            with suppress(EngineError):  # raised below
                ready(number, process.find(self._within_s))

        for number, process in enumerate(self._placed):
            threading.Thread(target=tell, args=(number, process), daemon=True).start()
        self._by_url = {process.find(max(0.0, deadline - time.monotonic())): process for process in self._placed}
        return list(self._by_url)

    def lost(self, engine: RemoteEngine) -> None:
        process = self._by_url[engine.url]
        if process in self._sought:
            return  # it is being started
        self._sought.add(process)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._replace, args=(process, engine, loop), daemon=True).start()

    def replied(self, engine: RemoteEngine) -> None:
        self._by_url[engine.url].replied()

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        for process in self._placed:
            process.close()

    def _replace(self, process: PlacedEngine, engine: RemoteEngine, loop: asyncio.AbstractEventLoop) -> None:
        """Kill a process and wait until its replacement answers; move the client `engine` to a new address."""
        process.kill()
        try:
            url = process.find(self._within_s, last=not self._serves)
        except EngineError as error:
            if not self._serves:
                self._dead(error)  # nothing is left that the run could wait for
            elif not isinstance(error, DeadEngine) or process not in self._told:
                self._report(str(error), {"kind": "engine does not start", "engine": self._placed.index(process)})
                self._told |= {process} if isinstance(error, DeadEngine) else set()
        else:
            if url != engine.url:
                self._by_url[url] = process
                with suppress(RuntimeError):  # the run has ended
                    loop.call_soon_threadsafe(engine.move_to, url)
        finally:
            self._sought.discard(process)


class Ended:
    """Context of a stage's work, which another thread can end with an error."""

    def __init__(self) -> None:
        self._error: EngineError | None = None
        self._end: Callable[[], object] | None = None
        self._lock = threading.Lock()

    def __call__(self, error: EngineError) -> None:
        """Cancel the body of the context; the context then raises `error`. May be called in any thread."""
        with self._lock:
            first, self._error = self._error is None, self._error or error
        if first and self._end is not None:
            self._end()

    @asynccontextmanager
    async def within(self) -> AsyncIterator[None]:
        """Run the context's body. When a thread calls this object with an error, cancel the body and raise the
        error."""
        loop, body = asyncio.get_running_loop(), asyncio.current_task()
        assert body is not None, "a stage runs in a task"
        self._error, self._end = None, lambda: loop.call_soon_threadsafe(body.cancel)
        try:
            yield
        except asyncio.CancelledError:
            if self._error is not None and not body.uncancel():
                raise self._error from None
            raise
        finally:
            self._end = None
