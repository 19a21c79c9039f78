"""Preflight of the harness: a task is played in which every reply is empty, and it is said who played it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from sparring.errors import EnvError, HarnessError, refusal
from sparring.harness.load import BUILT_IN
from sparring.harness.workers import NAME as WORKERS
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import Context
from sparring.stages.data.demonstrations import Conversation, converse
from sparring.stages.models.imitator import imitator_of
from sparring.types import Message, Task


async def play_silently(context: Context, task: Task) -> list[Conversation]:
    """Play a task in which whoever is asked says nothing. Its requests are rendered as the policy's will be, where the
    policy has a tokenizer already: a program whose every request the chat format refuses is not ready to run.

    Returns:
        The conversation of each role that was asked.

    Raises:
        BadInput: the environment or the harness broke, the harness asked for a role that the environment does not
            name, or it asked nobody or was refused each request.
    """
    async with playable(task):
        return await converse(
            context, task, lambda messages: Message(role="assistant", content=""), imitator_of(context)
        )


def players_of(config: RunConfig, held: Iterable[Conversation], *, rendered: bool) -> list[str]:
    """Return a sentence for each environment whose harness is none of the built-in: who played its first task.

    Args:
        config: of the run.
        held: conversations of the tasks that were played.
        rendered: whether its requests were rendered.
    """
    unknown = "" if rendered else "; its requests were not rendered, because the policy has no tokenizer yet"
    first: dict[str, Task] = {}
    for conversation in held:
        if conversation.task is not None:
            first.setdefault(conversation.task.env, conversation.task)
    facts = []
    for environment, task in first.items():
        name = config.harness_of(environment)
        if name == WORKERS:
            facts.append(f"harness: workers will play; task {task.id} was played as a chat, for none is there yet")
        elif name not in BUILT_IN:
            facts.append(f"harness: {name} played task {task.id}, whose replies were empty, to its end{unknown}")
    return facts


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
