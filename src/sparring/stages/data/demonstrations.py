"""Conversations to imitate: read from a file, or held by the environment's scripted expert, its tools run for real."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sparring.envs.threads import THREADS
from sparring.errors import BadInput, EnvError, boundary, refusal
from sparring.generation import Constraint, Rendered
from sparring.protocols import Expert, Renderer
from sparring.record.branches import Transcript
from sparring.record.imitated import Imitator
from sparring.record.transcript import TextRecorder, TextRequest
from sparring.rollout.attempts import Attempt
from sparring.rollout.role_recorder import RoleRecorder
from sparring.rollout.runner import RolloutRunner
from sparring.stages.context import Context
from sparring.stages.data.traces import transcript_of
from sparring.stages.models.context_length import outline_of
from sparring.stages.models.imitator import imitator_of
from sparring.tasks.files import located, read_conversations
from sparring.types import POLICY, Message, Score, Task, ToolSpec


AT_ONCE = 32
"""Most demonstrations that are played at a time, where `[rollout]` allows as many rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Finished conversation of one branch of one role. `task` and `score`, the one of the world's own scorer, are None
    for a row of a file; `constraints` are those that the world set for replies; `imitated` and `prompt` are those of
    its `Transcript`."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    task: Task | None = None
    score: Score | None = None
    constraints: tuple[Constraint, ...] = ()
    role: str = POLICY
    imitated: tuple[int, ...] | None = None
    prompt: int | None = None


async def demonstrations(context: Context, renderer: Renderer, longest: int) -> list[tuple[str, Rendered]]:
    """Return every demonstration of the run, as (name, tokens with their sampled marks): the rows of `[sft] data`, or
    the expert's conversations that solve their task, in task order.

    Args:
        context: of the run.
        renderer: of the policy.
        longest: most tokens of one.

    Raises:
        BadInput: there is nothing to imitate, a row does not parse or is longer, or the expert solves fewer than nine
            in ten.
    """
    imitator = None if given_data(context) is not None else imitator_of(context, renderer)
    shown = await conversations(context, None, imitator)
    solved = [c for c in shown if c.task is None or (c.score is not None and c.score.success is not False)]
    if len(solved) < 0.9 * len(shown):
        raise refusal(
            "[env]", "an expert that solves nine in ten tasks", f"{len(solved)} of {len(shown)}", "correct the expert"
        )
    return [(c.name, rendered(c, renderer, longest)) for c in solved]


def rendered(conversation: Conversation, renderer: Renderer, longest: int) -> Rendered:
    """Return the conversation as tokens, the replies marked.

    Args:
        conversation: to imitate.
        renderer: of the policy.
        longest: most tokens of it, those that the policy has positions for.

    Raises:
        BadInput: the format cannot say it, or it is longer.
    """
    from sparring.render.demonstrate import demonstration_tokens

    try:
        tokens = demonstration_tokens(
            renderer,
            conversation.messages,
            conversation.tools,
            imitated=conversation.imitated,
            prompt=conversation.prompt,
        )
    except BadInput as error:
        raise BadInput(f"{conversation.name}: {error}") from error
    if len(tokens.tokens) > longest:
        raise too_long(conversation.name, longest, f"a demonstration of {len(tokens.tokens)}")
    return tokens


def too_long(where: str, positions: int, got: str) -> BadInput:
    """Return the refusal of more tokens than the policy has positions for."""
    expected = f"fewer tokens than the {positions} positions of the model"
    return refusal(where, expected, got, "shorten it, raise models.policy.init.max_positions, or take another model")


def given_data(context: Context) -> str | None:
    """Return the file of conversations to imitate: `[sft] data`, or what the collect stage wrote; None where there is
    none (yet)."""
    return context.config.sft.data or (context.done("collect") or {}).get("data")


def given_conversations(context: Context) -> list[Conversation]:
    """Return the rows of `[sft] data`.

    Raises:
        BadInput: there is none, or one does not parse.
    """
    path, tools = str(given_data(context)), context.factory.make().tools
    mapping = {} if context.config.sft.data is None else context.config.world.columns.mapping()
    rows = read_conversations(path, mapping)
    if not rows:
        raise refusal(path, "at least one conversation", "none", "add rows, or leave out sft.data to ask the expert")
    column = mapping.get("messages", "messages")
    places = zip(rows, located(path), strict=True)
    return [
        spoken(f"{path}, row {number}", transcript_of(row, messages, tools, where, column))
        for number, (messages, (_, where, row)) in enumerate(places, 1)
    ]


def spoken(name: str, transcript: Transcript, **of: Any) -> Conversation:
    """Return a branch as a conversation to imitate. `of` are other fields of it: whose it is, and what it earned."""
    return Conversation(
        name=name,
        messages=transcript.messages,
        tools=transcript.tools,
        constraints=transcript.constraints,
        imitated=transcript.imitated,
        prompt=transcript.prompt,
        **of,
    )


async def conversations(
    context: Context, count: int | None, imitator: Imitator | None = None
) -> list[Conversation]:
    """Return the conversations to imitate: the first `count` (None: all) rows of `[sft] data`, or those of the first
    `count` tasks, held by the expert. `imitator` is that of `converse`.

    Raises:
        BadInput: there is none, a row does not parse, or the environment has no expert for a task.
    """
    if given_data(context) is not None:
        return given_conversations(context)[:count]
    source = context.factory.tasks("demonstration", context.config.run.seed)
    tasks: list[Task] = []
    while (count is None or len(tasks) < count) and (task := source.next()) is not None:
        tasks.append(task)
    if not tasks:
        way = without_expert(context, "give the environment demonstrations", "leave out the sft stage")
        raise refusal("[env]", "tasks to demonstrate", "none", way)
    gate = asyncio.Semaphore(min(AT_ONCE, context.config.rollout.max_concurrent_rollouts))

    async def one(task: Task) -> list[Conversation]:
        async with gate:
            return await demonstrate(context, task, imitator)

    played = await asyncio.gather(*map(one, tasks))
    return [each for of_task in played for each in of_task if context.config.rollout.speaks(each.role)]


def without_expert(context: Context, own: str, of_sft: str) -> str:
    """Return what to do where the environment demonstrates nothing: `own` is what its author can, `of_sft` what else
    helps where the sft stage imitates the demonstrations. Without that stage, a fresh model's tokenizer is what they
    are for."""
    other = "start from a checkpoint (models.policy.path)"
    return f"{own}, or {of_sft if 'sft' in context.config.run.stages else other}, or set sft.data"


async def demonstrate(context: Context, task: Task, imitator: Imitator | None = None) -> list[Conversation]:
    """Let the expert do `task` in a world of its own: a conversation for each branch of each role that was
    asked. `imitator` is that of `converse`.

    Raises:
        BadInput: the environment has no expert for it, or none for one of its roles, or the imitator has no room for
            what it says.
        EnvError: as `converse`.
    """
    expert = context.factory.expert(task)
    if expert is None:
        way = without_expert(
            context, "write expert(self, task)", "leave this kind of task out of the demonstrations"
        )
        raise refusal(f"task {task.id}", "an expert", "none", way)
    return await converse(context, task, expert, imitator)


async def converse(
    context: Context, task: Task, replies: Expert | Mapping[str, Expert], imitator: Imitator | None = None
) -> list[Conversation]:
    """Play one rollout whose replies are scripted, tools run for real, and score it. It ends where the policy's would:
    a world that never ends is cut short at the limits of the run.

    Args:
        context: of the run, whose harness holds the conversation.
        task: is played.
        replies: what is said to the messages so far; such a function for each role, by name, where there are several.
        imitator: the policy, where it is to imitate its roles: no prompt of them is longer than its context, and a
            program is told so. None: ids are not counted.

    Returns:
        The conversation of each branch of each role that was asked, at least one.

    Raises:
        EnvError: the world or the script raised something, or the world gave an answer or a score that is none.
        BadInput: the harness asked nobody, or a role that the world does not name or for which nothing is scripted, or
            the imitator has no room for the conversation.
    """
    played = await _played(context, task, replies, imitator)
    if not played.transcripts:
        do = "let it ask for every reply: `await episode.session().complete(messages)`, or by the client it is handed"
        got = f"{context.config.rollout.harness!r}, which requested no reply for task {task.id}"
        raise refusal("rollout.harness", "a harness that requests its replies from the session", got, do)
    score, several = played.score, len(played.transcripts) > 1
    score = None if score is not None and (score.reward, score.success) == (None, None) else score
    shown = []
    for role, branches in played.transcripts.items():
        name = f"task {task.id}, {role}" if several else f"task {task.id}"
        names = [name] if len(branches) == 1 else [f"{name}, branch {number}" for number in range(1, len(branches) + 1)]
        shown += [spoken(*branch, task=task, score=score, role=role) for branch in zip(names, branches, strict=True)]
    return shown


async def _played(
    context: Context, task: Task, replies: Expert | Mapping[str, Expert], imitator: Imitator | None
) -> Attempt:
    """Play one rollout whose replies are scripted. The arguments and errors are those of `converse`."""

    async def reply(request: TextRequest) -> Message:
        script = replies.get(request.role) if isinstance(replies, Mapping) else replies
        if script is None:
            raise refusal(f"task {task.id}", f"an expert for the role {request.role}", "none", "add it to `expert`")
        with boundary(EnvError, "env.expert"):
            return script(request.messages)

    config = context.config.rollout
    others = dict.fromkeys([role for role in config.roles if not config.speaks(role)], TextRecorder(reply, "expert"))
    recorder = RoleRecorder(TextRecorder(reply, "expert", imitator), others)
    if config.rewards_within_s is not None:
        config = msgspec.structs.replace(config, rewards_within_s=0.0)  # whoever judges trained rollouts is not awaited
    runner = RolloutRunner(
        context.factory,
        context.boxes,
        recorder,
        context.harness,
        config,
        executors=THREADS.executor,
    )
    played = await runner.attempt(task, rollout_id=f"demonstration/{task.id}", index=0, seed=task.seed)
    for error in (played.error, *runner.close_failures):
        if error is not None:
            raise error
    if imitator is not None and any(t.outcome.reason == "context_length" for t in played.rollout.trajectories):
        raise _no_room(context, task, imitator.max_context)
    return played


def _no_room(context: Context, task: Task, room: int) -> BadInput:
    """Return the refusal of an expert whose prompts or replies do not fit the policy's context of `room` tokens."""
    got = f"more in the demonstration of task {task.id}"
    if room < outline_of(context.input("sft")).max_positions:
        return refusal("engine.kv_bytes", f"prompts of fewer than the {room} tokens of the cache", got, "raise it")
    return too_long(f"task {task.id}", room, "a longer demonstration")
