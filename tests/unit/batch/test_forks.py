"""A row says why its conversation left another."""

from __future__ import annotations

from segments import sampled

from sparring.batch.flatten import flatten
from sparring.generation import Runs, Sampling
from sparring.types import (
    Fork,
    ForkReason,
    Group,
    Outcome,
    Rollout,
    Score,
    Segment,
    Task,
    Trajectory,
)


def turn(index: int, fork: ForkReason | None) -> list[Segment]:
    """A prompt that begins a branch, and its reply."""
    runs, made = Runs.of(0, 2), None if fork is None else Fork(reason=fork)
    return [
        Segment(index=index, parent=None, source="prompt", tokens=(1, 2), fork=made),
        sampled(index + 1, index, (3, 4), logprobs=(-1.0, -1.0), versions=runs, kv_versions=runs, sampling=Sampling()),
    ]


def test_a_row_records_a_template_fork():
    segments = [*turn(0, None), *turn(2, "template"), *turn(4, "edited")]
    task = Task(id="t", env="toy", messages=())
    over = Outcome(kind="completed", reason="answered")
    trajectory = Trajectory(id="rl/0/0", task="t", role="policy", segments=tuple(segments), outcome=over)
    rollout = Rollout(id="rl/0/0", task=task, index=0, attempt=0, purpose="train", trajectories=(trajectory,))
    group = Group(id="rl/0", index=0, task=task, rollouts=(rollout,), scores=(Score(reward=1.0),))
    assert [row.fork for row in flatten(group, "policy")] == [None, "template", "edited"]
