"""`Judges`: language models that give verdicts, with a cache of replies and typed failures."""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import xxhash

from sparring.backoff import retry_pause_s
from sparring.envs.rubrics.config import AskedPart
from sparring.errors import BadInput, EngineError, JudgeError, LimitReached, RequestRefused, boundary
from sparring.generation import Constraint, GenerateRequest, Sampling
from sparring.observe.metrics import Metrics
from sparring.protocols import Engine, Renderer
from sparring.types import Message, ToolSpec

T = TypeVar("T")


class Replies(Protocol):
    """Source of replies, such as a chat endpoint."""

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: Sampling) -> Message:
        """Return the reply to a conversation. Raises `LimitReached` if the reply was cut short."""

    async def close(self) -> None:
        """Close its connections."""


class Record(Protocol):
    """Durable record of replies, such as a run's `Store`."""

    def get(self, key: str) -> Any | None:
        """Return the value recorded under a key, or None."""

    def put(self, key: str, value: Any) -> None:
        """Record plain data under a key."""


OpenModel = Callable[[str], Awaitable[Replies]]
"""Function: name of a model in `[models]` -> the model's source of replies."""

KEPT = 100_000
"""Maximum number of replies in memory."""

Read = Callable[[str], T | None]
"""Parser: text of a reply -> verdict; None if the reply is no verdict."""


class EngineReplies:
    """Source of replies that samples with an engine, and closes it. Implements `Replies`. The model's
    `name` is for request ids and errors."""

    def __init__(self, engine: Engine, renderer: Renderer, name: str) -> None:
        self._engine, self._renderer, self._name = engine, renderer, name
        self._num_requests = 0

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: Sampling) -> Message:
        self._num_requests += 1
        tokens = self._renderer.render(messages, tools).tokens
        drawn = replace(sampling, stop=self._renderer.stop_ids)
        request = GenerateRequest(id=f"{self._name}/{self._num_requests}", tokens=tokens, sampling=drawn)
        done = await self._engine.generate(self._renderer.bind(request))
        if done.finish_reason == "abort":
            raise EngineError(f"{request.id}: the engine aborted the request")
        if done.finish_reason == "length":
            raise LimitReached("max_tokens", f"{request.id}: cut short after {len(done.tokens)} tokens")
        return self._renderer.parse(done.tokens, tools, prompt=tokens)

    async def close(self) -> None:
        await self._engine.close()


class Judges:
    """Cached access to judging models. Each question (model, messages, sampling, seed) is asked only once, even by
    concurrent callers. With a record, this holds for as long as the record exists; without one, for as long as the
    reply is in memory.

    Args:
        open_model: opens a model for its first question.
        num_kept: maximum number of replies in memory; the least recently used is dropped first.
    """

    def __init__(self, open_model: OpenModel, *, num_kept: int = KEPT) -> None:
        self._open_model, self._num_kept = open_model, num_kept
        self._models: dict[str, asyncio.Task[Replies]] = {}
        self._replies: OrderedDict[str, asyncio.Task[str | None]] = OrderedDict()
        self._record: Record | None = None
        self._identity_of: Callable[[str], str] = str
        self._metrics = Metrics()

    def remember(self, record: Record, who: Callable[[str], str]) -> None:
        """Record every reply in `record`, and answer recorded questions from it.

        Args:
            record: store of replies, under `judge/` and a digest of the question.
            who: function from a model's name to its identity, such as its weights; a new identity makes a new question.
        """
        self._record, self._identity_of = record, functools.cache(who)

    async def verdict(
        self,
        part: AskedPart,
        question: str,
        read: Read[T],
        where: str,
        *,
        constraint: Constraint | None = None,
        sample: int = 0,
    ) -> T:
        """Return a model's verdict.

        Args:
            part: names the model and has its prompt settings.
            constraint: constraint on the reply, used if the part has `constrain`.
            sample: index of the verdict among several on one question.

        Raises:
            JudgeError: no verdict within the part's retries.
        """
        both = Message(role="system", content=part.system), Message(role="user", content=question)
        messages = tuple(message for message in both if message.content)
        why, unread = "", 0
        for attempt in range(part.retries + 1):
            if attempt:
                await asyncio.sleep(retry_pause_s(part.retry_delay_s, attempt, question, sample))
            # A failed request is sent again unchanged (law 6), so that later askers find the cached reply; a reply
            # without a verdict is sampled with another seed.
            seed = xxhash.xxh3_64_intdigest(f"{question}\x1f{sample}\x1f{unread}".encode("utf-8", "surrogatepass")) >> 1
            sampling = Sampling(
                temperature=part.temperature,
                max_tokens=part.max_tokens,
                seed=seed,
                constraint=constraint if part.constrain else None,
            )
            try:
                reply = await self._reply(part, messages, sampling)
            except (RequestRefused, BadInput) as error:  # a retry would fail the same way
                why = str(error)
                break
            except EngineError as error:
                why = str(error)
                self._metrics.add("judge/failures", 1, "sum")
                continue
            verdict = None if reply is None else read(reply)
            if verdict is not None:
                return verdict
            self._metrics.add("judge/unread", 1, "sum")
            unread += 1
            why = "a reply that was cut short" if reply is None else f"the reply {reply[:200]!r}"
            if part.temperature == 0:
                break  # greedy sampling would repeat the reply
        raise JudgeError(f"{where}: expected a verdict of {part.model}, got {why}")

    async def check(self, model: str) -> None:
        """Check that a model replies, by sampling one token.

        Raises:
            BadInput: the model cannot be opened.
            EngineError: the model does not reply.
        """
        with boundary(EngineError, f"model {model}"):
            try:
                await (await self._model(model)).reply((Message(role="user", content="?"),), (), Sampling(max_tokens=1))
            except LimitReached:
                pass  # expected: one token is the limit

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call: questions, cache hit rate, failures, replies without a verdict,
        seconds per reply."""
        return self._metrics.take()

    async def close(self) -> None:
        """Cancel pending questions and close the models; a later question opens its model again."""
        opened, self._models = [*self._models.values()], {}
        pending = [task for task in (*self._replies.values(), *opened) if not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in opened:
            if not _has_failed(task):
                await task.result().close()

    async def _reply(self, part: AskedPart, messages: Sequence[Message], sampling: Sampling) -> str | None:
        """Return a reply, from the cache if it was requested before; None if it was truncated."""
        key = self._key(part.model, messages, sampling)
        task = self._replies.get(key)
        recorded = self._record.get(key) if task is None and self._record is not None else None
        self._metrics.add("judge/questions", 1, "sum")
        self._metrics.add("judge/cache_hits", float(task is not None or recorded is not None))
        if recorded is not None:
            reply: str | None = recorded["reply"]
            return reply
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask_and_record(key, part, messages, sampling))
            self._replies[key] = task
            task.add_done_callback(lambda done: _has_failed(done) and self._replies.pop(key, None))
        self._replies.move_to_end(key)
        while len(self._replies) > self._num_kept and next(iter(self._replies.values())).done():
            self._replies.popitem(last=False)
        return await asyncio.shield(task)  # other callers may still wait for it if this one is cancelled

    def _key(self, model: str, messages: Sequence[Message], sampling: Sampling) -> str:
        question = (self._identity_of(model), [(m.role, m.content) for m in messages], sampling)
        return f"judge/{xxhash.xxh3_128_hexdigest(repr(question).encode('utf-8', 'surrogatepass'))}"

    async def _ask_and_record(
        self, key: str, part: AskedPart, messages: Sequence[Message], sampling: Sampling
    ) -> str | None:
        reply = await self._ask(part, messages, sampling)
        if self._record is not None:
            self._record.put(key, {"reply": reply})
        return reply

    async def _ask(self, part: AskedPart, messages: Sequence[Message], sampling: Sampling) -> str | None:
        where = f"judge {part.model}"
        with boundary(EngineError, where):
            model = await self._model(part.model)
            limit = asyncio.timeout(part.timeout_s)
            clock = asyncio.get_running_loop().time
            started = clock()
            try:
                async with limit:
                    reply = await model.reply(messages, (), sampling)
            except LimitReached:
                return None
            except TimeoutError:
                if not limit.expired():
                    raise
                raise EngineError(f"{where}: no reply after {part.timeout_s:g} s") from None
            self._metrics.add("judge/reply_s", clock() - started)
            # JSON may hold half a surrogate pair, which cannot be recorded
            return reply.content.strip().encode("utf-8", "replace").decode()

    async def _model(self, name: str) -> Replies:
        task = self._models.get(name)
        if task is None or (task.done() and _has_failed(task)):
            task = self._models[name] = asyncio.ensure_future(self._open_model(name))
        return await asyncio.shield(task)


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order; the first failure cancels the others and is
    raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _has_failed(task: asyncio.Task[object]) -> bool:
    return task.cancelled() or task.exception() is not None
