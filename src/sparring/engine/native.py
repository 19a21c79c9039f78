"""`NativeEngine`: the engine's thread and the asyncio door in front of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence as Rows
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch

from sparring.engine.check import problem_of
from sparring.engine.config import PAGE_SIZE, EngineConfig
from sparring.engine.kv import KvCache
from sparring.engine.runner import Runner
from sparring.engine.scheduler import Chunk, Scheduler
from sparring.engine.sequence import Sequence
from sparring.engine.update import commit
from sparring.errors import EngineError, SparringError, WeightsError, boundary
from sparring.model.causal import CausalModel
from sparring.types import Completion, GenerateRequest, WeightRef
from sparring.weights.inline import fetch

Answer = tuple[asyncio.Future[Any], Any]


class NativeEngine:
    """Serves one model; implements `Engine`. All tensor work happens on one daemon thread.

    The thread takes what came in, plans a step, computes it, and wakes the event loop once for all that finished. An error
    in a step fails the requests of that step; the engine goes on.

    Args:
        model: served, and from now on owned: the trainer has another one.
        config: `[engine]`.
        name: which model of the run this is; updates of others are refused.
        version: of the weights that `model` holds.
        threads: CPU threads of the engine's thread; 0 keeps torch's number.
    """

    def __init__(
        self, model: CausalModel, config: EngineConfig, *, name: str = "policy", version: int = 0, threads: int = 0
    ) -> None:
        self._model, self._config, self._name, self._version = model, config, name, version
        num_pages = _num_pages(model, config)
        self._capacity = num_pages * PAGE_SIZE
        cache = KvCache(num_pages, PAGE_SIZE, share_prefixes=config.share_prefixes)
        self._scheduler = Scheduler(cache, max_running=config.max_running, max_batch_tokens=config.max_batch_tokens)
        self._runner = Runner(model, num_pages=num_pages, page_size=PAGE_SIZE, max_running=config.max_running)
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._answers: list[Answer] = []
        self._metrics: dict[str, float] = defaultdict(float)
        self._arrivals = 0
        self._lock = threading.Lock()
        self._closed = False
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, args=(threads or torch.get_num_threads(),), name=f"engine-{name}", daemon=True
        )
        self._thread.start()

    @property
    def version(self) -> int:
        """The version of the weights that are served."""
        return self._version

    @property
    def metrics(self) -> dict[str, float]:
        """Counts since the start: steps, generated_tokens, prefill_tokens, cached_tokens, preemptions, failed_steps;
        busy_s; max_running (the most requests in one step)."""
        return {**self._metrics, "preemptions": float(self._scheduler.num_preempted)}

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn. Cancelling the awaiting task aborts the request.

        The context ends at the model's last position: a request that reaches it finishes with "length".

        Raises:
            EngineError: the request can never be served, its step failed, or the engine is closed.
        """
        max_new = self._check(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        asked = request.prompt_logprobs
        scores = await self.score([request.tokens], request.sampling.temperature) if asked and len(request.tokens) > 1 else [[]]
        self._arrivals += 1
        keep = self._config.kv_across_turns == "keep"
        sequence = Sequence.of(request, future, arrival=self._arrivals, max_new=max_new, keep=keep)
        self._ask(lambda: self._scheduler.add(sequence))
        try:
            completion = await future
        except asyncio.CancelledError:
            self._tell(lambda: self._scheduler.remove(sequence))
            raise
        return replace(completion, prompt_logprobs=tuple(scores[0])) if asked else completion

    async def score(self, rows: Rows[Rows[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-probabilities of tokens[1:] of each row under the served weights.

        Raises:
            EngineError: the forward failed or the engine is closed.
        """
        return await self._call(EngineError, "score", lambda: self._runner.score(rows, temperature))

    async def release(self, conversation: str) -> None:
        """Forget the KV of a conversation; unknown ones are fine."""
        self._tell(lambda: self._scheduler.release(conversation))

    async def pull(self, ref: WeightRef) -> None:
        """Serve other weights from the next step on. KV of idle conversations goes; running requests keep theirs.

        Raises:
            WeightsError: the update failed its verification; the old version serves on.
            EngineError: the engine is closed.
        """
        where = f"weights of {ref.model} version {ref.version}"
        if ref.model != self._name:
            raise WeightsError(f"{where}: expected model {self._name!r}; publish to the engine that serves it")
        # staged outside of the engine's thread, so that hashing does not hold up a step
        with boundary(WeightsError, where):
            state = await asyncio.to_thread(fetch, ref)
        await self._call(WeightsError, where, lambda: self._commit(ref, state))

    async def close(self) -> None:
        """Fail what still runs and end the thread. Safe to call twice."""
        self._tell(self._stop)
        await asyncio.to_thread(self._thread.join)

    def _check(self, request: GenerateRequest) -> int:
        """Tokens that the request may sample.

        Raises:
            EngineError: it can never be served.
        """
        tokens, sampling = request.tokens, request.sampling
        max_new = min(sampling.max_tokens, self._model.max_positions - len(tokens))
        problem = None
        if not tokens:
            problem = "at least one token, got none; send a prompt"
        elif min(tokens) < 0 or max(tokens) >= self._model.vocab_size:
            problem = f"token ids below {self._model.vocab_size}, got {min(tokens)} to {max(tokens)}; use the model's tokenizer"
        elif sampling.max_tokens < 1:
            problem = f"max_tokens of at least 1, got {sampling.max_tokens}; ask for a token"
        elif max_new < 1:
            problem = f"fewer than {self._model.max_positions} tokens, got {len(tokens)}; shorten the prompt"
        elif len(tokens) + max_new - 1 > self._capacity:
            got = f"{len(tokens)} + {max_new}"
            problem = f"prompt + max_tokens within the cache of {self._capacity}, got {got}; raise engine.kv_tokens"
        else:
            problem = problem_of(request, self._model.vocab_size)
        if problem:
            raise EngineError(f"request {request.id}: expected {problem}")
        return max_new

    def _ask(self, action: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise EngineError(f"engine {self._name}: expected an open engine, got a closed one; start another")
            self._put(action)

    def _tell(self, action: Callable[[], None]) -> None:
        with self._lock:
            if not self._closed:
                self._put(action)

    def _put(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        self._runner.interrupt(True)

    async def _call(self, error: type[SparringError], where: str, function: Callable[[], Any]) -> Any:
        """Run `function` on the engine's thread between two steps."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._ask(lambda: self._answer_with(future, error, where, function))
        return await future

    # from here on: the engine's thread

    def _run(self, threads: int) -> None:
        # OpenMP keeps its number of threads per calling thread
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._take_in()
                    if self._scheduler.busy and not self._stopping:
                        self._step()
                    self._wake()
        finally:
            self._end()

    def _take_in(self) -> None:
        # before the inbox is looked at: what comes in later interrupts the next call
        self._runner.interrupt(False)
        if not self._scheduler.busy:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _step(self) -> None:
        started = time.perf_counter()
        chunks = self._scheduler.plan(self._version)
        limited = [chunk.sequence for chunk in chunks if chunk.sequence.request.allowed and chunk.samples]
        steps = self._scheduler.ahead(chunks, 1 if limited else self._runner.most_steps)
        broken = self._limit(limited)
        try:
            with boundary(EngineError, f"engine {self._name}: step"):
                sampled = self._runner.step(chunks, steps)
        except SparringError as cause:
            # a refusal by a kernel is a failure of the machinery too: the request itself was checked
            error = cause if isinstance(cause, EngineError) else EngineError(str(cause))
            self._metrics["failed_steps"] += 1
            self._answers += [(sequence.future, error) for sequence in self._scheduler.discard(chunks)]
            return
        self._count(chunks, sampled.tokens)
        sampling = [sequence for sequence, _, _, samples in chunks if samples]
        for place, sequence in enumerate(sampling):
            if sequence in broken:
                self._fail(sequence, broken[sequence])
                continue
            known = len(sequence.logprobs)
            kept, tops = (values and values[place] for values in (sampled.kept, sampled.tops))
            try:
                with boundary(EngineError, f"request {sequence.request.id}: what watches for its end"):
                    sequence.extend(sampled.tokens[place], sampled.logprobs[place], self._version, kept, tops)
            except SparringError as cause:
                self._fail(sequence, cause)
                continue
            self._scheduler.advance(sequence, len(sequence.logprobs) - known - 1, self._version)
            if sequence.finish_reason:
                self._scheduler.retire(sequence, self._version)
                self._answers.append((sequence.future, sequence.completion()))
        self._metrics["busy_s"] += time.perf_counter() - started

    def _limit(self, sequences: Rows[Sequence]) -> dict[Sequence, SparringError]:
        """Ask what may come next in each; which failed, and how. Those are computed all the same: others may read their keys."""
        broken = {}
        for sequence in sequences:
            try:
                with boundary(EngineError, f"request {sequence.request.id}: what says which tokens are allowed"):
                    sequence.limit(self._model.vocab_size)
            except SparringError as cause:
                broken[sequence] = cause
        return broken

    def _fail(self, sequence: Sequence, cause: SparringError) -> None:
        error = cause if isinstance(cause, EngineError) else EngineError(str(cause))
        self._scheduler.remove(sequence)
        self._answers.append((sequence.future, error))

    def _count(self, chunks: list[Chunk], sampled: list[list[int]]) -> None:
        """Before the sampled tokens are taken: whoever has none yet, or has more than one to compute, is being read."""
        metrics = self._metrics
        reading = [chunk for chunk in chunks if chunk.count > 1 or not chunk.samples or not chunk.sequence.logprobs]
        metrics["steps"] += max(map(len, sampled), default=1)
        metrics["generated_tokens"] += sum(map(len, sampled))
        metrics["prefill_tokens"] += sum(chunk.count for chunk in reading)
        metrics["cached_tokens"] += sum(c.sequence.cached_tokens for c in reading if c.samples and not c.sequence.logprobs)
        metrics["max_running"] = max(metrics["max_running"], len(chunks))

    def _commit(self, ref: WeightRef, state: dict[str, torch.Tensor]) -> None:
        if ref.version <= self._version:  # its KV would pass for that of the weights served under this number
            got = f"{ref.version}; publish every change of the weights under a number of its own"
            where = f"weights of {ref.model} version {ref.version}"
            raise WeightsError(f"{where}: expected a version after {self._version}, which is served, got {got}")
        commit(self._model, self._runner, ref, state)
        self._version = ref.version
        self._scheduler.cache.release_other_versions(ref.version)

    def _answer_with(
        self, future: asyncio.Future[Any], error: type[SparringError], where: str, function: Callable[[], Any]
    ) -> None:
        try:
            with boundary(error, where):
                self._answers.append((future, function()))
        except SparringError as cause:
            self._answers.append((future, cause if isinstance(cause, error) else error(str(cause))))

    def _wake(self) -> None:
        """One call into each event loop for everything that finished in this step."""
        if not self._answers:
            return
        by_loop: dict[asyncio.AbstractEventLoop, list[Answer]] = defaultdict(list)
        for future, result in self._answers:
            by_loop[future.get_loop()].append((future, result))
        self._answers.clear()
        for loop, answers in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, answers)

    def _stop(self) -> None:
        self._stopping = True

    def _end(self) -> None:
        """Whatever ended the thread: nobody waits for it any longer."""
        with self._lock:
            self._closed = True
        while not self._inbox.empty():
            self._inbox.get()()
        error = EngineError(f"engine {self._name}: closed before the request was finished")
        self._answers += [(sequence.future, error) for sequence in self._scheduler.clear()]
        self._wake()


def _deliver(answers: list[Answer]) -> None:
    for future, result in answers:
        if future.done():
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


def _num_pages(model: CausalModel, config: EngineConfig) -> int:
    """Pages that the config pays for, and no more than all running requests of full length could use."""
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype.itemsize
    most = config.max_running * -(-model.max_positions // PAGE_SIZE)
    return min(config.cache_tokens(per_token) // PAGE_SIZE, most)
