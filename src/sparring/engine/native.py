"""`NativeEngine`: the engine's thread, and its asynchronous interface."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from sparring.engine.adapter_table import AdapterTable
from sparring.engine.check import EngineLimits, check_request, check_score
from sparring.engine.config import PAGE_SIZE, EngineConfig
from sparring.engine.kv import KvCache, kv_metrics
from sparring.engine.metrics import Latencies, count_step
from sparring.engine.reply import Delivery, Reply, deliver
from sparring.engine.runner import Runner
from sparring.engine.scheduler import Chunk, StepScheduler
from sparring.engine.sequence import Sequence
from sparring.engine.sizes import Sizes
from sparring.engine.states import StateSlots
from sparring.engine.update import OLD_STAYS, BaseWeights, Update, stage, where
from sparring.errors import EngineError, RequestRefused, SparringError, WeightsError, boundary
from sparring.generation import Completion, Delta, GenerateRequest, ScoreRequest, Scores
from sparring.model.causal import CausalModel
from sparring.model.lora import Adapter
from sparring.model.staging import StagedWeights
from sparring.types import WeightRef

PIECE_S = 0.02
"""Longest call into the kernels while a caller reads a stream, in seconds: tokens arrive 50 times a second, and the
overhead of shorter calls stays below 1 %."""


class NativeEngine:
    """Engine that serves one model. Implements `Engine`. All tensor work happens on one daemon thread.

    The thread takes new requests, plans a step, computes it, and wakes the event loop once for all requests that
    finished. An error in a step fails the requests of that step; the engine goes on.

    Args:
        model: model to serve, owned by the engine from now on; the trainer has another one. Its adapter, if any,
            becomes the engine's own.
        config: section `[engine]`.
        name: name of the model in the run; updates of other models are refused.
        version: version of the weights that `model` holds.
        threads: CPU threads of the engine's thread; 0 keeps torch's number.
    """

    def __init__(
        self, model: CausalModel, config: EngineConfig, *, name: str = "policy", version: int = 0, threads: int = 0
    ) -> None:
        self._model, self._config, self._name = model, config, name
        sizes, most = Sizes.of(model, config), config.max_running
        self._limits = EngineLimits(model.vocab_size, model.max_positions, sizes.num_pages * PAGE_SIZE)
        self._page_bytes = sizes.page_bytes
        cache = KvCache(
            sizes.num_pages,
            PAGE_SIZE,
            share_prefixes=config.share_prefixes,
            host_pages=sizes.host_pages,
            idle_pages=config.idle_pages(sizes.page_bytes),
            window=model.window,
        )
        states = StateSlots(sizes.num_states, cache.evict) if model.recurrent else None
        self._scheduler = StepScheduler(
            cache, max_running=most, max_batch_tokens=config.max_batch_tokens, states=states
        )
        self._runner = Runner(model, sizes, page_size=PAGE_SIZE, max_running=most)
        self._base = BaseWeights(self._runner, name, version)
        self._adapters = AdapterTable(model, self._runner, name, version, self._scheduler.forget)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._deliveries: list[Delivery] = []
        self._metrics: dict[str, float] = defaultdict(float)
        self.latencies = Latencies()
        self._updates: list[Update] = []
        self._arrivals = 0
        self._pace_s = PIECE_S
        self._lock = threading.Lock()
        self._closed = False
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, args=(threads or torch.get_num_threads(),), name=f"engine-{name}", daemon=True
        )
        self._thread.start()

    @property
    def version(self) -> int:
        """Version of the weights that serve requests without an adapter's name."""
        return self._adapters.version(self._base.version)

    @property
    def problem(self) -> EngineError | None:
        """Error that every request would get; None while requests are answered."""
        return (
            EngineError(f"engine {self._name}: expected a running engine, got a closed one")
            if self._closed
            else self._base.broken
        )

    @property
    def context(self) -> int:
        """Most tokens of one conversation."""
        return min(self._limits.max_positions, self._limits.capacity)

    @property
    def model(self) -> CausalModel:
        """Model that is served."""
        return self._model

    @property
    def metrics(self) -> dict[str, float]:
        """Counts since the start: steps, generated_tokens, prefill_tokens, scored_tokens, cached_tokens, preemptions,
        failed_steps, updates; busy_s; update_s and kv_copy_s, for which steps waited for updates and for copies of
        pages; max_update_stall_s, the longest of the former; max_running, the most requests in one step. Levels:
        running_now and waiting_now, requests; and the metrics of `kv_metrics`.
        """
        running, waiting = map(float, self._scheduler.load)
        now = {"preemptions": float(self._scheduler.num_preempted), "running_now": running, "waiting_now": waiting}
        return {**self._metrics, **now, **kv_metrics(self._scheduler.cache, self._page_bytes)}

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn. Cancelling the awaiting task drops the request; `abort` ends it with the tokens sampled so
        far.

        The context ends at the model's last position: a request that reaches it finishes with "length".

        Raises:
            EngineError: the request can never be served, its step failed, or the engine is closed.
        """
        async with self._serving(await self._sequence(request, Reply())) as reply:
            completion: Completion = await reply.result()
            return completion

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Sample one turn in pieces: the tokens sampled since the previous piece, finally the Completion. Closing the
        iterator drops the request.

        A piece follows every call into the kernels, which takes about `PIECE_S` while a caller reads, or one step if a
        step is longer. A slow reader delays no other request: pieces that it has not read are joined.

        Raises:
            EngineError: as for `generate`, at the first piece or after the tokens sampled until then.
        """
        async with (
            self._serving(await self._sequence(request, Reply(streams=True))) as reply,
            aclosing(reply.pieces()) as pieces,
        ):
            async for piece in pieces:
                yield piece

    async def abort(self, request: str) -> None:
        """End a request: its caller gets a Completion with finish reason "abort" and the tokens sampled so far. Unknown
        requests are fine.

        A request for its prompt and these tokens, with the same seed, continues it under the weights served at that
        time: a token's random number depends only on the seed and the token's position.

        Args:
            request: id of the request; all requests with this id end.
        """
        self._tell(lambda: self._abort(request))

    async def fork(self, request: str, seeds: Mapping[str, int]) -> tuple[GenerateRequest, ...]:
        """Return requests that continue a running one from the tokens sampled so far, each with its own seed and the
        remaining number of tokens. The running one continues.

        Computed pages are parked for each branch as for the next turn of a conversation: a branch recomputes nothing,
        unless they were evicted, or weights were updated before or after the fork. `release` a branch's conversation
        when it is no longer needed, whether or not it was generated.

        Args:
            request: id of the running request.
            seeds: seed of each branch, by the name that becomes its id and its conversation.

        Raises:
            EngineError: not exactly one request of this id is running, or the engine is closed.
        """
        branches: tuple[GenerateRequest, ...] = await self._call(
            EngineError, f"fork of {request}", lambda: self._fork(request, seeds)
        )
        return branches

    async def score(self, request: ScoreRequest) -> Scores:
        """Compute log-probabilities of given tokens, scheduled with the requests that generate and within the same
        budgets; in exact numerics they have the bits of the trainer's forward. An update of the weights restarts the
        request, so that its whole result has one version.

        Raises:
            EngineError: the request can never be served, its step failed, it was aborted, or the engine is closed.
        """
        check_score(request, self._limits)
        self._arrivals += 1
        async with self._serving(Sequence.to_score(request, Reply(), arrival=self._arrivals)) as reply:
            scores: Scores = await reply.result()
            return scores

    async def release(self, conversation: str) -> None:
        self._tell(lambda: self._scheduler.release(conversation))

    async def pull(self, ref: WeightRef) -> None:
        """Serve other weights: stage them, then swap and verify them between two steps; returning acknowledges the
        update. Parked conversations are dropped; `[engine] live_kv` decides about the keys and values of running
        requests.

        A reference to an adapter loads it next to the other adapters, or replaces its older version; the base model
        cannot change while adapters are loaded.

        On any failure the served version is either the old or the new one, completely. A caller that missed the
        acknowledgement (because it was cancelled, for example) may ask again: the served version is acknowledged again.

        Raises:
            WeightsError: the update failed its verification or is late; the engine keeps serving the old version.
            EngineError: the engine is closed.
        """
        if ref.model != self._name:
            raise WeightsError(
                f"{where(ref)}: expected model {self._name!r}, got {ref.model!r}; publish to the engine that serves it"
            )
        late = WeightsError(
            f"{where(ref)}: not applied within engine.update_timeout_s = {self._config.update_timeout_s}; {OLD_STAYS}"
        )
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._config.update_timeout_s
        try:
            staged = await asyncio.wait_for(asyncio.to_thread(stage, self._model, ref), self._config.update_timeout_s)
        except TimeoutError:
            raise late from None
        update = Update(ref, staged)
        self._ask(lambda: self._updates.append(update))
        try:
            if not await update.reply.within(max(0.0, deadline - clock())) and update.claim():
                raise late
            await update.reply.result()
        finally:
            update.claim()

    async def drop(self, adapter: str) -> None:
        """Serve no new request with an adapter. It is unloaded when its running requests have finished.

        Raises:
            EngineError: the adapter is not loaded, or the engine is closed.
        """
        await self._call(EngineError, f"adapter {adapter}", lambda: self._adapters.drop(adapter))

    async def close(self) -> None:
        """Fail the running requests and end the thread. Safe to call twice."""
        self._tell(self._stop)
        await asyncio.to_thread(self._thread.join)

    @asynccontextmanager
    async def _serving(self, sequence: Sequence) -> AsyncIterator[Reply]:
        """Pass a request to the engine's thread, and drop it if the caller leaves before its answer."""
        self._ask(lambda: self._add(sequence))
        try:
            yield sequence.reply
        finally:
            if not sequence.reply.given:
                self._tell(lambda: self._scheduler.remove(sequence))

    async def _sequence(self, request: GenerateRequest, reply: Reply) -> Sequence:
        """Check a request and make its sequence. If it asks for prompt_logprobs, its prompt is scored first."""
        max_new = check_request(request, self._limits)
        self._arrivals += 1
        keep = self._config.kv_across_turns != "drop"
        sequence = Sequence.of(request, reply, arrival=self._arrivals, max_new=max_new, keep=keep)
        if request.prompt_logprobs:
            temperature, name = request.sampling.temperature, f"{request.id}/prompt"
            score = ScoreRequest(
                id=name,
                tokens=request.tokens,
                temperature=temperature,
                priority=request.priority,
                adapter=request.adapter,
            )
            sequence.prompt_logprobs = (await self.score(score)).logprobs if len(request.tokens) > 1 else ()
        return sequence

    def _ask(self, action: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise EngineError(f"engine {self._name}: expected a running engine, got a closed one; start another")
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
        reply = Reply()
        self._ask(lambda: self._answer_with(reply, error, where, function))
        return await reply.result()

    # from here on: the engine's thread

    def _run(self, threads: int) -> None:
        # OpenMP keeps its number of threads per calling thread
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._take_in()
                    self._update()
                    if self._base.broken is not None:
                        self._deliveries += [
                            sequence.reply.settle(self._base.broken) for sequence in self._scheduler.clear()
                        ]
                    if self._scheduler.busy and not self._stopping:
                        self._step()
                    self._wake()
        finally:
            self._end()

    def _take_in(self) -> None:
        # before the inbox is looked at: what comes in later interrupts the next call
        self._runner.interrupt(False)
        if not self._scheduler.busy and not self._updates:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _add(self, sequence: Sequence) -> None:
        try:
            sequence.adapter = self._adapters.find(sequence.request.adapter)
        except EngineError as error:
            self._deliveries.append(sequence.reply.settle(error))
        else:
            self._scheduler.add(sequence)

    def _step(self) -> None:
        started, base = time.perf_counter(), self._base.version
        chunks = self._scheduler.plan(base)
        if not chunks:  # all requests wait for newer weights
            return
        limited = [chunk.sequence for chunk in chunks if chunk.samples and chunk.sequence.generated.allowed]
        steps = self._scheduler.steps_ahead(chunks, 1 if limited else self._most_steps(chunks))
        broken = self._limit(limited)
        try:
            with boundary(EngineError, f"engine {self._name}: step"):
                self._metrics["kv_copy_s"] += self._runner.copy(self._scheduler.cache.take_copies())
                if self._scheduler.states is not None:
                    self._runner.copy_states(self._scheduler.states.take_copies())
                sampled = self._runner.step(chunks, steps)
        except SparringError as cause:
            # a refusal by a kernel is a failure of the machinery too: the request itself was checked
            error = cause if isinstance(cause, EngineError) else EngineError(str(cause))
            self._metrics["failed_steps"] += 1
            self._deliveries += [sequence.reply.settle(error) for sequence in self._scheduler.discard(chunks)]
            return
        count_step(self._metrics, chunks, sampled.tokens)
        sampling = [sequence for sequence, _, _, samples in chunks if samples]
        for index, sequence in enumerate(sampling):
            if sequence in broken:
                self._fail(sequence, broken[sequence])
                continue
            before = len(sequence.logprobs)
            kept = None if sampled.kept is None else sampled.kept[index]
            tops = None if sampled.tops is None else sampled.tops[index]
            try:
                with boundary(EngineError, f"request {sequence.request.id}: its stop function `ends`"):
                    version = sequence.version_under(base)
                    sequence.extend(sampled.tokens[index], sampled.logprobs[index], version, kept, tops)
            except SparringError as cause:
                self._fail(sequence, cause)
                continue
            self._scheduler.advance(sequence, len(sequence.logprobs) - before - 1, base)
            if not before:
                self.latencies.began(sequence.reply)
            if sequence.reply.streams:
                at = before + sequence.num_prompt
                self._deliveries.append(sequence.reply.extend(sequence.tokens[at:], sequence.logprobs[before:]))
            if sequence.finish_reason:
                self.latencies.ended(sequence.reply, len(sequence.logprobs))
                self._scheduler.finish(sequence, base)
                self._deliveries.append(sequence.reply.settle(sequence.completion()))
        for sequence, begin, count, _ in chunks if len(sampling) < len(chunks) else ():
            if sequence.scored_from is not None and begin + count == len(sequence.tokens):
                self._scheduler.finish(sequence, base)
                self._deliveries.append(sequence.reply.settle(sequence.scored(sequence.version_under(base))))
        taken_s = time.perf_counter() - started
        self._metrics["busy_s"] += taken_s
        self._pace_s = taken_s / max(map(len, sampled.tokens), default=1)

    def _most_steps(self, chunks: list[Chunk]) -> int:
        """Return the most steps of the next call; while a caller reads a stream, the number that fits into `PIECE_S` at
        the last call's pace."""
        most = self._runner.most_steps
        if not any(chunk.sequence.reply.streams for chunk in chunks):
            return most
        return steps_at(self._pace_s, most)

    def _limit(self, sequences: list[Sequence]) -> dict[Sequence, SparringError]:
        """Ask the constraint of each request for the tokens allowed next; return the errors by request. The failed
        requests are still computed, because other requests may read their keys."""
        broken = {}
        for sequence in sequences:
            try:
                with boundary(EngineError, f"request {sequence.request.id}: its constraint `allowed`"):
                    sequence.limit(self._model.vocab_size)
            except SparringError as cause:
                broken[sequence] = cause
        return broken

    def _fail(self, sequence: Sequence, cause: SparringError) -> None:
        error = cause if isinstance(cause, EngineError) else EngineError(str(cause))
        self._scheduler.remove(sequence)
        self._deliveries.append(sequence.reply.settle(error))

    def _abort(self, request: str) -> None:
        for sequence in self._scheduler.abort(request, self._base.version):
            aborted = (
                sequence.completion() if sequence.scored_from is None else EngineError(f"score {request}: aborted")
            )
            self._deliveries.append(sequence.reply.settle(aborted))

    def _fork(self, request: str, seeds: Mapping[str, int]) -> tuple[GenerateRequest, ...]:
        running = [sequence for sequence in self._scheduler.find(request) if sequence.scored_from is None]
        if len(running) != 1:
            got = f"{len(running)}; send new requests"
            raise RequestRefused(f"fork of {request}: expected one running request of this id, got {got}")
        self._scheduler.fork(running[0], seeds, self._base.version)
        return tuple(running[0].branch(name, seed) for name, seed in seeds.items())

    def _update(self) -> None:
        """Commit the updates whose turn it is. While an update waits for running requests, no new request begins."""
        draining = self._config.live_kv == "drain"
        self._updates = [update for update in self._updates if not update.claimed]
        while self._updates and not (draining and self._scheduler.has_begun):
            update = self._updates.pop(0)
            if update.claim():
                started = time.perf_counter()
                self._answer_with(
                    update.reply, WeightsError, where(update.ref), partial(self._commit, update.ref, update.staged)
                )
                stall_s = time.perf_counter() - started
                self._metrics["update_s"] += stall_s
                self._metrics["max_update_stall_s"] = max(self._metrics["max_update_stall_s"], stall_s)
        self._scheduler.draining = bool(self._updates)

    def _commit(self, ref: WeightRef, staged: StagedWeights | Adapter) -> None:
        again = self._config.live_kv == "recompute"
        if isinstance(staged, Adapter):
            if self._base.broken is not None:
                raise WeightsError(f"{where(ref)}: {self._base.broken}")
            adapter = self._adapters.commit(ref, staged)
            if adapter is not None:
                self._metrics["updates"] += 1
                self._scheduler.recompute(adapter, all_of_them=again)
            return
        before = self._base.version
        if self._base.commit(ref, staged, has_adapters=bool(self._adapters)):
            self._scheduler.forget(before)
            self._metrics["updates"] += 1
            self._scheduler.recompute(None, all_of_them=again)

    def _answer_with(self, reply: Reply, error: type[SparringError], where: str, function: Callable[[], Any]) -> None:
        try:
            with boundary(error, where):
                self._deliveries.append(reply.settle(function()))
        except SparringError as cause:
            self._deliveries.append(reply.settle(cause if isinstance(cause, error) else error(str(cause))))

    def _wake(self) -> None:
        """Deliver all results of this step at once."""
        self._adapters.sweep(sequence.adapter for sequence in self._scheduler.sequences)
        if self._deliveries:
            deliveries, self._deliveries = self._deliveries, []
            deliver(deliveries)

    def _stop(self) -> None:
        self._stopping = True

    def _end(self) -> None:
        """Fail all pending calls when the thread ends."""
        with self._lock:
            self._closed = True
        while not self._inbox.empty():
            self._inbox.get()()
        error = EngineError(f"engine {self._name}: closed before the request was finished")
        self._deliveries += [update.reply.settle(error) for update in self._updates]
        self._deliveries += [sequence.reply.settle(error) for sequence in self._scheduler.clear()]
        self._wake()


def steps_at(pace_s: float, most: int) -> int:
    """Return the number of steps of `pace_s` for one call while a caller reads a stream: `PIECE_S` in all, at least 1,
    at most `most`."""
    return max(1, min(most, int(PIECE_S / pace_s)))
