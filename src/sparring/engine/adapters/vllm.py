"""`VllmEngine`: a vLLM server as an `Engine`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Any
from uuid import uuid4

from sparring.engine.adapters.client import ClientCounts, completion_of, scores_of
from sparring.engine.adapters.vllm_client import StepWatch, VllmClient
from sparring.engine.adapters.vllm_server import VllmServer
from sparring.engine.adapters.vllm_weights import VllmWeights
from sparring.engine.adapters.vllm_wire import (
    GENERATE,
    NO_ADAPTER,
    WHOLE_VOCABULARY,
    SampledTurn,
    generate_body,
    judge_body,
    judged_rows,
    judging_version,
    problem_for_vllm,
)
from sparring.engine.check import EngineLimits, check_request, check_score
from sparring.engine.config import EngineConfig
from sparring.engine.metrics import Latencies
from sparring.engine.prompt_logprobs import prompt_logprobs
from sparring.engine.update import check_model
from sparring.engine.wire import ServedModel
from sparring.errors import EngineError, RequestRefused, boundary
from sparring.generation import Completion, Delta, GenerateRequest, ScoreRequest, Scores
from sparring.types import WeightRef
from sparring.weights.upload import upload_bytes

_ABORT_AGAIN_S = 0.05


@dataclass(eq=False, slots=True)
class _RunningRequest:
    """Running request: its name at the server, and its tokens sampled so far if the request is streamed."""

    request: GenerateRequest
    name: str
    sampled: SampledTurn
    max_new: int
    streams: bool
    aborted: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)
    asked_s: float = field(default_factory=perf_counter)
    began_s: float = 0.0


class VllmEngine:
    """Engine on a vLLM server. Implements `Engine`. It is not exact: vLLM's kernels differ from the trainer's, so
    log-probabilities differ, and random numbers depend on more than the seed and a token's position.

    Args:
        server: started server, closed with this engine.
        name: name of the model in the run; updates of other models are refused.
        version: version of the weights in the server's folder.
        keep_server: whether `close` leaves the server running.

    Attributes:
        latencies: latencies of requests to generate; for streamed requests also up to the first token and per token.
    """

    def __init__(
        self,
        server: VllmServer,
        config: EngineConfig,
        *,
        name: str = "policy",
        version: int = 0,
        dtype: str = "float32",
        keep_server: bool = False,
    ) -> None:
        self.server, self._config, self._name, self._keep_server = server, config, name, keep_server
        self._dtype = dtype
        self._client = VllmClient(server)
        self.weights = VllmWeights(server, self._client, config, engine=name, version=version, dtype=dtype)
        self._watch = StepWatch(self._client, config.vllm.stalled_s)
        # a server may have other clients, and remembers ids for a while
        self._key, self._numbers = uuid4().hex, count()
        self._live: list[_RunningRequest] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts, self.latencies = ClientCounts(), Latencies()
        self._closed = False

    @property
    def version(self) -> int:
        return self.weights.version

    @property
    def metrics(self) -> dict[str, float]:
        """Counts of `ClientCounts` since the start."""
        return dict(self._counts.values)

    def describe(self, instance: str) -> ServedModel:
        """Describe the engine for clients of a server; `instance` is a random name of this start of the server."""
        most, shapes = self.server.max_positions, self.weights.shapes
        return ServedModel(
            model=self._name,
            version=self.version,
            dtype=self._dtype,
            numerics="vllm",
            vocab_size=self.server.vocab_size,
            max_positions=most,
            context=most,  # vLLM does not start with a smaller cache
            token_bytes=0,
            instance=instance,
            state_bytes=upload_bytes(map(math.prod, shapes.values())),
            kind="vllm",
        )

    async def check(self) -> None:
        """Check that vLLM answers. Raises EngineError if vLLM has ended or hangs, or this engine is closed or
        failed."""
        self._check_open()
        await self._watch.check(updating=not self.weights.available.is_set())

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn. The recorded oldest version of keys and values is the version served when the request was
        sent. The true oldest version may be newer if vLLM began later."""
        if request.ends is not None:  # the stop function needs the tokens as they come
            return await completion_of(self.stream(request))
        prompt = await self._prompt_logprobs(request)
        async with self._serving(request, streams=False) as live:
            if not live.aborted:
                live.sampled.take(await self._client.post(GENERATE, self._body(live)))
            return self._completed(live, prompt)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        prompt = await self._prompt_logprobs(request)
        async with self._serving(request, streams=True) as live:
            sampled, num_sent, ended = live.sampled, 0, False
            if live.aborted:
                yield self._completed(live, prompt)
                return
            events = self._client.events(GENERATE, self._body(live))
            async with aclosing(events):
                async for event in events:
                    sampled.take(event)
                    if ended or len(sampled.tokens) == num_sent:
                        continue
                    end = self._end(request, sampled.tokens, num_sent)
                    if end is not None:
                        ended = True
                        await self._tell_abort(live)  # the versions come with the end
                    if not num_sent:
                        self.latencies.began(live)
                    new = slice(num_sent, end)
                    num_sent = len(sampled.tokens) if end is None else end
                    yield Delta(tokens=tuple(sampled.tokens[new]), logprobs=tuple(sampled.logprobs[new]))
            if ended:
                sampled.cut(num_sent)
            yield self._completed(live, prompt)

    async def abort(self, request: str) -> None:
        """End a request. A new request with the prompt and the tokens sampled so far continues with other random
        numbers, because vLLM restarts random numbers with each request."""
        for live in [live for live in self._live if live.request.id == request and not live.aborted]:
            live.aborted = True
            await self._tell_abort(live)
            self._start(self._abort(live))

    async def score(self, request: ScoreRequest) -> Scores:
        """Compute log-probabilities of given tokens by vLLM's prompt_logprobs. A vocabulary above `WHOLE_VOCABULARY` is
        refused: entropies and temperatures other than 1 need the log-probabilities of the whole vocabulary, which vLLM
        sends as text."""
        self._check_score(request)
        answer, version = {}, None
        # again if an update came between: all of it is of one version
        while version is None or judging_version(answer) != version:
            await self._available()
            version = self.version
            answer = await self._client.post(GENERATE, judge_body(self._unique(), request.tokens, -1, request.priority))
        rows = judged_rows(answer, request.first)
        scored = [_distribution(row, request.temperature) for row in rows]
        return scores_of(request, scored, map(_entropy, scored), version)

    async def release(self, conversation: str) -> None:
        """Do nothing: vLLM evicts the least recently used blocks itself."""

    async def drop(self, adapter: str) -> None:
        """Refuse, with RequestRefused: vLLM serves no adapters here."""
        raise RequestRefused(f"adapter {adapter}: expected an engine with adapters, got vLLM; use a native one")

    async def sleep(self) -> None:
        """Refuse, with RequestRefused: vLLM's own sleep needs a GPU."""
        raise RequestRefused("sleep: expected an engine that can sleep, got vLLM; use a native one, or leave it awake")

    async def wake(self, ref: WeightRef) -> None:
        """Serve other weights, as `pull` does: vLLM is always awake."""
        await self.pull(ref)

    async def pull(self, ref: WeightRef) -> None:
        """Serve other weights: pause, load, verify, commit, resume. vLLM computes the publisher's probe while
        everything else is paused, so no request is served by unverified weights.

        `engine.update.live_kv` decides about running requests. keep: they continue with their keys and values;
        recompute: they compute new ones; drain: the update waits until they have finished. Cancelling the caller does
        not stop an update that has begun. Raises EngineError if the engine is closed, or the old weights could not be
        restored."""
        check_model(ref, self._name)
        self._check_open()
        await asyncio.shield(self._start(self._pull(ref)))

    async def _pull(self, ref: WeightRef) -> None:
        if await self.weights.pull(ref):
            self._counts.updated()

    async def close(self) -> None:
        self._closed = True
        self.weights.close()
        self._watch.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._keep_server:
            await asyncio.to_thread(self.server.close)
        await self._client.close()

    # requests

    def _check(self, request: GenerateRequest) -> int:
        """Return the number of tokens that a request may sample. Raises RequestRefused if the request can never be
        served: a token outside the vocabulary, for example, would end vLLM's engine and not the request."""
        vocab_size, most = self.server.vocab_size, self.server.max_positions
        max_new = check_request(request, EngineLimits(vocab_size, most, most))
        if problem := problem_for_vllm(request, vocab_size):
            raise RequestRefused(f"request {request.id}: expected {problem}")
        return max_new

    def _check_score(self, request: ScoreRequest) -> None:
        vocab_size, most = self.server.vocab_size, self.server.max_positions
        if request.adapter is not None:
            raise RequestRefused(f"score {request.id}: expected {NO_ADAPTER.format(request.adapter)}")
        if vocab_size > WHOLE_VOCABULARY:
            why = "vLLM sends all log-probabilities as text; score with a native engine"
            problem = f"a vocabulary of at most {WHOLE_VOCABULARY}, got {vocab_size}; {why}"
            raise RequestRefused(f"score {request.id}: expected {problem}")
        check_score(request, EngineLimits(vocab_size, most, most - 2))  # vLLM samples another token

    def _check_open(self) -> None:
        if self._closed or self.weights.broken:
            closed = f"engine {self._name}: expected a running engine, got a closed one; start another"
            raise EngineError(self.weights.broken or closed)

    async def _available(self) -> None:
        await self.weights.available.wait()
        self._check_open()

    @asynccontextmanager
    async def _serving(self, request: GenerateRequest, *, streams: bool) -> AsyncIterator[_RunningRequest]:
        max_new = self._check(request)
        live = _RunningRequest(request, self._unique(), self._sampled(request), max_new, streams)
        self._live.append(live)
        try:
            await self._available()
            live.sampled = self._sampled(request)  # of the version that is served now
            yield live
        finally:
            self._live.remove(live)
            live.done.set()

    def _sampled(self, request: GenerateRequest) -> SampledTurn:
        recomputes = self._config.update.live_kv == "recompute"
        return SampledTurn(request, self.version, vocab_size=self.server.vocab_size, recomputes=recomputes)

    def _completed(self, live: _RunningRequest, prompt: tuple[float, ...] | None) -> Completion:
        completion = live.sampled.completion(prompt)
        self.latencies.ended(live, len(completion.tokens) if live.streams else 1)
        return self._counts.completed(completion)

    def _body(self, live: _RunningRequest) -> dict[str, Any]:
        vocab_size = self.server.vocab_size
        return generate_body(live.request, live.name, live.max_new, vocab_size=vocab_size, version=self.version)

    def _end(self, request: GenerateRequest, tokens: Sequence[int], num_sent: int) -> int | None:
        """Return the number of `tokens` that belong to the turn, if the request's stop function ends the turn among the
        tokens after `num_sent`; otherwise None."""
        first = max(num_sent, request.sampling.min_tokens - 1)
        if request.ends is None or len(tokens) <= first:
            return None
        with boundary(EngineError, f"request {request.id}: its stop function `ends`"):
            end = request.ends([*request.turn, *tokens], len(tokens) - first)
            return None if end is None else end - request.told

    async def _prompt_logprobs(self, request: GenerateRequest) -> tuple[float, ...] | None:
        if request.prompt_logprobs:
            self._check(request)
        if not request.prompt_logprobs or request.sampling.temperature != 1.0 or len(request.tokens) < 2:
            return await prompt_logprobs(self, request)
        await self._available()  # the complete vocabulary is not needed
        body = judge_body(self._unique(), request.tokens, 0, request.priority)
        rows = judged_rows(await self._client.post(GENERATE, body))
        return tuple(row[token] for row, token in zip(rows, request.tokens[1:], strict=True))

    async def _abort(self, live: _RunningRequest) -> None:
        """Repeat an abort until the request ends: vLLM silently ignores the abort of a request before its
        scheduling."""
        pause_s = _ABORT_AGAIN_S
        while not live.done.is_set():
            try:
                await asyncio.wait_for(live.done.wait(), pause_s)
            except TimeoutError:
                await self._tell_abort(live)
                pause_s *= 2

    async def _tell_abort(self, live: _RunningRequest) -> None:
        await self._client.post("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{live.name}"]})

    # the wire

    def _unique(self) -> str:
        return f"{self._name}-{self._key}-{next(self._numbers)}"

    def _start(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _distribution(logprobs: Mapping[int, float], temperature: float) -> dict[int, float]:
    """Compute log softmax(logits / temperature) from the log-probabilities at temperature 1. Temperature 0 counts as 1,
    as in `token_logprobs`."""
    scaled = {token: value / (temperature or 1.0) for token, value in logprobs.items()}
    most = max(scaled.values())
    total = most + math.log(sum(math.exp(value - most) for value in scaled.values()))
    return {token: value - total for token, value in scaled.items()}


def _entropy(logprobs: Mapping[int, float]) -> float:
    return -sum(math.exp(value) * value for value in logprobs.values() if value > -math.inf)
