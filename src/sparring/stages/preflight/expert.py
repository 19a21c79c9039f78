"""Preflight of the expert that the sft stage imitates: it solves as many of its tasks as the stage asks of it."""

from __future__ import annotations

from sparring.errors import BadInput
from sparring.harness.workers import NAME as WORKERS
from sparring.record.imitated import Imitator
from sparring.stages.context import Context
from sparring.stages.data.demonstrations import Conversation, demonstration_tasks, play_experts, solved_conversations
from sparring.stages.preflight.harness import playable
from sparring.types import Task

TRIED = 16
"""Demonstrations that are played before a run; where these raise a doubt, all are."""


async def check_expert(context: Context, imitator: Imitator | None) -> list[Conversation]:
    """Play demonstrations from all over the list, as the sft stage will play all.

    A few say nothing for certain: where fewer than nine in ten of them are solved, all are played, so that what is
    refused here is what the stage would refuse.

    Args:
        context: of the run.
        imitator: as `imitator_of` has it.

    Returns:
        The conversations that solve their task; none where no stage imitates the expert, or workers play for it.

    Raises:
        BadInput: the expert solves fewer than nine in ten tasks, or a task cannot be played.
    """
    config, stages = context.config, context.config.run.stages

    async def play(tasks: list[Task]) -> list[Conversation]:
        async with playable(tasks[0]):
            return await play_experts(context, tasks, imitator)

    if "sft" not in stages or "collect" in stages or WORKERS in config.harnesses:
        return []
    tasks = demonstration_tasks(config, context.factory)
    every = -(-len(tasks) // TRIED)
    try:
        return solved_conversations(await play(tasks[::every]))
    except BadInput:
        if every == 1:
            raise
    return solved_conversations(await play(tasks))
