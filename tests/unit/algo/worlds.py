"""Groups of recorded conversations, for annotators: who said what, in the tokens of a renderer."""

from __future__ import annotations

import asyncio

from sparring.algo.annotate.provenance import SampleProvenance
from sparring.batch.flatten import flatten
from sparring.generation import Runs, Sampling
from sparring.types import Group, Message, Outcome, Rollout, Score, Segment, Task, Trajectory

DONE = Outcome(kind="completed", reason="answered")
TASK = Task(id="t", env="world", messages=(Message(role="user", content="What is 2 + 3?"),))


def segment(index, parent, source, tokens, message=None):
    sampled = source == "policy"
    return Segment(
        index=index,
        parent=parent,
        source=source,
        tokens=tuple(tokens),
        message=message,
        model="policy" if sampled else None,
        logprobs=tuple(-0.25 * (place + 1) for place in range(len(tokens))) if sampled else None,
        versions=Runs.of(0, len(tokens)) if sampled else None,
        sampling=Sampling() if sampled else None,
    )


def rollout(index, segments):
    trajectory = Trajectory(id=f"g/{index}", task="t", role="policy", segments=tuple(segments), outcome=DONE)
    return Rollout(id=f"g/{index}", task=TASK, index=index, attempt=0, purpose="train", trajectories=(trajectory,))


def group(rollouts, successes):
    scores = tuple(Score(reward=float(success), success=success) for success in successes)
    return Group(id="g", index=0, task=TASK, rollouts=tuple(rollouts), scores=scores)


def watched(groups):
    """A watch that has seen the groups, and their rows."""
    watch = SampleProvenance()

    async def source():
        for each in groups:
            yield each

    async def run():
        return [each async for each in watch.groups(source())]

    return watch, [row for each in asyncio.run(run()) for row in flatten(each, "policy")]
