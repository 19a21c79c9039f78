"""Segments as a policy samples them, and trajectories that nobody sampled."""

from collections.abc import Sequence
from typing import Any

from sparring.generation import Runs
from sparring.types import Message, Outcome, Segment, Trajectory


def sampled(index: int, parent: int | None, tokens: Sequence[int], *, version: int = 0, **more: Any) -> Segment:
    """Return a segment that was sampled by one version, of log-probabilities -0.5 where `more` has no others."""
    count = len(tokens)
    own = {"source": "policy", "model": "policy", "logprobs": (-0.5,) * count, "versions": Runs.of(version, count)}
    return Segment(**{"index": index, "parent": parent, "tokens": tuple(tokens), **own, **more})


def finished(*messages: Message, task: str = "t", **more: Any) -> Trajectory:
    """Return a completed trajectory of messages that nobody sampled."""
    segments = tuple(
        Segment(index=index, parent=index - 1 if index else None, source="expert", tokens=(), message=message)
        for index, message in enumerate(messages)
    )
    outcome = Outcome(kind="completed", reason="answered")
    return Trajectory(**{"id": "r", "task": task, "role": "policy", "segments": segments, "outcome": outcome, **more})


def answer(text: str) -> Message:
    """Return a reply without calls."""
    return Message(role="assistant", content=text)
