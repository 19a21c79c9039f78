"""Episode of one attempt, as its harness sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sparring.errors import (
    EngineError,
    EnvError,
    InfraError,
    LimitReached,
    PolicyFailure,
    SandboxError,
    SparringError,
    boundary,
    refusal,
)
from sparring.protocols import Harness, Sandbox, Session
from sparring.record.branches import Transcript
from sparring.record.rewards import OutsideRewards
from sparring.record.session import OpenSession
from sparring.rollout.guarded_env import GuardedEnv
from sparring.rollout.outcomes import ANSWERED, of_silence, outcome_at
from sparring.rollout.phases import TurnLimit
from sparring.types import (
    Outcome,
    Task,
    Timing,
    Trajectory,
)


class SessionRecorder(Protocol):
    """Opener of recorded sessions: `record.Recorder`."""

    def open(self, task: Task, *, rollout_id: str, seed: int, role: str, admission: int) -> OpenSession:
        """Open the session of one role of one rollout."""
        ...


class RunningEpisode:
    """Episode of one attempt at a task: its world, its box and its sessions. A session is opened at the first request
    for its role. Implements `protocols.Episode`.

    Attributes:
        rewards: rewards of the attempt from outside; None if the run takes none.
        ended_by: limit, or failure of the policy, that the harness raised; None if it raised neither.
    """

    def __init__(
        self,
        task: Task,
        env: GuardedEnv,
        recorder: SessionRecorder,
        *,
        rollout_id: str,
        seed: int,
        admission: int = 0,
        rewards: OutsideRewards | None = None,
    ) -> None:
        self.task = task
        self.env = env
        self.box: Sandbox | None = None
        self.id = rollout_id
        self._recorder = recorder
        self._seed = seed
        self._admission = admission
        self.rewards = rewards
        self._sessions: dict[str, OpenSession] = {}
        self._turn_limits: dict[str, TurnLimit] = {}
        self.ended_by: PolicyFailure | None = None

    def session(self, role: str | None = None) -> Session:
        """Return the session of a role; None is the only role of the world. Raises BadInput if the world has no such
        role."""
        role = self.env.check_role(role, "episode.session")
        if role not in self._turn_limits:
            if self.rewards is not None and len(self.env.roles) > 1:
                remedy = "unset it: the environment scores its roles"
                raise refusal(
                    "rollout.rewards.within_s", "an environment of one role", f"{len(self.env.roles)}", remedy
                )
            session = self._session(role)
            session.rewards = self.rewards
            self._turn_limits[role] = TurnLimit(self.env.phases, role)
            session.add_layer(self._turn_limits[role])
        return self._session(role)

    def note(self, kind: str, data: Mapping[str, Any]) -> None:
        """Record an event of the attempt."""
        self.env.phases.note(kind, data)

    def queue(self) -> AbstractContextManager[object]:
        """Return the context in which the harness waits for a worker, without a time limit."""
        return self.env.phases.within("worker queue")

    @property
    def failure(self) -> InfraError | None:
        """Error of a request that no later retry has answered; the client may have hidden it from the harness."""
        return next((limit.failure for limit in self._turn_limits.values() if limit.failure is not None), None)

    @property
    def limit(self) -> LimitReached | None:
        """Limit that ended the conversation of a role; None if no limit did."""
        return next((s.limit for s in self._sessions.values() if s.limit is not None), None)

    def silent(self, harness: Harness, speaks: Callable[[str], bool]) -> Outcome | None:
        """Return the outcome of an attempt in which the policy has no turn; None if it has a turn. See
        `outcomes.of_silence`. `speaks`: returns whether the policy speaks for a role."""
        own = [session for role, session in self._sessions.items() if speaks(role)]
        return of_silence(own, f"harness {getattr(harness, 'name', type(harness).__name__)}", self.ended_by)

    def trajectories(self, outcome: Outcome, timing: Timing) -> tuple[Trajectory, ...]:
        """Return one trajectory for each role with a request, in the world's order of roles. Without any request,
        return an empty trajectory of the first role. Each session adds its `generate_s` to `timing`.

        A role whose last request hit a limit ends at this limit. The other roles end as answered if that limit is the
        outcome of the attempt; otherwise they end with the outcome.
        """
        cut = {role: outcome_at(session.limit) for role, session in self._sessions.items() if session.limit is not None}
        others = ANSWERED if outcome in cut.values() else outcome
        ended = cut if outcome.trainable else {}
        recorded = [
            session.trajectory(ended.get(role, others), timing) for role, session in self._in_order(self._sessions)
        ]
        spoken = tuple(trajectory for trajectory in recorded if trajectory.segments or trajectory.role in ended)
        return spoken or (self._session(self.env.first_role).trajectory(outcome, timing),)

    def transcripts(self) -> dict[str, tuple[Transcript, ...]]:
        """Return the conversations of each role in messages, one for each branch. Roles without a reply are left
        out."""
        spoken = {role: session.transcripts() for role, session in self._in_order(self._sessions)}
        return {role: transcripts for role, transcripts in spoken.items() if transcripts}

    async def close(self) -> list[InfraError]:
        """Close world, box and sessions, each even if another fails. Failures to close change no outcome: they are
        returned."""
        failures: list[InfraError] = []
        closers: list[tuple[str, type[InfraError], Callable[[], Awaitable[None]]]] = [
            ("environment", EnvError, self.env.close),
            *(("session", EngineError, session.close) for session in self._sessions.values()),
        ]
        if self.box is not None:
            closers.insert(1, ("box", SandboxError, self.box.close))
        cancelled: asyncio.CancelledError | None = None
        for part, error, close in closers:
            try:
                await self._close(part, error, close)
            except asyncio.CancelledError as cause:  # closes the others first
                cancelled = cause
            except InfraError as failure:
                failures.append(failure)
            except SparringError as cause:
                failures.append(error(f"close {part}: {type(cause).__name__}: {cause}"))
        if cancelled is not None:
            raise cancelled
        return failures

    async def _close(self, part: str, error: type[InfraError], close: Callable[[], Awaitable[None]]) -> None:
        """Close one part within its time limit. Raises the part's class of error for any exception of its code."""
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        try:
            with self.env.phases.within("close", part, error=error):
                with boundary(error, f"close {part}"):
                    await close()
        except asyncio.CancelledError:
            if task is not None and task.cancelling() > cancels:
                raise
            raise error(f"close {part}: CancelledError: its own code was cancelled") from None

    def _session(self, role: str) -> OpenSession:
        if role not in self._sessions:
            session = self._sessions[role] = self._recorder.open(
                self.task,
                rollout_id=self.id,
                seed=self._seed,
                role=role,
                admission=self._admission,
            )
            session.journal = self.env.playback
        return self._sessions[role]

    def _in_order(self, sessions: Mapping[str, OpenSession]) -> list[tuple[str, OpenSession]]:
        if len(sessions) < 2:
            return list(sessions.items())
        return [(role, sessions[role]) for role in self.env.roles if role in sessions]
