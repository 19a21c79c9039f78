"""Sessions on a chat endpoint: text alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparring.engine.adapters.chat_endpoint import ChatEndpoint
from sparring.errors import LimitReached, RequestRefused
from sparring.generation import Constraint, Sampling
from sparring.types import Message, Outcome, Segment, Task, Timing, ToolSpec, Trajectory, Usage


class ChatSessions:
    """Implements `SessionRecorder` on a chat endpoint: text alone, so that its trajectories have messages and no
    tokens.

    Args:
        endpoint: replies.
        sampling: how; `seed` is set per session.
    """

    def __init__(self, endpoint: ChatEndpoint, sampling: Sampling) -> None:
        self._endpoint, self._sampling = endpoint, sampling

    def open(self, task: Task, *, rollout_id: str, seed: int, role: str, priority: int) -> _ChatSession:
        """A session of one role of one rollout."""
        return _ChatSession(self._endpoint, replace(self._sampling, seed=seed), task, rollout_id, role)


class _ChatSession:
    def __init__(self, endpoint: ChatEndpoint, sampling: Sampling, task: Task, id: str, role: str) -> None:
        self._endpoint, self._sampling = endpoint, sampling
        self._task, self._id, self._role = task, id, role
        self._messages: tuple[Message, ...] = ()
        self._turns = self._calls = 0

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, constraint: Constraint | None = None
    ) -> Message:
        """The endpoint's reply.

        Raises:
            LimitReached: a limit of the task was hit.
            EngineError: the endpoint failed, or a constraint was asked for, which nobody could hold it to.
        """
        if constraint is not None:
            raise RequestRefused(
                f"{self._id}: expected no constraint with a chat endpoint, got {constraint.kind}; use an engine"
            )
        limits = self._task.limits
        if self._turns >= limits.max_turns:
            raise LimitReached("max_turns", f"{self._id}: {limits.max_turns} turns are used up")
        self._turns += 1
        self._messages = tuple(messages)
        reply = await self._endpoint.reply(messages, tools, self._sampling)
        self._messages = (*messages, reply)
        self._calls += len(reply.tool_calls)
        if self._calls > limits.max_tool_calls:
            raise LimitReached("max_tool_calls", f"{self._id}: more than {limits.max_tool_calls} tool calls")
        return reply

    def trajectory(self, outcome: Outcome, timing: Timing = Timing()) -> Trajectory:
        """Return the conversation as segments without tokens."""
        segments = tuple(
            Segment(
                index=place,
                parent=place - 1 if place else None,
                source="teacher" if message.role == "assistant" else "tool" if message.role == "tool" else "prompt",
                tokens=(),
                message=message,
            )
            for place, message in enumerate(self._messages)
        )
        usage = Usage(turns=self._turns, tool_calls=self._calls)
        return Trajectory(
            id=self._id,
            task=self._task.id,
            role=self._role,
            segments=segments,
            outcome=outcome,
            usage=usage,
            timing=timing,
        )

    async def close(self) -> None:
        """Nothing is kept."""
