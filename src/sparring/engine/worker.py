"""`EngineWorker`: the thread of the native engine, which does all tensor work."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from sparring.engine.adapter_table import AdapterTable
from sparring.engine.cache.kv import KvCache, kv_metrics
from sparring.engine.cache.memory import PagedMemory, RecurrentMemory
from sparring.engine.config import PAGE_SIZE, EngineConfig
from sparring.engine.metrics import Latencies, count_step
from sparring.engine.reply import Delivery, Reply, deliver
from sparring.engine.runner import Runner
from sparring.engine.scheduler import Chunk, StepScheduler
from sparring.engine.sequence import Sequence
from sparring.engine.sizes import Sizes
from sparring.engine.update import BaseWeights, Update, where
from sparring.errors import EngineError, SparringError, WeightsError, boundary
from sparring.model.causal import CausalModel
from sparring.model.lora import Adapter
from sparring.model.steps.rows import SampledTokens

T = TypeVar("T")

PIECE_S = 0.02
"""Longest call into the kernels while a caller reads a stream, in seconds: tokens arrive 50 times a second, and the
overhead of shorter calls stays below 1 %."""


class EngineWorker:
    """Daemon thread that takes new requests, plans a step, computes the step, and wakes the event loop once for all
    finished requests. An error in a step fails the requests of that step; the thread continues.

    `ask`, `tell` and `call` pass functions to the thread. The methods from `add` on may run only on the thread.

    Args:
        version: version of the weights that `model` holds.
        threads: CPU threads; 0 keeps torch's number.
    """

    def __init__(
        self, model: CausalModel, config: EngineConfig, sizes: Sizes, *, name: str, version: int, threads: int
    ) -> None:
        self._name, self._live_kv, self._vocab_size = name, config.update.live_kv, model.vocab_size
        self._device = model.device.type
        self._page_bytes = sizes.page_bytes
        cache = KvCache(
            sizes.num_pages,
            PAGE_SIZE,
            share_prefixes=config.kv.share_prefixes,
            host_pages=sizes.host_pages,
            idle_pages=sizes.idle_pages,
            window=model.window,
        )
        memory = RecurrentMemory(cache, sizes.num_states) if model.recurrent else PagedMemory(cache)
        self.scheduler = StepScheduler(
            memory, max_running=config.batch.max_running, max_batch_tokens=config.batch.max_tokens
        )
        self._runner = Runner(model, sizes, page_size=PAGE_SIZE, max_running=config.batch.max_running)
        self._base = BaseWeights(self._runner, name, version)
        self._adapters = AdapterTable(model, self._runner, name, self._base.served, memory.forget)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._deliveries: list[Delivery] = []
        self._metrics: dict[str, float] = defaultdict(float)
        self.latencies = Latencies()
        self._updates: list[Update] = []
        self._pace_s = PIECE_S
        self._lock = threading.Lock()
        self._closed = self._stopping = self._asleep = False
        self._thread = threading.Thread(
            target=self._run, args=(threads or torch.get_num_threads(),), name=f"engine-{name}", daemon=True
        )
        self._thread.start()

    @property
    def version(self) -> int:
        """Version of the weights that serve requests without an adapter's name."""
        return self._adapters.find(None).version

    def check_adapter(self, name: str | None) -> None:
        """Refuse the name of an adapter that is not loaded."""
        self._adapters.find(name)

    @property
    def problem(self) -> EngineError | None:
        """Error that every request would get; None while requests are answered."""
        return (
            EngineError(f"engine {self._name}: expected a running engine, got a closed one")
            if self._closed
            else self._base.broken
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the engine, as `NativeEngine.metrics` lists them."""
        running, waiting = map(float, self.scheduler.load)
        now = {"preemptions": float(self.scheduler.num_preempted), "running_now": running, "waiting_now": waiting}
        return {**self._metrics, **now, **kv_metrics(self.scheduler.cache, self._page_bytes)}

    def ask(self, action: Callable[[], None]) -> None:
        """Run `action` on the thread between two steps. Raises EngineError if the engine is closed. Thread-safe."""
        with self._lock:
            if self._closed:
                raise EngineError(f"engine {self._name}: expected a running engine, got a closed one; start another")
            self._put(action)

    def tell(self, action: Callable[[], None]) -> None:
        """Run `action` on the thread between two steps, unless the engine is closed. Thread-safe."""
        with self._lock:
            if not self._closed:
                self._put(action)

    async def call(self, error: type[SparringError], where: str, function: Callable[[], T]) -> T:
        """Run `function` on the thread between two steps and return its result. A failure of the function is raised as
        `error`, with `where` in its message."""
        reply = Reply()
        self.ask(lambda: self._answer_with(reply, error, where, function))
        result: T = await reply.result()
        return result

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _put(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        self._runner.interrupt(True)

    # from here on: the thread

    def add(self, sequence: Sequence) -> None:
        """Admit a new request; a request for an unknown adapter fails."""
        try:
            sequence.served = self._adapters.find(sequence.request.adapter)
        except EngineError as error:
            self._deliveries.append(sequence.reply.settle(error))
        else:
            self.scheduler.add(sequence)

    def abort(self, request: str) -> None:
        """End all requests with this id."""
        for sequence in self.scheduler.abort(request):
            aborted = (
                sequence.completion() if sequence.scored_from is None else EngineError(f"score {request}: aborted")
            )
            self._deliveries.append(sequence.reply.settle(aborted))

    def update(self, update: Update) -> None:
        """Queue an update; it is committed when its turn comes."""
        self._updates.append(update)

    def drop(self, adapter: str) -> None:
        """Serve no new request with an adapter."""
        self._adapters.drop(adapter)

    def sleep(self) -> None:
        """Suspend all requests, drop the cache, and give the memory of weights and cache back to the system. Raises
        EngineError on a GPU, or if adapters are loaded."""
        if self._asleep:
            return
        if self._device != "cpu":
            raise EngineError(f"engine {self._name}: expected an engine on a CPU to sleep, got one on {self._device}")
        if self._adapters:
            count = f"{len(self._adapters)}; drop them"
            raise EngineError(f"engine {self._name}: expected no adapters to sleep, got {count}")
        self.scheduler.empty()
        self._runner.discard()
        self._asleep = True

    def stop(self) -> None:
        """End the thread after this step."""
        self._stopping = True

    def _run(self, threads: int) -> None:
        # OpenMP keeps its number of threads per calling thread
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._take_in()
                    self._apply_updates()
                    if self._base.broken is not None:
                        self._deliveries += [
                            sequence.reply.settle(self._base.broken) for sequence in self.scheduler.clear()
                        ]
                    if self._busy and not self._stopping:
                        self._step()
                    self._wake()
        finally:
            self._end()

    def _take_in(self) -> None:
        # before the inbox is looked at: what comes in later interrupts the next call
        self._runner.interrupt(False)
        if not self._busy and not self._updates:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    @property
    def _busy(self) -> bool:
        return self.scheduler.busy and not self._asleep

    def _step(self) -> None:
        started = time.perf_counter()
        chunks = self.scheduler.plan()
        if not chunks:  # all requests wait for newer weights
            return
        constrained = [one for one, _, _, samples in chunks if samples and one.generated.allowed]
        broken = self._constrain(constrained)
        masked = any(one.allowed for one in constrained)
        steps = self.scheduler.steps_ahead(chunks, 1 if masked else self._most_steps(chunks))
        try:
            sampled = self._compute(chunks, steps)
        except EngineError as error:
            self._metrics["failed_steps"] += 1
            self._deliveries += [sequence.reply.settle(error) for sequence in self.scheduler.discard(chunks)]
            return
        count_step(self._metrics, chunks, sampled.tokens)
        sampling = [sequence for sequence, _, _, samples in chunks if samples]
        for index, sequence in enumerate(sampling):
            if sequence in broken:
                self._fail(sequence, broken[sequence])
            else:
                self._extend(sequence, index, sampled)
        if len(sampling) < len(chunks):
            self._deliver_scores(chunks)
        taken_s = time.perf_counter() - started
        self._metrics["busy_s"] += taken_s
        self._pace_s = taken_s / max(map(len, sampled.tokens), default=1)

    def _most_steps(self, chunks: list[Chunk]) -> int:
        """Return the maximum number of steps of the next call into the kernels. While a caller reads a stream, this is
        the number that fits into `PIECE_S` at the pace of the last call."""
        most = self._runner.most_steps
        if not any(chunk.sequence.reply.streams for chunk in chunks):
            return most
        return steps_at(self._pace_s, most)

    def _constrain(self, sequences: list[Sequence]) -> dict[Sequence, SparringError]:
        """Ask the constraint of each request for the tokens allowed next; return the errors by request. The failed
        requests are still computed, because other requests may read their keys."""
        broken = {}
        for sequence in sequences:
            try:
                with boundary(EngineError, f"request {sequence.request.id}: its constraint `allowed`"):
                    sequence.limit(self._vocab_size)
            except SparringError as cause:
                broken[sequence] = cause
        return broken

    def _compute(self, chunks: list[Chunk], steps: int) -> SampledTokens:
        try:
            with boundary(EngineError, f"engine {self._name}: step"):
                self._metrics["kv_copy_s"] += self._runner.copy(self.scheduler.cache.take_copies())
                self._runner.copy_states(self.scheduler.memory.take_state_copies())
                return self._runner.step(chunks, steps)
        except SparringError as cause:
            # a refusal by a kernel is a failure of the machinery too: the request itself was checked
            raise cause if isinstance(cause, EngineError) else EngineError(str(cause)) from cause

    def _extend(self, sequence: Sequence, index: int, sampled: SampledTokens) -> None:
        """Append the sampled tokens of row `index` to its request. Deliver them if the request streams or has
        finished."""
        before = len(sequence.logprobs)
        kept = None if sampled.kept is None else sampled.kept[index]
        tops = None if sampled.tops is None else sampled.tops[index]
        try:
            with boundary(EngineError, f"request {sequence.request.id}: its stop function `ends`"):
                version = sequence.served.version
                sequence.extend(sampled.tokens[index], sampled.logprobs[index], version, kept, tops)
        except SparringError as cause:
            self._fail(sequence, cause)
            return
        self.scheduler.advance(sequence, len(sequence.logprobs) - before - 1)
        if not before:
            self.latencies.began(sequence.reply)
        if sequence.reply.streams:
            self._deliveries.append(sequence.reply.extend(sequence.delta(before)))
        if sequence.finish_reason:
            self.latencies.ended(sequence.reply, len(sequence.logprobs))
            self.scheduler.finish(sequence)
            self._deliveries.append(sequence.reply.settle(sequence.completion()))

    def _deliver_scores(self, chunks: list[Chunk]) -> None:
        for sequence, begin, count, _ in chunks:
            if sequence.scored_from is not None and begin + count == len(sequence.tokens):
                self.scheduler.finish(sequence)
                self._deliveries.append(sequence.reply.settle(sequence.scored(sequence.served.version)))

    def _fail(self, sequence: Sequence, cause: SparringError) -> None:
        error = cause if isinstance(cause, EngineError) else EngineError(str(cause))
        self.scheduler.remove(sequence)
        self._deliveries.append(sequence.reply.settle(error))

    def _apply_updates(self) -> None:
        """Commit the updates whose turn has come. While an update waits for running requests, no new request begins.
        While the engine is asleep, no request runs."""
        draining = self._live_kv == "drain"
        self._updates = [update for update in self._updates if not update.claimed]
        while self._updates and (self._asleep or not (draining and self.scheduler.has_begun)):
            update = self._updates.pop(0)
            if update.claim():
                started = time.perf_counter()
                commit = self._wake_with if self._asleep else self._commit
                self._answer_with(update.reply, WeightsError, where(update.ref), partial(commit, update))
                stall_s = time.perf_counter() - started
                self._metrics["update_s"] += stall_s
                self._metrics["max_update_stall_s"] = max(self._metrics["max_update_stall_s"], stall_s)
        self.scheduler.draining = bool(self._updates)

    def _wake_with(self, update: Update) -> None:
        """Load the weights of an update and end the sleep, or refuse the update."""
        ref, staged = update.ref, update.staged
        if not update.wakes or isinstance(staged, Adapter):
            state = "one that is asleep; wake it with the weights of the whole model"
            raise WeightsError(f"{where(ref)}: expected an engine that is awake, got {state}")
        self._base.wake(ref, staged)
        self._asleep = False
        self._metrics["updates"] += 1
        self.scheduler.recompute(self._base.served, all_of_them=True)

    def _commit(self, update: Update) -> None:
        ref, staged, again = update.ref, update.staged, self._live_kv == "recompute"
        if isinstance(staged, Adapter):
            if self._base.broken is not None:
                raise WeightsError(f"{where(ref)}: {self._base.broken}")
            adapter = self._adapters.commit(ref, staged)
            if adapter is not None:
                self._metrics["updates"] += 1
                self.scheduler.recompute(adapter, all_of_them=again)
            return
        before = self._base.served.key
        if self._base.commit(ref, staged, has_adapters=bool(self._adapters)):
            self.scheduler.memory.forget(before)
            self._metrics["updates"] += 1
            self.scheduler.recompute(self._base.served, all_of_them=again)

    def _answer_with(self, reply: Reply, error: type[SparringError], where: str, function: Callable[[], Any]) -> None:
        try:
            with boundary(error, where):
                self._deliveries.append(reply.settle(function()))
        except SparringError as cause:
            self._deliveries.append(reply.settle(cause if isinstance(cause, error) else error(str(cause))))

    def _wake(self) -> None:
        """Deliver all results of this step at once."""
        self._adapters.sweep(sequence.served for sequence in self.scheduler.sequences)
        if self._deliveries:
            deliveries, self._deliveries = self._deliveries, []
            deliver(deliveries)

    def _end(self) -> None:
        """Fail all pending calls when the thread ends."""
        with self._lock:
            self._closed = True
        while not self._inbox.empty():
            self._inbox.get()()
        error = EngineError(f"engine {self._name}: closed before the request was finished")
        self._deliveries += [update.reply.settle(error) for update in self._updates]
        self._deliveries += [sequence.reply.settle(error) for sequence in self.scheduler.clear()]
        self._wake()


def steps_at(pace_s: float, most: int) -> int:
    """Return the number of steps of `pace_s` for one call while a caller reads a stream: `PIECE_S` in all, at least 1,
    at most `most`."""
    return max(1, min(most, int(PIECE_S / pace_s)))
