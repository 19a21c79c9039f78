"""Phases of an attempt: which part of the machinery it waits for, since when, and how long it may.

    box     a box is taken                                          box_timeout_s      SandboxError
    open    the environment is made and opened                      open_timeout_s     EnvError
    turn    one reply: queueing, generating, updates of weights     turn_timeout_s     EngineError
    tool    one `env.step`                                          tool_timeout_s     ToolHostError
    score   the environment's score                                 score_timeout_s    JudgeError
    close   environment, box and sessions are closed                close_timeout_s    the error of the part

Between them the harness runs; for as long as nothing is asked, `tool_timeout_s` is its limit (EnvError). A limit that
strikes is the infrastructure's failure, whatever the policy did. The policy's own time is `Limits.timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from sparring.errors import EngineError, EnvError, InfraError, JudgeError, SandboxError, ToolHostError
from sparring.generation import Constraint
from sparring.protocols import Session
from sparring.rollout.config import RolloutConfig
from sparring.types import POLICY, Message, ToolSpec

Phase = Literal["box", "open", "turn", "tool", "score", "close", "harness"]

ERRORS: dict[Phase, type[InfraError]] = {
    "box": SandboxError,
    "open": EnvError,
    "turn": EngineError,
    "tool": ToolHostError,
    "score": JudgeError,
    "close": EnvError,
    "harness": EnvError,
}

UNDONE: dict[Phase, str] = {
    "box": "no box",
    "open": "not open",
    "turn": "no reply",
    "tool": "no answer",
    "score": "no score",
    "close": "not closed",
    "harness": "nothing was asked for",
}

Recorded = Callable[[str, str, Mapping[str, Any]], None]
"""Takes note of an event of a rollout: its kind (`limit`, `abandoned`), the rollout's id, and its data."""


def unrecorded(kind: str, rollout_id: str, data: Mapping[str, Any]) -> None:
    """Take no note of an event."""


@dataclass(slots=True)
class Wait:
    """A phase that is under way: what it waits for, and since when by the clock of the event loop, in seconds."""

    rollout_id: str
    phase: Phase
    detail: str
    since: float

    def __str__(self) -> str:
        return f"{self.phase} {self.detail}" if self.detail else self.phase


@dataclass(slots=True)
class Waits:
    """The phases that are under way in the rollouts of one runner, oldest first."""

    under_way: dict[int, Wait] = field(default_factory=dict)


class Phases:
    """Phases of one attempt under their limits.

    Args:
        config: `[rollout]`, with the limits.
        rollout_id: of the attempt.
        waits: where phases that are under way stand.
        recorded: takes note of each limit that strikes.

    Attributes:
        struck: the error of the first limit that struck; None where none has. A harness cannot outlive it.
        turns: replies that were asked for.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        rollout_id: str = "",
        waits: Waits | None = None,
        recorded: Recorded = unrecorded,
    ) -> None:
        self._config = config
        self._rollout_id = rollout_id
        self._waits = Waits() if waits is None else waits
        self._recorded = recorded
        self._active = 0
        self._between: asyncio.Timeout | None = None
        self._harness: Wait | None = None
        self.struck: InfraError | None = None
        self.turns = 0

    def limit_s(self, phase: Phase) -> float:
        """Return the limit of one phase, in seconds."""
        name = _key(phase)
        limit: float = getattr(self._config, name)
        return limit

    def within(self, phase: Phase, detail: str = "", *, error: type[InfraError] | None = None) -> Within:
        """Return the context of one phase.

        Args:
            phase: which.
            detail: what is waited for: the tools that are called, the part that is closed.
            error: the class of the failure where it is not the phase's own.
        """
        return Within(self, Wait(self._rollout_id, phase, detail, 0.0), error or ERRORS[phase])

    def between(self) -> Between:
        """Return the context of the harness's run, which bounds each time in which it asks for nothing."""
        return Between(self)

    def begin(self, wait: Wait) -> float:
        """Take note that a phase begins; return the time by the event loop's clock."""
        wait.since = asyncio.get_running_loop().time()
        self._waits.under_way[id(wait)] = wait
        if wait.phase == "turn":
            self.turns += 1
        if wait.phase != "harness":
            self._active += 1
            if self._active == 1 and self._between is not None:
                self._between.reschedule(None)
                self._waits.under_way.pop(id(self._harness), None)
        return wait.since

    def end(self, wait: Wait) -> None:
        """Take note that a phase is over."""
        self._waits.under_way.pop(id(wait), None)
        if wait.phase != "harness":
            self._active -= 1
            if not self._active and self._between is not None and self._harness is not None:
                if not self._between.expired():
                    self._between.reschedule(self.begin(self._harness) + self.limit_s("harness"))

    def strike(self, wait: Wait, error: type[InfraError]) -> InfraError:
        """Take note that a limit struck; return the failure that it is."""
        limit_s = self.limit_s(wait.phase)
        failure = error(f"{wait}: {UNDONE[wait.phase]} after {limit_s:g} s (rollout.{_key(wait.phase)})")
        failure.limit_s = limit_s
        self.struck = self.struck or failure
        self._recorded(
            "limit",
            self._rollout_id,
            {"phase": wait.phase, "detail": wait.detail, "turn": self.turns, "seconds": limit_s},
        )
        return failure

    def note(self, kind: str, data: Mapping[str, Any]) -> None:
        """Take note of another event of the attempt."""
        self._recorded(kind, self._rollout_id, data)

    def watch(self, timeout: asyncio.Timeout | None) -> None:
        """Bound what the harness does between two phases by a timeout that is entered; None: no longer."""
        if timeout is None:
            if self._harness is not None:
                self.end(self._harness)
            self._between = self._harness = None
            return
        self._between, self._harness = timeout, Wait(self._rollout_id, "harness", "", 0.0)
        timeout.reschedule(self.begin(self._harness) + self.limit_s("harness"))


class Within:
    """Context of one phase: raises its failure where the limit strikes."""

    __slots__ = ("_error", "_phases", "_timeout", "_wait")

    def __init__(self, phases: Phases, wait: Wait, error: type[InfraError]) -> None:
        self._phases, self._wait, self._error = phases, wait, error

    async def __aenter__(self) -> None:
        if self._phases.struck is not None and self._wait.phase in ("open", "turn", "tool"):
            raise self._phases.struck
        self._timeout = asyncio.timeout(self._phases.limit_s(self._wait.phase))
        await self._timeout.__aenter__()
        self._phases.begin(self._wait)

    async def __aexit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phases.end(self._wait)
        try:
            await self._timeout.__aexit__(kind, cause, trace)
        except TimeoutError:
            pass
        if self._timeout.expired() and kind is not None:
            raise self._phases.strike(self._wait, self._error) from None


class Between:
    """Context of a harness's run: raises EnvError where it asks for nothing for longer than its limit."""

    __slots__ = ("_phases", "_timeout")

    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    async def __aenter__(self) -> None:
        self._timeout = asyncio.timeout(None)
        await self._timeout.__aenter__()
        self._phases.watch(self._timeout)

    async def __aexit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phases.watch(None)
        try:
            await self._timeout.__aexit__(kind, cause, trace)
        except TimeoutError:
            pass
        if self._timeout.expired() and kind is not None:
            raise self._phases.strike(Wait("", "harness", "", 0.0), EnvError) from None


class LimitedSession:
    """A session whose every turn has a limit of time. Implements `protocols.Session`."""

    def __init__(self, session: Session, phases: Phases, role: str) -> None:
        self._session, self._phases, self._role = session, phases, role

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, constraint: Constraint | None = None
    ) -> Message:
        """Ask for the next reply. Raises EngineError where there is none in time, and what the session raises."""
        async with self._phases.within("turn", "" if self._role == POLICY else self._role):
            return await self._session.complete(messages, tools, constraint=constraint)


def _key(phase: Phase) -> str:
    """Return the key of a phase's limit in `[rollout]`."""
    return "tool_timeout_s" if phase == "harness" else f"{phase}_timeout_s"
