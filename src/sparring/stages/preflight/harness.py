"""Check of the harness: a task is played with empty replies, and a sentence names the player."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from sparring.envs.domains import factory_of
from sparring.errors import EnvError, HarnessError, InfraError, refusal
from sparring.harness.by_environment import mounts_of
from sparring.harness.load import BUILT_IN
from sparring.harness.relay import FILES_OF_CONNECTION, MOST_CONNECTIONS
from sparring.harness.workers import NAME as WORKERS
from sparring.observe.wait_reports import waiting
from sparring.open_files import MOST, allow_files
from sparring.protocols import Boxes, EnvFactory, Harness
from sparring.recipe.run_config import RunConfig
from sparring.sandbox.roots import HOST_IMAGES
from sparring.stages.context import Context
from sparring.stages.data.demonstrations import Conversation, Demonstrations
from sparring.stages.models.imitator import imitator_of
from sparring.stages.preflight.workers import Rehearsal
from sparring.types import Message, Task

MOST_IMAGES = 16
"""Maximum number of images in which programs are started before a run."""
FILES_OF_RUN, FILES_OF_BOX = 512, 8
"""Number of open files of a run without its programs, and of each program's box."""


async def play_silently(context: Context, task: Task) -> list[Conversation]:
    """Play a task with empty replies. Requests are rendered if the policy has a tokenizer: a program whose requests the
    chat format refuses is not ready to run. Return the conversation of each role that was asked."""
    async with playable(task):
        scripted = Demonstrations(context, imitator_of(context), fits=False)
        return await scripted.play(task, lambda messages: Message(role="assistant", content=""))


def players_of(
    config: RunConfig, played: Iterable[Conversation], rehearsal: Rehearsal | None, *, rendered: bool
) -> list[str]:
    """Return a sentence for each environment whose harness is not built in, which names the player of its first task.
    `rendered` says whether the requests were rendered."""
    unknown = "" if rendered else "; its requests were not rendered, because the policy has no tokenizer yet"
    first: dict[str, Task] = {}
    for conversation in played:
        if conversation.task is not None:
            first.setdefault(conversation.task.env, conversation.task)
    facts = []
    for environment, task in first.items():
        name = config.harness_of(environment)
        if name == WORKERS and rehearsal is not None:
            facts.append(
                f"harness: workers will play; {rehearsal.who} played task {task.id} through their door{unknown}"
            )
        elif name not in BUILT_IN:
            facts.append(f"harness: {name} played task {task.id}, whose replies were empty, to its end{unknown}")
    return facts


def check_files(config: RunConfig, harness: Harness) -> list[str]:
    """Raise this process's limit of open files for agent programs, and return how many connections each may have."""
    if mounts_of(harness) is None:
        return []
    places = config.rollout.max_concurrent_rollouts
    return [within_files(places, allow_files(max(MOST, files_of(places))))]


def files_of(places: int) -> int:
    """Return the number of open files of a run with `places` programs at once."""
    return FILES_OF_RUN + places * (FILES_OF_BOX + MOST_CONNECTIONS * FILES_OF_CONNECTION)


def within_files(places: int, allowed: int) -> str:
    """Return a sentence with the number of connections that each program may have. Raises BadInput if `places` programs
    at once may need more than `allowed` open files in this process."""
    wanted = files_of(places)
    if allowed < wanted:
        most = (allowed - FILES_OF_RUN) // (files_of(1) - FILES_OF_RUN)
        fix = f"raise it (ulimit -Hn {wanted}), or set rollout.max_concurrent_rollouts = {max(1, most)}"
        raise refusal("open files", f"{wanted} for {places} programs at once", f"a limit of {allowed}", fix)
    return f"programs: {MOST_CONNECTIONS} connections each, within {allowed} open files"


async def check_images(harness: Harness, factory: EnvFactory, boxes: Boxes, tasks: Sequence[Task]) -> list[str]:
    """Start agent programs in a box of each image that the first tasks name, at most `MOST_IMAGES`; return a sentence
    if a program was started."""
    starts: Callable[..., Awaitable[bool]] | None = getattr(harness, "check_image", None)
    first: dict[tuple[str, str], Task] = {}
    for task in tasks if starts is not None else ():
        if task.box is not None and task.box.image not in HOST_IMAGES:
            first.setdefault((task.env, task.box.image), task)
    started = 0
    for task in [*first.values()][:MOST_IMAGES]:
        tools = bool(factory_of(factory, task).make().tools)
        with waiting(f"a program to start in image {task.box and task.box.image}"):
            started += starts is not None and await starts(task, boxes, tools=tools)
    return [f"harness: its program starts in {started} of {len(first)} images of the first tasks"] if started else []


@asynccontextmanager
async def playable(task: Task) -> AsyncIterator[None]:
    """Turn a failure or a limit of a task's environment or harness inside the context into BadInput, which refuses the
    run. During the run it would be a failure of the rollout."""
    try:
        yield
    except InfraError as error:
        if not isinstance(error, EnvError) and error.limit_s is None:
            raise
        expected, fix = "an environment that opens it and answers every turn", "correct the environment"
        if isinstance(error, HarnessError):
            expected, fix = "a harness that plays it to its end", "correct the harness (rollout.harness)"
        raise refusal(f"task {task.id}", expected, f"{error}", fix) from error
