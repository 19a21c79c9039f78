"""Transcripts: conversations as they were held, in messages."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.generation import Constraint
from sparring.rollout.episode import RecordingSession, SessionRecorder
from sparring.rollout.runner import Finished
from sparring.types import Message, Outcome, Task, Timing, ToolSpec, Trajectory


class TranscriptRecorder:
    """A recorder that also remembers every conversation in messages; implements `SessionRecorder` on another one."""

    def __init__(self, recorder: SessionRecorder) -> None:
        self._recorder = recorder
        self._sessions: dict[str, _TranscriptSession] = {}

    def open(
        self, task: Task, *, rollout_id: str, seed: int, role: str = "policy", priority: int = 0
    ) -> _TranscriptSession:
        """A session of one role of one rollout."""
        session = self._recorder.open(task, rollout_id=rollout_id, seed=seed, role=role, priority=priority)
        self._sessions[rollout_id] = _TranscriptSession(session)
        return self._sessions[rollout_id]

    def conversation(self, finished: Finished) -> tuple[Message, ...]:
        """All that was said in a rollout. It is then forgotten, and so are the attempts at it that broke before."""
        for broken in finished.broken:
            del self._sessions[broken.id]
        return self._sessions.pop(finished.rollout.id).messages


class _TranscriptSession:
    def __init__(self, session: RecordingSession) -> None:
        self._session = session
        self.messages: tuple[Message, ...] = ()

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, constraint: Constraint | None = None
    ) -> Message:
        """Reply by the recorded session, and remember it."""
        reply = await self._session.complete(messages, tools, constraint=constraint)
        self.messages = (*messages, reply)
        return reply

    def trajectory(self, outcome: Outcome, timing: Timing = Timing()) -> Trajectory:
        """Return the recorded trajectory."""
        return self._session.trajectory(outcome, timing)

    async def close(self) -> None:
        """Close the recorded session."""
        await self._session.close()
