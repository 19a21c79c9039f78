"""Conversations to imitate: read from a file, or held by the environment's scripted expert, its tools run for real."""

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
from sparring.errors import BadInput, EnvError, InfraError, RequestRefused, TaskError, Unanswered, boundary, refusal
from sparring.generation import Constraint, Rendered
from sparring.protocols import Expert, Renderer
from sparring.record.branches import Transcript
from sparring.record.imitated import Imitator
from sparring.record.session import OpenSession
from sparring.record.transcript import TextRecorder, TextRequest
from sparring.rollout.attempts import Attempt
from sparring.rollout.config import RolloutConfig
from sparring.rollout.runner import RolloutRunner
from sparring.stages.context import Context
from sparring.stages.data.traces import transcript_of
from sparring.stages.models.context_length import outline_of
from sparring.stages.models.imitator import imitator_of
from sparring.stages.models.role_models import RoleRecorder
from sparring.tasks.files import read_conversations
from sparring.tasks.formats import located
from sparring.types import POLICY, Message, Score, StopReason, Task, ToolSpec

Replies = Expert | Mapping[str, Expert]
"""Function of the messages so far that says the next reply, or such a function for each role, by name."""

AT_ONCE = 32
"""Most demonstrations that are played at a time, where `[rollout]` allows as many rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Finished conversation of one branch of one role. `task` and `score`, the one of the world's own scorer, are None
    for a row of a file; `constraints` are those that the world set for replies; `imitated` and `prompt` are those of
    its `Transcript`; `cut_by` is the limit at which its rollout ended, None of one that came to its end."""

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
    """Return every demonstration of the run, as (name, tokens with their sampled marks): the rows of `[sft] data`, or
    the expert's conversations that solve their task, in task order.

    Args:
        longest: most tokens of one.

    Raises:
        BadInput: there is nothing to imitate, a row does not parse or is longer, or the expert solves fewer than nine
            in ten.
    """
    imitator = None if given_data(context) is not None else imitator_of(context, renderer)
    solved = solving(await conversations(context, None, imitator))
    return [(c.name, rendered(c, renderer, longest)) for c in solved]


def solving(shown: Sequence[Conversation]) -> list[Conversation]:
    """Return the conversations that solve their task; one of no task is taken to.

    Raises:
        BadInput: they are fewer than nine in ten.
    """
    solved = [c for c in shown if c.task is None or (c.score is not None and c.score.success is not False)]
    if len(solved) < 0.9 * len(shown):
        cuts = Counter(c.cut_by for c in shown if c not in solved and c.cut_by is not None)
        got = ", ".join([f"{len(solved)} of {len(shown)}", *(f"{n} cut short by {limit}" for limit, n in cuts.items())])
        do = "raise that limit, or correct the expert" if cuts else "correct the expert"
        raise refusal("[env]", "an expert that solves nine in ten tasks", got, do)
    return solved


def rendered(conversation: Conversation, renderer: Renderer, longest: int) -> Rendered:
    """Return the conversation as tokens, the replies marked.

    Args:
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
    recorded = context.config.sft.data is None
    mapping = {} if recorded else context.config.world.columns.mapping()
    rows = read_conversations(path, mapping, recorded=recorded)
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


async def conversations(context: Context, most: int | None, imitator: Imitator | None = None) -> list[Conversation]:
    """Return the conversations to imitate: the first `most` (None: all) rows of `[sft] data`, or those of the first
    `most` tasks, held by the expert. `imitator` is that of `Demonstrations`.

    Raises:
        BadInput: there is none, a row does not parse, or the environment has no expert for a task.
    """
    if given_data(context) is not None:
        return given_conversations(context)[:most]
    return await demonstrated(context, demonstrated_tasks(context)[:most], imitator)


def demonstrated_tasks(context: Context) -> list[Task]:
    """Return the tasks that experts demonstrate.

    Raises:
        BadInput: there is none.
    """
    source = context.factory.tasks("demonstration", context.config.run.seed)
    tasks = list(iter(source.next, None))
    if not tasks:
        way = without_expert(context, "give the environment demonstrations", "leave out the sft stage")
        raise refusal("[env]", "tasks to demonstrate", "none", way)
    return tasks


async def demonstrated(context: Context, tasks: Sequence[Task], imitator: Imitator | None) -> list[Conversation]:
    """Let experts do tasks, as many at once as the run allows. Return the conversations of the roles of the policy.

    Raises:
        BadInput: the environment has no expert for a task, or as `Demonstrations.played`.
        InfraError: likewise.
    """
    gate = asyncio.Semaphore(min(AT_ONCE, context.config.rollout.max_concurrent_rollouts))
    stage = Demonstrations(context, imitator, lambda sentence: context.sink.event("demonstrations", sentence))

    async def one(task: Task) -> list[Conversation]:
        async with gate:
            return await stage.shown(task, context.config.rollout.retries)

    played = await asyncio.gather(*map(one, tasks))
    return [each for of_task in played for each in of_task if context.config.rollout.speaks(each.role)]


def without_expert(context: Context, own: str, of_sft: str) -> str:
    """Return what to do where the environment demonstrates nothing: `own` is what its author can, `of_sft` what else
    helps where the sft stage imitates the demonstrations. Without that stage, a fresh model's tokenizer is what they
    are for."""
    other = "start from a checkpoint (models.policy.path)"
    return f"{own}, or {of_sft if 'sft' in context.config.run.stages else other}, or set sft.data"


async def demonstrate(context: Context, task: Task, imitator: Imitator | None = None) -> list[Conversation]:
    """Let the expert do `task` once. Returns and raises as `Demonstrations.shown`; `imitator` is that of its class."""
    return await Demonstrations(context, imitator).shown(task)


async def converse(
    context: Context, task: Task, replies: Replies, imitator: Imitator | None = None
) -> list[Conversation]:
    """Play one rollout whose replies are scripted, which may outgrow the context of the policy: only training needs
    room. Returns and raises as `Demonstrations.played`; `imitator` is that of its class, and renders the prompts."""
    return await Demonstrations(context, imitator, fits=False).played(task, replies)


class Demonstrations:
    """Rollouts of a run whose replies are scripted, its tools run for real. Each has a world of its own.

    Args:
        context: of the run, whose harness holds the conversations.
        imitator: the policy, where it is to imitate its roles: no prompt of them is longer than its context, and a
            program is told so. None: ids are not counted.
        report: called with a sentence for what a reader of the run has to know.
        fits: whether a conversation that outgrows the imitator's context is refused.
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
        if config.rewards_within_s is not None:
            config = msgspec.structs.replace(config, rewards_within_s=0.0)  # whoever judges trained ones is not awaited
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
            report=report,
        )

    async def shown(self, task: Task, retries: int = 0) -> list[Conversation]:
        """Let the expert do `task`: a conversation for each branch of each role that was asked.

        Args:
            retries: number of times that it is played again, from its beginning, where the infrastructure broke it.

        Raises:
            BadInput: the environment has no expert for it, or none for one of its roles, or as `played`.
            InfraError: as `played`.
        """
        for retry in range(1, retries + 1):
            try:
                return await self.played(task, self._expert(task))
            except (RequestRefused, TaskError):  # it will be the same the next time
                raise
            except InfraError as error:
                self._report(f"task {task.id} is played again: {error}")
            await asyncio.sleep(retry_pause_s(self._config.retry_delay_s, retry, "demonstration", task.id))
        return await self.played(task, self._expert(task))

    async def played(self, task: Task, replies: Replies) -> list[Conversation]:
        """Play one rollout whose replies are scripted, and score it. It ends where the policy's would: a world that
        never ends is cut short at the limits of the run.

        Args:
            replies: what is said to the messages so far; such a function for each role, by name, where there are
                several.

        Returns:
            The conversation of each branch of each role that was asked, at least one.

        Raises:
            InfraError: the world or the script raised something, the world gave an answer or a score that is none, or
                the infrastructure broke it.
            BadInput: the harness asked nobody, or a role that the world does not name or for which nothing is scripted,
                or the imitator has no room for the conversation.
        """
        name = f"demonstration/{next(self._numbers)}/{task.id}"
        with self._scripts.of(name, task, replies):
            played = await self._runner.attempt(task, rollout_id=name, index=0, seed=task.seed)
        for error in (played.error, *_taken(self._runner.close_failures)):
            if isinstance(error, Unanswered):
                raise _unanswered(task, self._config.harness, error)
            if error is not None:
                raise error
        outcomes = [each.outcome.reason for each in played.rollout.trajectories]
        if self._imitator is not None and self._fits and "context_length" in outcomes:
            raise _no_room(self._context, task, self._imitator.max_context)
        if not played.transcripts and self._imitator is not None and not self._fits:
            return await Demonstrations(self._context).played(task, replies)  # not even its first prompt does
        if not played.transcripts:
            got = f"{played.rollout.outcome.reason} before the first reply for task {task.id}"
            raise refusal("rollout.harness", "a harness that is answered", got, "raise that limit")
        return _conversations_of(task, played)

    def _expert(self, task: Task) -> Replies:
        """Return the expert for a task, which has seen nothing yet.

        Raises:
            BadInput: there is none.
        """
        expert = self._context.factory.expert(task)
        if expert is None:
            of_sft = "leave this kind of task out of the demonstrations"
            way = without_expert(self._context, "write expert(self, task)", of_sft)
            raise refusal(f"task {task.id}", "an expert", "none", way)
        return expert


class _Scripts:
    """Scripts of the rollouts that are under way. Implements `rollout.episode.SessionRecorder`.

    Args:
        config: says which roles the policy speaks for.
        imitator: counts the ids of these; None: nobody does.
    """

    def __init__(self, config: RolloutConfig, imitator: Imitator | None) -> None:
        self._config, self._imitator = config, imitator
        self._recorders: dict[str, RoleRecorder] = {}

    @contextmanager
    def of(self, rollout_id: str, task: Task, replies: Replies) -> Iterator[None]:
        """Let `replies` speak in a rollout for as long as the context lasts."""

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
    shown = []
    for role, branches in played.transcripts.items():
        name = f"task {task.id}, {role}" if several else f"task {task.id}"
        names = [name] if len(branches) == 1 else [f"{name}, branch {number}" for number in range(1, len(branches) + 1)]
        of = {"task": task, "score": score, "role": role, "cut_by": cut_by}
        shown += [spoken(*branch, **of) for branch in zip(names, branches, strict=True)]
    return shown


def _taken(failures: deque[InfraError]) -> list[InfraError]:
    """Return failures and forget them: they are those of one rollout."""
    taken = list(failures)
    failures.clear()
    return taken


def _unanswered(task: Task, harness: str, error: Unanswered) -> BadInput:
    """Return the refusal of a harness that asked for nothing, or was refused all that it asked for."""
    reason = str(error).partition(": ")[2]
    got = f"{harness!r}, which {reason} for task {task.id}"
    got = got if reason == "requested no reply" else f"for task {task.id}: {error}"
    do = "let it ask for every reply: `await episode.session().complete(messages)`, or by the client it has"
    return refusal("rollout.harness", "a harness that requests its replies from the session", got, do)


def _no_room(context: Context, task: Task, room: int) -> BadInput:
    """Return the refusal of an expert whose prompts or replies do not fit the policy's context of `room` tokens."""
    got = f"more in the demonstration of task {task.id}"
    if room < outline_of(context.input("sft")).max_positions:
        return refusal("engine.kv_bytes", f"prompts of fewer than the {room} tokens of the cache", got, "raise it")
    return too_long(f"task {task.id}", room, "a longer demonstration")
