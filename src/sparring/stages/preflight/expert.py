"""Check of the expert that the sft stage imitates: it solves nine in ten of its tasks."""

from __future__ import annotations

from sparring.errors import BadInput
from sparring.harness.workers import NAME as WORKERS
from sparring.record.token_counts import Imitator
from sparring.stages.context import Context
from sparring.stages.data.demonstrations import Conversation, demonstration_tasks, play_experts, solved_conversations
from sparring.stages.preflight.harness import playable
from sparring.types import Task

TRIED = 16
"""Number of demonstrations that are played first. If too many of them fail, all are played."""


async def check_expert(context: Context, imitator: Imitator | None) -> list[Conversation]:
    """Play demonstrations spread over the list, and return the solved conversations.

    If fewer than nine in ten of the tried demonstrations are solved, all are played, so that this check refuses the
    same experts as the stage. The result is empty if no stage imitates the expert, or if workers play.

    Raises:
        BadInput: the expert solves fewer than nine tasks in ten, or a task cannot be played.
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
