"""`Judges`: language models that are asked for verdicts. Replies are kept by what was asked, failures are typed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import xxhash

from sparring.envs.rubrics.config import AskedPart
from sparring.errors import BadInput, EngineError, JudgeError, RequestRefused, boundary
from sparring.generation import Constraint, GenerateRequest, Sampling
from sparring.observe.metrics import Metrics
from sparring.protocols import Engine, Renderer
from sparring.types import Message

T = TypeVar("T")

OpenModel = Callable[[str], Awaitable[tuple[Engine, Renderer]]]
"""A name of `[models]` -> the engine that serves it, and its renderer. Whoever opens an engine closes it."""

KEPT = 100_000
"""Replies that are kept."""

Read = Callable[[str], T | None]
"""A reply's text -> the verdict; None where it is none."""


class Judges:
    """Asks models. One question (model, messages, sampling, seed) is asked once, also where many ask it at the same time.

    Args:
        open_model: opens a model when it is first asked.
        kept: how many replies are kept; the longest unused go first.
    """

    def __init__(self, open_model: OpenModel, *, kept: int = KEPT) -> None:
        self._open_model, self._kept = open_model, kept
        self._models: dict[str, asyncio.Task[tuple[Engine, Renderer]]] = {}
        self._replies: OrderedDict[tuple[object, ...], asyncio.Task[str | None]] = OrderedDict()
        self._asked = 0
        self._metrics = Metrics()

    async def verdict(
        self, part: AskedPart, question: str, read: Read[T], where: str, *, constraint: Constraint | None = None, sample: int = 0
    ) -> T:
        """A model's verdict.

        Args:
            part: who is asked, and how.
            question: what.
            read: the verdict in a reply, None where there is none.
            where: of the part, for errors.
            constraint: what a reply must be, where the part holds it to that.
            sample: which of several verdicts on one question.

        Raises:
            JudgeError: no verdict within the part's retries.
        """
        messages = tuple(Message(role=r, content=c) for r, c in (("system", part.system), ("user", question)) if c)
        why = ""
        for attempt in range(part.retries + 1):
            if attempt:
                await asyncio.sleep(part.retry_delay_s * 2 ** (attempt - 1))
            seed = xxhash.xxh3_64_intdigest(f"{question}\x1f{sample}\x1f{attempt}".encode("utf-8", "surrogatepass")) >> 1
            sampling = Sampling(
                temperature=part.temperature,
                max_tokens=part.max_tokens,
                seed=seed,
                constraint=constraint if part.constrain else None,
            )
            try:
                reply = await self._reply(part, messages, sampling)
            except (RequestRefused, BadInput) as error:  # it will not do better the next time
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
            why = "a reply that was cut short" if reply is None else f"the reply {reply[:200]!r}"
            if part.temperature == 0:
                break  # it would say the same
        raise JudgeError(f"{where}: expected a verdict of {part.model}, got {why}")

    async def check(self, model: str) -> None:
        """Ask a model for a token.

        Raises:
            BadInput: it cannot be opened.
            EngineError: it does not answer.
        """
        with boundary(EngineError, f"judge {model}"):
            engine, renderer = await self._model(model)
            tokens = renderer.render((Message(role="user", content="?"),), ()).tokens
            await engine.generate(GenerateRequest(id=f"check of {model}", tokens=tokens, sampling=Sampling(max_tokens=1)))

    def metrics(self) -> dict[str, float]:
        """Figures since the last call: questions, the share that the cache answered, failures, replies that were no verdict,
        seconds that a reply took."""
        return self._metrics.take()

    async def close(self) -> None:
        """Forget the models, which their owner closes, and drop what is being asked."""
        pending = [task for task in (*self._replies.values(), *self._models.values()) if not task.done()]
        self._models.clear()
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _reply(self, part: AskedPart, messages: Sequence[Message], sampling: Sampling) -> str | None:
        """A reply, from the cache where it was asked before; None where it was cut short."""
        key = (part.model, tuple((m.role, m.content) for m in messages), sampling)
        self._metrics.add("judge/questions", 1, "sum")
        task = self._replies.get(key)
        self._metrics.add("judge/cache_hits", float(task is not None))
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask(part, messages, sampling))
            self._replies[key] = task
            task.add_done_callback(lambda done: _failed(done) and self._replies.pop(key, None))
        self._replies.move_to_end(key)
        while len(self._replies) > self._kept and next(iter(self._replies.values())).done():
            self._replies.popitem(last=False)
        return await asyncio.shield(task)  # others may wait for it when this one is cancelled

    async def _ask(self, part: AskedPart, messages: Sequence[Message], sampling: Sampling) -> str | None:
        where = f"judge {part.model}"
        with boundary(EngineError, where):
            engine, renderer = await self._model(part.model)
            self._asked += 1
            tokens = renderer.render(messages, ()).tokens
            asked = replace(sampling, stop=renderer.stop_ids)
            request = renderer.bind(GenerateRequest(id=f"{where}/{self._asked}", tokens=tokens, sampling=asked))
            limit = asyncio.timeout(part.timeout_s)
            clock = asyncio.get_running_loop().time
            started = clock()
            try:
                async with limit:
                    done = await engine.generate(request)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise EngineError(f"{where}: no reply after {part.timeout_s:g} s") from None
            self._metrics.add("judge/reply_s", clock() - started)
            if done.finish_reason == "abort":
                raise EngineError(f"{where}: the engine gave up")
            if done.finish_reason == "length":
                return None
            return renderer.parse(done.tokens, (), prompt=tokens).content.strip()

    async def _model(self, name: str) -> tuple[Engine, Renderer]:
        task = self._models.get(name)
        if task is None or (task.done() and _failed(task)):
            task = self._models[name] = asyncio.ensure_future(self._open_model(name))
        return await asyncio.shield(task)


def _failed(task: asyncio.Task[object]) -> bool:
    return task.cancelled() or task.exception() is not None
