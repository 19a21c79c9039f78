"""Phases of an attempt: timed parts, each with a limit and an error of its own.

    box queue       wait for a place to start a box                  no limit
    worker queue    wait for a worker to claim the rollout           no limit
    box             start of the box                                 timeouts.box_s     SandboxError
    open            opening of the environment                       timeouts.open_s    EnvError
    turn            one reply: queueing, sampling, weight updates    timeouts.turn_s    EngineError
    tool            one `env.step`                                   timeouts.tool_s    ToolHostError
    score           the environment's score                          timeouts.score_s   JudgeError
    close           closing of environment, box and sessions         timeouts.close_s   the error of the part

Between two phases the harness runs, with the limit `timeouts.tool_s` (EnvError). A limit that is hit is a failure of
the infrastructure, whatever the policy did. The policy's own time has a limit of its own, `Limits.timeout_s`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Any, Literal

from sparring.errors import (
    EngineError,
    EnvError,
    InfraError,
    JudgeError,
    PolicyFailure,
    SandboxError,
    ToolHostError,
)
from sparring.observe.spans import Spans
from sparring.reply import Reply, ReplyRequest, ReplyStream, SampledReply, SessionLayer
from sparring.rollout.config import RolloutConfig
from sparring.types import POLICY, Message

Phase = Literal["box queue", "worker queue", "box", "open", "turn", "tool", "score", "close", "harness"]

ERRORS: dict[Phase, type[InfraError]] = {
    "box queue": SandboxError,
    "worker queue": EnvError,
    "box": SandboxError,
    "open": EnvError,
    "turn": EngineError,
    "tool": ToolHostError,
    "score": JudgeError,
    "close": EnvError,
    "harness": EnvError,
}

UNDONE: dict[Phase, str] = {
    "box queue": "no box",
    "worker queue": "no worker",
    "box": "no box",
    "open": "not open",
    "turn": "no reply",
    "tool": "no answer",
    "score": "no score",
    "close": "not closed",
    "harness": "nothing was asked for",
}

ACTIVITIES: dict[Phase, str] = {
    **dict.fromkeys(("box queue", "worker queue", "box", "open", "tool", "close"), "worlds"),
    "score": "judging",
}
"""Activity of `observe.spans` that each phase counts as. The engine times turns itself."""

QUEUES: tuple[Phase, ...] = ("box queue", "worker queue")
"""Phases without a limit."""

EventRecorder = Callable[[str, str, Mapping[str, Any]], None]
"""Callback that records an event of a rollout: its kind (such as `limit`), the rollout's id, and its data."""


def ignore_event(kind: str, rollout_id: str, data: Mapping[str, Any]) -> None:
    """Ignore an event."""


class Wait:
    """Running phase of an attempt; a context manager.

    Attributes:
        rollout_id: id of the attempt.
        detail: called tools, or the part that is closed.
        since: start of the phase, in seconds of the event loop's clock.
    """

    __slots__ = (
        "_cancelled", "_cancels", "_error", "_paused", "_phases", "_task", "detail", "phase", "rollout_id", "since",
        "struck",
    )  # fmt: skip

    def __init__(self, phases: Phases, phase: Phase, detail: str, error: type[InfraError]) -> None:
        self._phases, self._error = phases, error
        self.rollout_id, self.phase, self.detail = phases.rollout_id, phase, detail
        self.since = 0.0
        self.struck = self._cancelled = self._paused = False

    def __str__(self) -> str:
        return f"{self.phase} {self.detail}" if self.detail else self.phase

    def __enter__(self) -> Wait:
        self._phases.begin(self)
        self._enter_task()
        return self

    def _enter_task(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "phases are parts of tasks"
        self._task, self._cancels = task, task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phases.end(self)
        if self.struck:
            others = self._cancelled and self._task.uncancel() > self._cancels
            if kind is not None and not others:
                raise self._phases.strike(self, self._error) from None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Defer the limit: it does not interrupt the body, and takes effect at the body's end."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self._enter_task()
        if self.struck:
            raise TimeoutError  # `__exit__` replaces it with the limit's error

    def cut(self) -> None:
        """Cancel the task because the limit was hit."""
        self.struck = True
        if not self._paused:
            self._cancelled = True
            self._task.cancel()


class Waits:
    """Running phases of all rollouts of one runner. All phases of one kind have the same limit, so one timer per kind,
    for the oldest, is enough."""

    def __init__(self, config: RolloutConfig) -> None:
        self._limits: dict[Phase, float] = {
            phase: math.inf if phase in QUEUES else getattr(config.timeouts, _key(phase)) for phase in ERRORS
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        self._armed: set[Phase] = set()
        self.under_way: dict[Phase, dict[int, Wait]] = {phase: {} for phase in ERRORS}
        self.spans = Spans()

    def limit_s(self, phase: Phase) -> float:
        """Return the limit of a phase, in seconds."""
        return self._limits[phase]

    def begin(self, wait: Wait) -> None:
        """Add a phase that begins."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._armed = loop, set()
        wait.since = loop.time()
        self.under_way[wait.phase][id(wait)] = wait
        if (activity := ACTIVITIES.get(wait.phase)) is not None:
            self.spans.enter(activity)
        if wait.phase not in self._armed and self._limits[wait.phase] < math.inf:
            self._armed.add(wait.phase)
            loop.call_at(wait.since + self._limits[wait.phase], self._cut_overdue, wait.phase, loop)

    def end(self, wait: Wait) -> None:
        """Remove a phase that has ended."""
        begun = self.under_way[wait.phase].pop(id(wait), None)
        if begun is not None and (activity := ACTIVITIES.get(wait.phase)) is not None:
            self.spans.leave(activity)

    def oldest(self) -> Wait | None:
        """Return the phase that has been running for longest, or None if none is running. A phase in a queue is
        returned only if no other is running."""
        first = [wait for waits in self.under_way.values() for wait in [*waits.values()][:1]]  # from any thread
        return min(first, key=lambda wait: (wait.phase in QUEUES, wait.since), default=None)

    def awaited(self) -> str:
        """Return the oldest phase and its limit, in words; empty if none is running. Safe in any thread."""
        wait = self.oldest()
        if wait is None or wait.phase in QUEUES:
            return "" if wait is None else f"({wait})"
        return f"({wait}; rollout.timeouts.{_key(wait.phase)} = {self._limits[wait.phase]:g})"

    def _cut_overdue(self, phase: Phase, loop: asyncio.AbstractEventLoop) -> None:
        """Cut the overdue phases of one kind, and set the timer for the next one."""
        if loop is not self._loop:
            return
        limit_s, now = self._limits[phase], loop.time()
        self._armed.discard(phase)
        for wait in self.under_way[phase].values():
            if wait.since + limit_s > now:
                self._armed.add(phase)
                loop.call_at(wait.since + limit_s, self._cut_overdue, phase, loop)
                break
            if not wait.struck:
                wait.cut()


class Phases:
    """Phases of one attempt, with their time limits.

    Args:
        waits: running phases of the runner, and their limits.

    Attributes:
        struck: error of the first limit that was hit; None if none was. The harness cannot continue after it.
        turns: number of replies that were requested.
    """

    def __init__(self, waits: Waits, *, rollout_id: str = "", recorded: EventRecorder = ignore_event) -> None:
        self._waits = waits
        self.rollout_id = rollout_id
        self._recorded = recorded
        self._active = 0
        self._harness: Wait | None = None
        self.struck: InfraError | None = None
        self.turns = 0

    def within(self, phase: Phase, detail: str = "", *, error: type[InfraError] | None = None) -> Wait:
        """Return the context manager of one phase, which raises an error when the limit is hit. The limit of the phase
        `harness` applies to each interval between two other phases.

        Args:
            detail: called tools, or the part that is closed.
            error: class of the error; None uses the phase's own.

        Raises:
            InfraError: an earlier limit was hit, and this phase would continue the conversation.
        """
        if self.struck is not None and phase in ("open", "turn", "tool"):
            raise self.struck
        return Wait(self, phase, detail, error or ERRORS[phase])

    def begin(self, wait: Wait) -> None:
        """Add a phase that begins; the first one stops the clock of the harness."""
        self._waits.begin(wait)
        if wait.phase == "harness":
            self._harness = wait
            return
        self.turns += wait.phase == "turn"
        self._active += 1
        if self._active == 1 and self._harness is not None:
            self._waits.end(self._harness)

    def end(self, wait: Wait) -> None:
        """Remove a phase that has ended; the last one starts the clock of the harness."""
        self._waits.end(wait)
        if wait.phase == "harness":
            self._harness = None
            return
        self._active -= 1
        if not self._active and self._harness is not None and not self._harness.struck:
            self._waits.begin(self._harness)

    def strike(self, wait: Wait, error: type[InfraError]) -> InfraError:
        """Record a limit that was hit, and return the error for it."""
        limit_s = self._waits.limit_s(wait.phase)
        failure = error(f"{wait}: {UNDONE[wait.phase]} after {limit_s:g} s (rollout.timeouts.{_key(wait.phase)})")
        failure.limit_s = limit_s
        self.struck = self.struck or failure
        data = {"phase": wait.phase, "detail": wait.detail, "turn": self.turns, "seconds": limit_s}
        self._recorded("limit", self.rollout_id, data)
        return failure

    def note(self, kind: str, data: Mapping[str, Any]) -> None:
        """Record another event of the attempt."""
        self._recorded(kind, self.rollout_id, data)


class TurnLimit(SessionLayer):
    """Time limit on every turn of one role."""

    def __init__(self, phases: Phases, role: str) -> None:
        self._phases, self._detail = phases, "" if role == POLICY else role
        self._failed: list[tuple[Sequence[Message], InfraError]] = []

    async def reply(self, request: ReplyRequest, below: Reply) -> ReplyStream:
        """Yield the reply of the layer below, within the limit. The consumer's time between two pieces counts, but the
        consumer is not interrupted: the error is raised when it requests the next piece. Raises EngineError if the
        reply took too long."""
        reply: SampledReply | None = None
        try:
            with self._phases.within("turn", self._detail) as wait:
                async with aclosing(below(request)) as parts:
                    async for part in parts:
                        if isinstance(part, SampledReply):
                            reply = part
                            continue
                        with wait.paused():
                            yield part
        except InfraError as failure:
            self._settle(request.messages)
            self._failed.append((request.messages, failure))
            raise
        except PolicyFailure:
            self._settle(request.messages)
            raise
        self._settle(request.messages)
        if reply is not None:
            yield reply

    @property
    def failure(self) -> InfraError | None:
        """Error of a request that no later retry has answered; the client may have hidden it from the harness."""
        return next((failure for _, failure in self._failed), None)

    def _settle(self, messages: Sequence[Message]) -> None:
        """Forget the earlier errors of a request that was sent again."""
        if self._failed:
            self._failed = [(failed, failure) for failed, failure in self._failed if list(failed) != list(messages)]


def _key(phase: Phase) -> str:
    return "tool_s" if phase == "harness" else f"{phase}_s"
