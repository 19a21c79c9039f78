"""Groups that a store keeps, each of which tells its number."""

from dataclasses import replace

from sparring.generation import Runs
from sparring.types import Group, Message, Outcome, Rollout, Score, Segment, Task, Trajectory


def make_segment(number: int, size: int = 4) -> Segment:
    """A sampled segment that tells its number."""
    runs = Runs.of(number, size)
    return Segment(
        index=0,
        parent=None,
        source="policy",
        tokens=(number,) * size,
        model="policy",
        logprobs=(-1.0 / (number + 1),) * size,
        versions=runs,
        kv_versions=runs,
    )


def make_group(number: int, size: int = 4) -> Group:
    """A group of two that tells its number."""
    task = Task(id=f"task-{number}", env="toy", messages=(Message(role="user", content="?"),))
    trajectory = Trajectory(
        id=f"rl/{number}/0",
        task=task.id,
        role="policy",
        segments=(make_segment(number, size),),
        outcome=Outcome(kind="completed", reason="answered"),
    )
    rollouts = tuple(
        Rollout(
            id=f"rl/{number}/{place}",
            task=task,
            index=place,
            attempt=0,
            purpose="train",
            trajectories=(replace(trajectory, id=f"rl/{number}/{place}"),),
        )
        for place in range(2)
    )
    scores = (Score(reward=1.0), Score(reward=0.0))
    return Group(id=f"rl/{number}", index=number, task=task, rollouts=rollouts, scores=scores, version=number)
