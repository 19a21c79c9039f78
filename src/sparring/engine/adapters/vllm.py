"""`VllmEngine`: a vLLM server as an `Engine`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import safe_open
from safetensors.torch import save_file

from sparring.engine.adapters.client import ClientCounts
from sparring.engine.adapters.vllm_client import VllmClient
from sparring.engine.adapters.vllm_server import VllmServer
from sparring.engine.adapters.vllm_wire import (
    PROBE,
    WHOLE_VOCABULARY,
    SampledTurn,
    generate_body,
    judge_body,
    judged_rows,
    judging_version,
    problem_for_vllm,
)
from sparring.engine.check import problem_of
from sparring.engine.config import EngineConfig
from sparring.engine.update import OLD_STAYS, where
from sparring.errors import EngineError, RequestRefused, SparringError, WeightsError, boundary
from sparring.generation import TEMPERATURE, Completion, Delta, GenerateRequest, ScoreRequest, Scores, is_temperature
from sparring.types import WeightRef
from sparring.weights.fetch import fetch
from sparring.weights.inline import Probe

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
TOLERANCES = {"float32": 1e-2, "bfloat16": 0.25}
"""Largest accepted difference between the publisher's log-probabilities of its probe and vLLM's, by dtype."""
_ABORT_AGAIN_S, _MOST_URGENT = 0.05, 1 << 31


@dataclass(eq=False, slots=True)
class _RunningRequest:
    """Running request: its name at the server, and the tokens sampled so far if it is streamed."""

    request: GenerateRequest
    name: str
    sampled: SampledTurn
    max_new: int
    streams: bool
    aborted: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


class VllmEngine:
    """Engine on a vLLM server. Implements `Engine`. Not exact: its kernels differ from the trainer's, so its
    log-probabilities differ, and its random numbers depend on more than the seed and a token's position.

    Args:
        server: started server, closed with this engine.
        config: section `[engine]`.
        name: name of the model in the run; updates of other models are refused.
        version: version of the weights in the server's folder.
        dtype: dtype of the computation.
        keep_server: whether `close` leaves the server running.
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
        self.server, self._config, self._name, self._version = server, config, name, version
        self._tolerance, self._keep_server = TOLERANCES[dtype], keep_server
        self._client = VllmClient(server)
        self._key, self._numbers = (
            uuid4().hex,
            count(),
        )  # a server may have other clients, and remembers ids for a while
        self._live: list[_RunningRequest] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._turn = asyncio.Lock()
        self._served = sorted(map(str, server.path.glob("*.safetensors")))
        self._shapes = _shapes(self._served)
        self._checksum: str | None = None
        self._counts = ClientCounts()
        self._broken = ""
        self._closed = False
        server.ask("POST", "/update_weight_version", {"new_version": str(version)})

    @property
    def version(self) -> int:
        return self._version

    @property
    def metrics(self) -> dict[str, float]:
        """Counts of `ClientCounts` since the start."""
        return dict(self._counts.values)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn. Cancelling the awaiting task drops the request; `abort` ends it with the tokens sampled so
        far.

        The recorded oldest version of keys and values is never newer than the true one: it is the version served when
        the request was sent, even if vLLM began later.

        Raises:
            EngineError: the request can never be served, vLLM failed, or the engine is closed.
        """
        if request.ends is not None:  # the stop function needs the tokens as they come
            *_, completion = [piece async for piece in self.stream(request)]
            assert isinstance(completion, Completion)  # the last piece is
            return completion
        prompt = await self._prompt_logprobs(request)
        async with self._serving(request, streams=False) as live:
            live.sampled.take(await self._client.post(GENERATE, self._body(live)))
            return self._counts.completed(live.sampled.completion(prompt))

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Sample one turn in pieces: the tokens sampled since the previous piece, finally the Completion. Closing the
        iterator drops the request.

        Raises:
            EngineError: as for `generate`, at the first piece or after the tokens sampled until then.
        """
        prompt = await self._prompt_logprobs(request)
        async with self._serving(request, streams=True) as live:
            sampled, num_sent, ended = live.sampled, 0, False
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
                    new = slice(num_sent, end)
                    num_sent = len(sampled.tokens) if end is None else end
                    yield Delta(tokens=tuple(sampled.tokens[new]), logprobs=tuple(sampled.logprobs[new]))
            if ended:
                sampled.cut(num_sent)
            yield self._counts.completed(sampled.completion(prompt))

    async def abort(self, request: str) -> None:
        """End a request; its caller gets the tokens sampled so far. Unknown requests are ignored. A request for prompt
        and these tokens continues it with other random numbers: vLLM restarts them with each request."""
        for live in [live for live in self._live if live.request.id == request and not live.aborted]:
            live.aborted = True
            await self._tell_abort(live)
            self._start(self._abort(live))

    async def score(self, request: ScoreRequest) -> Scores:
        """Compute log-probabilities of given tokens by vLLM's prompt_logprobs. Only small vocabularies are supported:
        entropies and other temperatures need the log-probabilities of the complete vocabulary, which vLLM sends as
        text.

        Raises:
            EngineError: the request can never be served, the vocabulary is too large, vLLM failed, or the engine is
                closed.
        """
        self._check_score(request)
        answer, version = {}, None
        while (
            version is None or judging_version(answer) != version
        ):  # an update came between: all of it is of one version
            await self._open.wait()
            self._check_open()
            version = self._version
            answer = await self._client.post(GENERATE, judge_body(self._unique(), request.tokens, -1, request.priority))
        rows = judged_rows(answer, request.first)
        scored = [_distribution(row, request.temperature) for row in rows]
        tops = [sorted(row.items(), key=lambda item: (-item[1], item[0]))[: request.top_k] for row in scored]
        return Scores(
            logprobs=tuple(row[token] for row, token in zip(scored, request.tokens[request.first :], strict=True)),
            entropies=tuple(
                -sum(math.exp(value) * value for value in row.values() if value > -math.inf) for row in scored
            ),
            top_ids=tuple(tuple(token for token, _ in top) for top in tops),
            top_logprobs=tuple(tuple(value for _, value in top) for top in tops),
            version=version,
        )

    async def fork(self, request: str, seeds: Mapping[str, int]) -> tuple[GenerateRequest, ...]:
        """Return requests that continue a streamed one from the tokens sampled so far; vLLM finds full blocks of their
        prefix in its cache.

        Raises:
            EngineError: not exactly one request with this id is being streamed; vLLM reports the tokens of other
                requests only at their end.
        """
        streamed = [live for live in self._live if live.request.id == request and live.streams]
        if self._closed or len(streamed) != 1:
            got = f"{len(streamed)}; vLLM forks streamed requests only"
            raise EngineError(f"fork of {request}: expected one streamed request of this id, got {got}")
        [live] = streamed
        num_sampled, base = len(live.sampled.tokens), live.request.sampling
        left = replace(base, max_tokens=live.max_new - num_sampled, min_tokens=max(0, base.min_tokens - num_sampled))
        tokens = (*live.request.tokens, *live.sampled.tokens)
        return tuple(
            replace(live.request, id=name, tokens=tokens, conversation=name, sampling=replace(left, seed=seed))
            for name, seed in seeds.items()
        )

    async def release(self, conversation: str) -> None:
        """Do nothing: vLLM evicts the least recently used blocks itself."""

    async def pull(self, ref: WeightRef) -> None:
        """Serve other weights: pause, load, verify, commit, resume. vLLM computes the publisher's probe while
        everything else is paused, so no request is served by unverified weights.

        `[engine] live_kv` decides about running requests. keep: they continue with their keys and values; recompute:
        they recompute them; drain: the update waits until they have finished. Cancelling the caller does not stop an
        update that has begun.

        Raises:
            WeightsError: the update failed its verification or is late; the old weights were loaded again and are
                served.
            EngineError: the engine is closed, or the old weights could not be restored.
        """
        if ref.model != self._name:
            raise WeightsError(
                f"{where(ref)}: expected model {self._name!r}, got {ref.model!r}; publish to the engine that serves it"
            )
        self._check_open()
        await asyncio.shield(self._start(self._pull(ref)))

    async def verify(self, probe: Probe, about: str) -> None:
        """Compare a probe with log-probabilities under vLLM's present weights; works while vLLM is paused.

        Raises:
            WeightsError: they differ from the publisher's.
        """
        tokens, expected = probe
        try:
            async with asyncio.timeout(self._config.update_timeout_s):
                logprobs = await self._probe(tokens)
        except TimeoutError:
            got = f"no answer within engine.update_timeout_s; {OLD_STAYS}"
            raise WeightsError(f"{about}: expected vLLM to score the probe, got {got}") from None
        worst = max((abs(a - b) for a, b in zip(logprobs, expected, strict=True)), default=0.0)
        # a comparison with NaN is false, so NaN is refused
        if not all(abs(a - b) <= self._tolerance for a, b in zip(logprobs, expected, strict=True)):
            raise WeightsError(
                f"{about}: expected the publisher's log-probabilities on its probe within {self._tolerance}, "
                f"got a difference of {worst:.3g}; {OLD_STAYS}"
            )

    async def close(self) -> None:
        """Refuse new requests, fail the running ones, and end the server. Safe to call twice."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._keep_server:
            await asyncio.to_thread(self.server.close)
        await self._client.close()

    # requests

    def _check(self, request: GenerateRequest) -> int:
        """Return the number of tokens that a request may sample. Checked here because a token outside the vocabulary
        would end vLLM's engine, not the request.

        Raises:
            EngineError: the request can never be served.
        """
        tokens, sampling, most = request.tokens, request.sampling, self.server.max_positions
        max_new = min(sampling.max_tokens, most - len(tokens))
        problem = _problem_with(tokens, self.server.vocab_size)
        if problem is None and sampling.max_tokens < 1:
            problem = f"max_tokens of at least 1, got {sampling.max_tokens}; raise it"
        elif problem is None and max_new < 1:
            problem = f"a prompt of fewer than {most} tokens, got {len(tokens)}; shorten it"
        problem = (
            problem or problem_of(request, self.server.vocab_size) or problem_for_vllm(request, self.server.vocab_size)
        )
        if problem:
            raise RequestRefused(f"request {request.id}: expected {problem}")
        return max_new

    def _check_score(self, request: ScoreRequest) -> None:
        vocab_size, most = self.server.vocab_size, self.server.max_positions
        problem = _problem_with(request.tokens, vocab_size)
        if vocab_size > WHOLE_VOCABULARY:
            why = "vLLM sends all log-probabilities as text; score with a native engine"
            problem = f"a vocabulary of at most {WHOLE_VOCABULARY}, got {vocab_size}; {why}"
        elif not 1 <= request.first < len(request.tokens):
            got = f"{request.first} of {len(request.tokens)}"
            problem = f"1 <= first < number of tokens, got {got}; the first token has no log-probability"
        elif len(request.tokens) >= most:
            problem = f"fewer than {most} tokens, got {len(request.tokens)}; shorten the text"
        elif not is_temperature(request.temperature):
            problem = f"{TEMPERATURE}, got {request.temperature}; correct it"
        elif not 0 <= request.top_k <= vocab_size:
            problem = f"0 <= top_k <= {vocab_size}, got {request.top_k}; correct it"
        if problem:
            raise RequestRefused(f"score {request.id}: expected {problem}")

    def _check_open(self) -> None:
        if self._closed or self._broken:
            raise EngineError(
                self._broken or f"engine {self._name}: expected a running engine, got a closed one; start another"
            )

    @asynccontextmanager
    async def _serving(self, request: GenerateRequest, *, streams: bool) -> AsyncIterator[_RunningRequest]:
        max_new = self._check(request)
        await self._open.wait()
        self._check_open()
        recomputes = self._config.live_kv == "recompute"
        sampled = SampledTurn(request, self._version, vocab_size=self.server.vocab_size, recomputes=recomputes)
        live = _RunningRequest(request, self._unique(), sampled, max_new, streams)
        self._live.append(live)
        try:
            yield live
        finally:
            self._live.remove(live)
            live.done.set()

    def _body(self, live: _RunningRequest) -> dict[str, Any]:
        vocab_size = self.server.vocab_size
        return generate_body(live.request, live.name, live.max_new, vocab_size=vocab_size, version=self._version)

    def _end(self, request: GenerateRequest, tokens: Sequence[int], num_sent: int) -> int | None:
        """Return the number of tokens that belong to the turn, if its stop function ends it after `num_sent` tokens;
        otherwise None."""
        first = max(num_sent, request.sampling.min_tokens - 1)
        if request.ends is None or len(tokens) <= first:
            return None
        with boundary(EngineError, f"request {request.id}: its stop function `ends`"):
            return request.ends(tokens, len(tokens) - first)

    async def _prompt_logprobs(self, request: GenerateRequest) -> tuple[float, ...] | None:
        if not request.prompt_logprobs:
            return None
        self._check(request)
        temperature = request.sampling.temperature
        if len(request.tokens) < 2:
            return ()
        if temperature == 1.0:  # the complete vocabulary is not needed
            await self._open.wait()
            self._check_open()
            rows = judged_rows(
                await self._client.post(GENERATE, judge_body(self._unique(), request.tokens, 0, request.priority))
            )
            return tuple(row[token] for row, token in zip(rows, request.tokens[1:], strict=True))
        return (
            await self.score(ScoreRequest(id=f"{request.id}/prompt", tokens=request.tokens, temperature=temperature))
        ).logprobs

    async def _probe(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return log-probabilities of tokens[1:] at temperature 1; works while vLLM is paused."""
        body = judge_body(f"{PROBE}-{self._unique()}", tokens, 0, _MOST_URGENT)
        rows = judged_rows(await self._client.post(GENERATE, body))
        return tuple(row[token] for row, token in zip(rows, tokens[1:], strict=True))

    async def _abort(self, live: _RunningRequest) -> None:
        """Repeat an abort until the request ends: vLLM silently ignores an abort of a request that has not reached its
        scheduler."""
        pause_s = _ABORT_AGAIN_S
        while not live.done.is_set():
            try:
                await asyncio.wait_for(live.done.wait(), pause_s)
            except TimeoutError:
                await self._tell_abort(live)
                pause_s *= 2

    async def _tell_abort(self, live: _RunningRequest) -> None:
        await self._client.post(ABORT, {"request_ids": [f"generate-tokens-{live.name}"]})

    # updates

    async def _pull(self, ref: WeightRef) -> None:
        async with self._turn:
            if (ref.version, ref.checksum) == (self._version, self._checksum):
                return
            with boundary(WeightsError, where(ref)):
                staged = await asyncio.to_thread(self._stage, ref)
            self._open.clear()
            try:
                async with asyncio.timeout(self._config.update_timeout_s):
                    await self._pause()
                    tokens = ref.probe[0] if ref.probe is not None else ()
                    before = await self._probe(tokens) if tokens else ()
                await self._commit(ref, staged, (tokens, before))
            except TimeoutError:
                late = f"not applied within engine.update_timeout_s = {self._config.update_timeout_s}"
                raise WeightsError(f"{where(ref)}: {late}; {OLD_STAYS}") from None
            finally:
                if str(staged) not in self._served:
                    staged.unlink(missing_ok=True)
                try:
                    if not self._closed:
                        await self._client.post("/resume")
                finally:
                    self._open.set()

    def _stage(self, ref: WeightRef) -> Path:
        """Write the weights to a file that vLLM's workers can read."""
        state = fetch(ref)
        for (
            name,
            tensor,
        ) in state.items():  # a load that vLLM gives up half way leaves a model that cannot be loaded again
            if self._shapes.get(name) != list(tensor.shape):
                expected = f"{name} of shape {self._shapes.get(name)}, as in the checkpoint"
                raise WeightsError(f"{where(ref)}: expected {expected}, got {list(tensor.shape)}; {OLD_STAYS}")
        file = self.server.folder / f"weights-{next(self._numbers)}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
        return file

    async def _pause(self) -> None:
        kind = self._config.live_kv
        await self._client.post(f"/pause?mode={'wait' if kind == 'drain' else 'keep'}&clear_cache=false")
        if kind == "recompute":
            await self._client.post("/reset_prefix_cache?reset_running_requests=true")

    async def _commit(self, ref: WeightRef, staged: Path, before: Probe) -> None:
        """Load and verify the weights; on failure restore the old ones and verify these by `before`, their own
        log-probabilities."""
        try:
            with boundary(WeightsError, where(ref)):
                await self._load([str(staged)])
            if ref.probe is not None:
                await self.verify(ref.probe, where(ref))
            await self._client.post("/update_weight_version", {"new_version": str(ref.version)})
        except SparringError as cause:
            await self._roll_back(before, where(ref))
            raise cause if isinstance(cause, WeightsError) else WeightsError(str(cause)) from cause
        for file in map(Path, self._served):
            if file.is_relative_to(self.server.folder):
                file.unlink()
        self._served, self._version, self._checksum = [str(staged)], ref.version, ref.checksum
        self._counts.updated()

    async def _roll_back(self, probe: Probe, about: str) -> None:
        try:
            await self._load(self._served)
            if probe[0]:
                await self.verify(probe, f"{about}, rolled back")
        except SparringError as cause:
            self._broken = f"engine {self._name}: {about} failed and the old weights could not be restored: {cause}"
            raise EngineError(self._broken) from cause

    async def _load(self, paths: list[str]) -> None:
        await self._client.post("/start_weight_update")
        await self._client.post("/update_weights", {"update_info": {"paths": paths}})
        await self._client.post("/finish_weight_update", {})

    # the wire

    def _unique(self) -> str:
        return f"{self._name}-{self._key}-{next(self._numbers)}"

    def _start(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _shapes(paths: Sequence[str]) -> dict[str, list[int]]:
    shapes = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            shapes.update({name: file.get_slice(name).get_shape() for name in file.keys()})
    return shapes


def _problem_with(tokens: Sequence[int], vocab_size: int) -> str | None:
    if not tokens:
        return "a prompt of at least one token, got none; send one"
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        return f"token ids below {vocab_size}, got {min(tokens)} to {max(tokens)}; use the model's tokenizer"
    return None


def _distribution(logprobs: Mapping[int, float], temperature: float) -> dict[int, float]:
    """Compute log softmax(logits / temperature) from the log-probabilities at temperature 1; temperature 0 means 1, as
    in `token_logprobs`."""
    scaled = {token: value / (temperature or 1.0) for token, value in logprobs.items()}
    most = max(scaled.values())
    total = most + math.log(sum(math.exp(value - most) for value in scaled.values()))
    return {token: value - total for token, value in scaled.items()}
