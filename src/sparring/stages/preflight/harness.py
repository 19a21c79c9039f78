"""Preflight of the harness: a task is played in which every reply is empty."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sparring.errors import EnvError, HarnessError, refusal
from sparring.stages.context import Context
from sparring.stages.data.demonstrations import Conversation, converse
from sparring.types import Message, Task


async def play_silently(context: Context, task: Task) -> list[Conversation]:
    """Play a task in which whoever is asked says nothing.

    Returns:
        The conversation of each role that was asked.

    Raises:
        BadInput: the environment or the harness broke, the harness asked for a role that the environment does not
            name, or it asked nobody.
    """
    async with playable(task):
        return await converse(context, task, lambda messages: Message(role="assistant", content=""))


@asynccontextmanager
async def playable(task: Task) -> AsyncIterator[None]:
    """Refuse a task whose world breaks: before the run that is wrong input, during the run it would be a failure."""
    try:
        yield
    except EnvError as error:
        expected, do = "an environment that opens it and answers every turn", "correct the environment"
        if isinstance(error, HarnessError):
            expected, do = "a harness that plays it to its end", "correct the harness (rollout.harness)"
        raise refusal(f"task {task.id}", expected, f"{error}", do) from error
