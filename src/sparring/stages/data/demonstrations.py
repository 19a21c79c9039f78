"""Conversations to imitate: read from a file, or played by the environment's scripted expert with real tools."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from sparring.backoff import retry_pause_s
from sparring.envs.threads import THREADS
from sparring.errors import (
    BadInput,
    EnvError,
    InfraError,
    RequestRefused,
    TaskError,
    Unanswered,
    boundary,
    refusal,
    refusal_in,
)
from sparring.generation import Constraint, Rendered
from sparring.observe.wait_reports import waiting
from sparring.protocols import EnvFactory, Expert, Renderer
from sparring.recipe.run_config import RunConfig
from sparring.record.branches import Transcript
from sparring.record.session import OpenSession
from sparring.record.token_counts import Imitator
from sparring.record.transcript import TextRecorder, TextRequest
from sparring.rollout.attempts import Attempt
from sparring.rollout.config import RolloutConfig
from sparring.rollout.runner import RolloutRunner
from sparring.stages.context import Context, RunFiles
from sparring.stages.data.traces import transcript_of
from sparring.stages.models.context_length import outline_of
from sparring.stages.models.imitator import imitator_of
from sparring.stages.models.player import RoleRecorder
from sparring.tasks.files import read_conversations
from sparring.tasks.formats import located
from sparring.types import POLICY, Message, Score, StopReason, Task, ToolSpec

Replies = Expert | Mapping[str, Expert]
"""Function of the messages so far that returns the next reply; or one such function for each role, by name."""

AT_ONCE = 32
"""Maximum number of demonstrations played at a time; `[rollout]` may allow fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Finished conversation of one branch of one role.

    Attributes:
        task: task that was played; None for a row of a file.
        score: score of the environment's own scorer; None for a row of a file.
        constraints: constraints that the environment set for replies.
        imitated, prompt: fields of the branch's `Transcript`.
        cut_by: limit that cut the rollout short; None for a complete one.
    """

    name: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    task: Task | None = None
    score: Score | None = None
    constraints: tuple[Constraint, ...] = ()
    role: str = POLICY
    imitated: tuple[int, ...] | None = None
    prompt: int | None = None
    cut_by: StopReason | None = None


async def demonstrations(context: Context, renderer: Renderer, longest: int) -> list[tuple[str, Rendered]]:
    """Return all demonstrations of the run as (name, tokens with their sampled marks): the rows of the file
    (`conversation_file`), or the expert's conversations that solve their task, in task order."""
    imitator = None if conversation_file(context) is not None else imitator_of(context, renderer)
    solved = solved_conversations(await conversations(context, None, imitator))
    return [(c.name, rendered(c, renderer, longest)) for c in solved]


def solved_conversations(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Return the conversations that solve their task, and the conversations without a task.

    Raises:
        BadInput: fewer than nine in ten conversations are left.
    """
    solved = [c for c in conversations if c.task is None or (c.score is not None and c.score.success is not False)]
    if len(solved) < 0.9 * len(conversations):
        cuts = Counter(c.cut_by for c in conversations if c not in solved and c.cut_by is not None)
        actual = ", ".join(
            [f"{len(solved)} of {len(conversations)}", *(f"{n} cut short by {limit}" for limit, n in cuts.items())]
        )
        fix = "raise that limit, or correct the expert" if cuts else "correct the expert"
        raise refusal("[env]", "an expert that solves nine in ten tasks", actual, fix)
    return solved


def rendered(conversation: Conversation, renderer: Renderer, longest: int) -> Rendered:
    """Return the conversation as tokens with marks of the replies.

    Raises:
        BadInput: the chat format cannot write the conversation, or it has more than `longest` tokens.
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
        raise refusal_in(conversation.name, error) from error
    if len(tokens.tokens) > longest:
        raise too_long(conversation.name, longest, f"a demonstration of {len(tokens.tokens)}")
    return tokens


def too_long(where: str, positions: int, actual: str) -> BadInput:
    """Return the error for a text with more tokens than the policy has positions."""
    expected = f"fewer tokens than the {positions} positions of the model"
    return refusal(where, expected, actual, "shorten it, raise models.policy.init.max_positions, or take another model")


def conversation_file(files: RunFiles) -> str | None:
    """Return the file of conversations to imitate: `[sft] data`, or the output of a finished collect stage, else
    None."""
    return files.config.sft.data or (files.done("collect") or {}).get("data")


def read_demonstrations(files: RunFiles, factory: EnvFactory) -> list[Conversation]:
    """Return the rows of the file of conversations to imitate.

    Raises:
        BadInput: the file has no row, or a row does not parse.
    """
    path, tools = str(conversation_file(files)), factory.make().tools
    recorded = files.config.sft.data is None
    mapping = {} if recorded else files.config.world.columns.mapping()
    rows = read_conversations(path, mapping, recorded=recorded)
    if not rows:
        raise refusal(path, "at least one conversation", "none", "add rows, or leave out sft.data to ask the expert")
    column = mapping.get("messages", "messages")
    places = zip(rows, located(path), strict=True)
    return [
        conversation_of(f"{path}, row {number}", transcript_of(row, messages, tools, where, column))
        for number, (messages, (_, where, row)) in enumerate(places, 1)
    ]


def conversation_of(name: str, transcript: Transcript, **of: Any) -> Conversation:
    """Return a branch as a conversation to imitate. `of`: further fields of `Conversation`, such as role and score."""
    return Conversation(
        name=name,
        messages=transcript.messages,
        tools=transcript.tools,
        constraints=transcript.constraints,
        imitated=transcript.imitated,
        prompt=transcript.prompt,
        **of,
    )


async def conversations(context: Context, most: int | None, imitator: Imitator | None = None) -> list[Conversation]:
    """Return the first `most` conversations to imitate (all if `most` is None): rows of the file, else the expert's."""
    if conversation_file(context) is not None:
        return read_demonstrations(context, context.factory)[:most]
    return await play_experts(context, demonstration_tasks(context.config, context.factory)[:most], imitator)


def demonstration_tasks(config: RunConfig, factory: EnvFactory) -> list[Task]:
    """Return the tasks that experts demonstrate.

    Raises:
        BadInput: the environment has no tasks to demonstrate.
    """
    source = factory.tasks("demonstration", config.run.seed)
    tasks = list(iter(source.next, None))
    if not tasks:
        expected = "tasks to demonstrate (a fresh model's tokenizer and the sft stage learn from demonstrations)"
        way = advice_without_expert(config, "raise the environment's demonstrations", "leave out the sft stage")
        raise refusal("[env]", expected, "none", way)
    return tasks


async def play_experts(context: Context, tasks: Sequence[Task], imitator: Imitator | None) -> list[Conversation]:
    """Have experts play tasks, as many at once as the run allows; return the conversations of the policy's roles."""
    gate = asyncio.Semaphore(min(AT_ONCE, context.config.rollout.max_concurrent_rollouts))
    stage = Demonstrations(context, imitator, lambda sentence: context.sink.event("demonstrations", sentence))

    async def one(task: Task) -> list[Conversation]:
        async with gate:
            return await stage.play_expert(task, context.config.rollout.retries.rebuilds)

    played = await asyncio.gather(*map(one, tasks))
    return [each for of_task in played for each in of_task if context.config.rollout.speaks(each.role)]


def advice_without_expert(config: RunConfig, own: str, of_sft: str) -> str:
    """Return the advice for an environment without demonstrations: `own`; `of_sft` if the run has the sft stage, else a
    checkpoint, because then only a fresh tokenizer needs demonstrations; or `sft.data`."""
    other = "start from a checkpoint (models.policy.path)"
    return f"{own}, or {of_sft if 'sft' in config.run.stages else other}, or set sft.data"


class Demonstrations:
    """Player of rollouts with scripted replies and real tools; each rollout has its own environment.

    Args:
        imitator: policy that will imitate the conversations: they must fit its context, and agent programs get its
            limits. None: tokens are not counted.
        fits: whether a conversation longer than the imitator's context is refused.
    """

    def __init__(
        self,
        context: Context,
        imitator: Imitator | None = None,
        report: Callable[[str], None] = lambda sentence: None,
        *,
        fits: bool = True,
    ) -> None:
        config = context.config.rollout
        if config.rewards.within_s is not None:
            at_once = msgspec.structs.replace(
                config.rewards, within_s=0.0
            )  # rewards from outside are for training only
            config = msgspec.structs.replace(config, rewards=at_once)
        self._context, self._config, self._imitator, self._report = context, config, imitator, report
        self._fits = fits
        self._scripts, self._numbers = _Scripts(config, imitator), count()
        self._runner = RolloutRunner(
            context.factory,
            context.boxes,
            self._scripts,
            context.harness,
            config,
            executors=THREADS.executor,
            box_starts=context.box_starts,
            report=report,
        )

    async def play_expert(self, task: Task, retries: int = 0) -> list[Conversation]:
        """Have the expert play `task`; return a conversation for each branch of each role that was asked.

        Args:
            retries: number of further tries after the infrastructure broke.

        Raises:
            BadInput: the task or one of its roles has no expert; also for the reasons of `play`.
            InfraError: for the reasons of `play`.
        """
        for retry in range(1, retries + 1):
            try:
                return await self.play(task, self._expert(task))
            except (RequestRefused, TaskError):  # a further try would fail alike
                raise
            except InfraError as error:
                self._report(f"task {task.id} is played again: {error}")
            await asyncio.sleep(retry_pause_s(self._config.retries.delay_s, retry, "demonstration", task.id))
        return await self.play(task, self._expert(task))

    async def play(self, task: Task, replies: Replies) -> list[Conversation]:
        """Play and score one rollout with scripted replies, within the limits of the run.

        Args:
            replies: script of the replies; with several roles in the environment, one script for each role.

        Returns:
            A conversation for each branch of each role that was asked, at least one.

        Raises:
            InfraError: the environment or the script raised or returned something invalid, or the infrastructure broke.
            BadInput: the harness requested no reply, or named a role without a script; or the conversation does not fit
                the imitator's context.
        """
        name = f"demonstration/{next(self._numbers)}/{task.id}"
        with self._scripts.of(name, task, replies), waiting(f"task {task.id}", self._runner.waits.awaited):
            played = await self._runner.attempt(task, rollout_id=name, index=0, seed=task.seed)
        for error in (played.error, *_drain(self._runner.close_failures)):
            if isinstance(error, Unanswered):
                raise _no_requests(task, self._config.harness, error)
            if error is not None:
                raise error
        outcomes = [each.outcome.reason for each in played.rollout.trajectories]
        if self._imitator is not None and self._fits and "context_length" in outcomes:
            positions = outline_of(self._context.input("sft")).max_positions
            raise _over_context(task, self._imitator.max_context, positions)
        if not played.transcripts and self._imitator is not None and not self._fits:
            return await Demonstrations(self._context).play(task, replies)  # not even the first prompt fits
        if not played.transcripts:
            actual = f"{played.rollout.outcome.reason} before the first reply for task {task.id}"
            raise refusal("rollout.harness", "a harness that is answered", actual, "raise that limit")
        return _conversations_of(task, played)

    def _expert(self, task: Task) -> Replies:
        """Return a fresh expert for a task."""
        expert = self._context.factory.expert(task)
        if expert is None:
            of_sft = "leave this kind of task out of the demonstrations"
            way = advice_without_expert(self._context.config, "write expert(self, task)", of_sft)
            raise refusal(f"task {task.id}", "an expert", "none", way)
        return expert


class _Scripts:
    """Scripts of the rollouts that are in progress. Implements `rollout.episode.SessionRecorder`."""

    def __init__(self, config: RolloutConfig, imitator: Imitator | None) -> None:
        self._config, self._imitator = config, imitator
        self._recorders: dict[str, RoleRecorder] = {}

    @contextmanager
    def of(self, rollout_id: str, task: Task, replies: Replies) -> Iterator[None]:
        """Answer the requests of a rollout from `replies` while the context is open."""

        async def reply(request: TextRequest) -> Message:
            script = replies.get(request.role) if isinstance(replies, Mapping) else replies
            if script is None:
                raise refusal(f"task {task.id}", f"an expert for the role {request.role}", "none", "add it to `expert`")
            with boundary(EnvError, "env.expert"):
                scripted = script(request.messages)
                if not isinstance(scripted, Message):
                    raise TypeError(f"expected a Message(role='assistant', content=...), got {scripted!r:.80}")
                return scripted

        uncounted = TextRecorder(reply, "expert")
        others = {role: uncounted for role in self._config.roles if not self._config.speaks(role)}
        self._recorders[rollout_id] = RoleRecorder(TextRecorder(reply, "expert", self._imitator), others)
        try:
            yield
        finally:
            del self._recorders[rollout_id]

    def open(self, task: Task, *, rollout_id: str, seed: int, role: str, admission: int = 0) -> OpenSession:
        recorder = self._recorders[rollout_id]
        return recorder.open(task, rollout_id=rollout_id, seed=seed, role=role, admission=admission)


def _conversations_of(task: Task, played: Attempt) -> list[Conversation]:
    score, several = played.score, len(played.transcripts) > 1
    score = None if score is not None and (score.reward, score.success) == (None, None) else score
    outcome = played.rollout.outcome
    cut_by = outcome.reason if outcome.kind == "truncated" else None
    conversations = []
    for role, branches in played.transcripts.items():
        name = f"task {task.id}, {role}" if several else f"task {task.id}"
        names = [name] if len(branches) == 1 else [f"{name}, branch {number}" for number in range(1, len(branches) + 1)]
        conversations += [
            conversation_of(name, branch, task=task, score=score, role=role, cut_by=cut_by)
            for name, branch in zip(names, branches, strict=True)
        ]
    return conversations


def _drain(failures: deque[InfraError]) -> list[InfraError]:
    taken = list(failures)
    failures.clear()
    return taken


def _no_requests(task: Task, harness: str, error: Unanswered) -> BadInput:
    reason = str(error).partition(": ")[2]
    actual = f"{harness!r}, which {reason} for task {task.id}"
    actual = actual if reason == "requested no reply" else f"for task {task.id}: {error}"
    fix = "let it ask for every reply: `await episode.session().complete(messages)`, or by the client it has"
    return refusal("rollout.harness", "a harness that requests its replies from the session", actual, fix)


def _over_context(task: Task, room: int, positions: int) -> BadInput:
    """Return the error for an expert whose prompts or replies do not fit the policy's context of `room` tokens. If its
    model has more `positions`, the engine's cache is the limit."""
    actual = f"more in the demonstration of task {task.id}"
    if room < positions:
        return refusal("engine.kv.bytes", f"prompts of fewer than the {room} tokens of the cache", actual, "raise it")
    return too_long(f"task {task.id}", room, "a longer demonstration")
