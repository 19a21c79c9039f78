"""A recorder of environments whose roles are served by several models."""

from __future__ import annotations

from collections.abc import Mapping

from sparring.rollout.episode import OpenSession, SessionRecorder
from sparring.types import Task


class RoleRecorder:
    """Recorder that opens the session of each role on the engine of the model that speaks for it. Implements
    `SessionRecorder`.

    Args:
        policy: recorder of every role that `by_role` does not name.
        by_role: recorder of each of the others.
    """

    def __init__(self, policy: SessionRecorder, by_role: Mapping[str, SessionRecorder]) -> None:
        self._policy = policy
        self._by_role = by_role

    def open(self, task: Task, *, rollout_id: str, seed: int, role: str, priority: int, admission: int) -> OpenSession:
        """Open the session of one role of one rollout."""
        recorder = self._by_role.get(role, self._policy)
        return recorder.open(task, rollout_id=rollout_id, seed=seed, role=role, priority=priority, admission=admission)
