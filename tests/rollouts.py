"""Rollouts of one trajectory, and groups of them that tell their number."""

from collections.abc import Sequence
from typing import Any

from segments import sampled

from sparring.generation import Runs
from sparring.types import Failure, Group, Message, Outcome, Rollout, Score, Segment, Task, Trajectory

ANSWERED = Outcome(kind="completed", reason="answered")
LOST = Outcome(
    kind="infra_failed", reason="failure", failure=Failure(error="SandboxError", where="box", message="gone")
)


def make_rollout(
    task: Task,
    name: str,
    segments: Sequence[Segment] = (),
    *,
    index: int = 0,
    attempt: int = 0,
    outcome: Outcome = ANSWERED,
    **more: Any,
) -> Rollout:
    """Return a rollout of one trajectory, which has the same name; `more` is of the trajectory."""
    line = Trajectory(id=name, task=task.id, role="policy", segments=tuple(segments), outcome=outcome, **more)
    return Rollout(id=name, task=task, index=index, attempt=attempt, purpose="train", trajectories=(line,))


def make_segment(number: int, size: int = 4) -> Segment:
    """Return a sampled segment that tells its number."""
    logprobs = (-1.0 / (number + 1),) * size
    runs = Runs.of(number, size)
    return sampled(0, None, (number,) * size, version=number, logprobs=logprobs, kv_versions=runs)


def make_group(number: int, size: int = 4) -> Group:
    """Return a group of two rollouts that tells its number."""
    task = Task(id=f"task-{number}", env="toy", messages=(Message(role="user", content="?"),))
    names = [f"rl/{number}/{place}" for place in range(2)]
    rollouts = tuple(make_rollout(task, n, [make_segment(number, size)], index=i) for i, n in enumerate(names))
    scores = (Score(reward=1.0), Score(reward=0.0))
    return Group(id=f"rl/{number}", index=number, task=task, rollouts=rollouts, scores=scores, version=number)
