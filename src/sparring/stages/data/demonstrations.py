"""Conversations to imitate: read from a file, or held by the environment's scripted expert, its tools run for real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparring.errors import BadInput, LimitReached, refusal
from sparring.generation import Constraint
from sparring.harness.chat import ChatHarness
from sparring.harness.episode import LiveEpisode
from sparring.protocols import Rendered, Renderer
from sparring.rollout.episode import GuardedEnv
from sparring.stages.context import Context
from sparring.tasks.files import read_conversations
from sparring.types import Message, Outcome, Score, Segment, Task, ToolSpec, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One finished conversation. `task` and `score`, what the world's own scorer says of it, are None for a row of a
    file; `constraints` are what the world said that replies must be."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    task: Task | None = None
    score: Score | None = None
    constraints: tuple[Constraint, ...] = ()


class ExpertSession:
    """A `Session` whose replies are scripted. Nothing is sampled, so nothing is recorded but the messages."""

    def __init__(self, expert: Callable[[Sequence[Message]], Message], max_turns: int) -> None:
        self._expert = expert
        self._left = max_turns
        self.messages: tuple[Message, ...] = ()
        self.constraints: list[Constraint] = []

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, constraint: Constraint | None = None
    ) -> Message:
        """The expert's reply to the conversation so far.

        Raises:
            LimitReached: it has had all the turns that the policy would have.
        """
        if not self._left:
            raise LimitReached("max_turns", "the turns of the task are used up")
        self._left -= 1
        self.constraints += [] if constraint is None else [constraint]
        reply = self._expert(messages)
        self.messages = (*messages, reply)
        return reply


async def demonstrations(context: Context, renderer: Renderer) -> list[tuple[str, Rendered]]:
    """Every demonstration of the run, as (name, tokens with their sampled marks): the rows of `[sft] data`, or the
    expert's conversations that solve their task, in task order.

    Raises:
        BadInput: there is nothing to imitate, a row does not parse, or the expert solves fewer than nine in ten.
    """
    shown = await conversations(context, None)
    solved = [c for c in shown if c.task is None or (c.score is not None and c.score.success is not False)]
    if len(solved) < 0.9 * len(shown):
        raise refusal(
            "[env]", "an expert that solves its tasks", f"{len(solved)} of {len(shown)}", "correct the expert"
        )
    return [(c.name, rendered(c, renderer)) for c in solved]


def rendered(conversation: Conversation, renderer: Renderer) -> Rendered:
    """The conversation as tokens, the replies marked.

    Raises:
        BadInput: the format cannot say it.
    """
    from sparring.render.demonstrate import demonstration_tokens

    try:
        return demonstration_tokens(renderer, conversation.messages, conversation.tools)
    except BadInput as error:
        raise BadInput(f"{conversation.name}: {error}") from error


def given_data(context: Context) -> str | None:
    """The file of conversations to imitate: `[sft] data`, or what the collect stage wrote; None where there is none
    (yet)."""
    return context.config.sft.data or (context.done("collect") or {}).get("data")


def given_conversations(context: Context) -> list[Conversation]:
    """The rows of `[sft] data`.

    Raises:
        BadInput: there is none, or one does not parse.
    """
    path, tools = str(given_data(context)), context.factory.make().tools
    mapping = {} if context.config.sft.data is None else context.config.env.columns.mapping()
    rows = read_conversations(path, mapping)
    if not rows:
        raise refusal(path, "at least one conversation", "none", "add rows, or leave out sft.data to ask the expert")
    return [Conversation(name=f"{path}, row {n}", messages=row, tools=tools) for n, row in enumerate(rows, 1)]


async def conversations(context: Context, count: int | None) -> list[Conversation]:
    """The first `count` conversations to imitate (None: all): rows of `[sft] data`, or held by the expert.

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
        raise refusal(
            "[env]", "tasks to demonstrate", "none", "give the environment demonstrations, or leave out the sft stage"
        )
    gate = asyncio.Semaphore(32)

    async def one(task: Task) -> Conversation:
        async with gate:
            return await demonstrate(context, task)

    return list(await asyncio.gather(*map(one, tasks)))


async def demonstrate(context: Context, task: Task) -> Conversation:
    """Let the expert do `task` in a world of its own.

    Raises:
        BadInput: the environment has no expert for it.
    """
    expert = context.factory.expert(task)
    if expert is None:
        way = "write expert(self, task), or set sft.data, or leave this kind of task out of the demonstrations"
        raise refusal(f"task {task.id}", "an expert", "none", way)
    return await converse(context, task, expert)


async def converse(context: Context, task: Task, reply: Callable[[Sequence[Message]], Message]) -> Conversation:
    """Hold one conversation whose replies are `reply(messages so far)`, tools run for real, and score it. It ends where
    the policy's would: a world that never ends is cut short at the limits of the run.

    Raises:
        EnvError: the world raised something, or gave an answer or a score that is none.
    """
    limits = context.config.rollout.limits(task.limits)
    box = await context.boxes.take(task.box) if task.box is not None else None
    session = ExpertSession(reply, limits.max_turns)
    episode = LiveEpisode(task, GuardedEnv(context.factory.make), box, lambda role: session)
    outcome = Outcome(kind="completed", reason="answered")
    try:
        try:
            async with asyncio.timeout(limits.timeout_s):
                await ChatHarness().run(episode)
        except LimitReached:
            outcome = Outcome(kind="truncated", reason="max_turns")
        except TimeoutError:
            outcome = Outcome(kind="truncated", reason="timeout")
        score = await episode.env.score(_trajectory(task, session.messages, outcome))
        return Conversation(
            name=f"task {task.id}",
            messages=session.messages,
            tools=episode.env.tools,
            task=task,
            score=score,
            constraints=tuple(session.constraints),
        )
    finally:
        await episode.env.close()
        if box is not None:
            await box.close()


def _trajectory(task: Task, messages: Sequence[Message], outcome: Outcome) -> Trajectory:
    """A conversation without tokens, as a scorer wants it."""
    segments = tuple(
        Segment(
            index=place,
            parent=place - 1 if place else None,
            source="expert" if message.role == "assistant" else "prompt",
            tokens=(),
            message=message,
        )
        for place, message in enumerate(messages)
    )
    return Trajectory(id=task.id, task=task.id, role="policy", segments=segments, outcome=outcome)
