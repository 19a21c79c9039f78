"""What one rollout hands its harness: the task, an open world, a box, and a session for every role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from sparring.protocols import Sandbox, Session, World
from sparring.types import Task

S = TypeVar("S", bound=Session)


class LiveEpisode(Generic[S]):
    """One running rollout. Sessions are opened on first use, one per role.

    Attributes:
        sessions: the sessions opened so far, by role, in the order they were opened.
    """

    def __init__(self, task: Task, env: World, box: Sandbox | None, open_session: Callable[[str], S]) -> None:
        self.task = task
        self.env = env
        self.box = box
        self.sessions: dict[str, S] = {}
        self._open_session = open_session

    def session(self, role: str = "policy") -> S:
        """The session of a role; the same one however often it is asked for."""
        if role not in self.sessions:
            self.sessions[role] = self._open_session(role)
        return self.sessions[role]
