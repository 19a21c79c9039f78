"""`NativeEngine`: the asynchronous interface of the native engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from sparring.engine.check import EngineLimits, check_request, check_score
from sparring.engine.config import PAGE_SIZE, EngineConfig
from sparring.engine.metrics import Latencies
from sparring.engine.prompt_logprobs import prompt_logprobs
from sparring.engine.reply import Reply
from sparring.engine.sequence import Sequence
from sparring.engine.sizes import Sizes
from sparring.engine.update import OLD_STAYS, STAYS_ASLEEP, Update, check_model, stage, where
from sparring.engine.wire import ServedModel
from sparring.engine.worker import EngineWorker
from sparring.errors import EngineError, WeightsError
from sparring.generation import Completion, Delta, GenerateRequest, ScoreRequest, Scores
from sparring.kernels.pages import token_bytes
from sparring.model.causal import CausalModel
from sparring.types import WeightRef
from sparring.weights.upload import upload_bytes


class NativeEngine:
    """Engine that serves one model. Implements `Engine`. All tensor work happens on the thread of an `EngineWorker`;
    this class checks requests, passes them to the thread and waits for the answers.

    Args:
        model: model to serve, used by the engine alone from now on; the trainer has another copy. An adapter of the
            model becomes the engine's own adapter.
        name: name of the model in the run; updates of other models are refused.
        version: version of the weights that `model` holds.
        threads: CPU threads of the engine's thread; 0 keeps torch's number.
    """

    def __init__(
        self, model: CausalModel, config: EngineConfig, *, name: str = "policy", version: int = 0, threads: int = 0
    ) -> None:
        self._model, self._config, self._name = model, config, name
        sizes = Sizes.of(model, config)
        self._limits = EngineLimits(model.vocab_size, model.max_positions, sizes.num_pages * PAGE_SIZE)
        self._worker = EngineWorker(model, config, sizes, name=name, version=version, threads=threads)
        self._arrivals = 0

    @property
    def version(self) -> int:
        """Version of the weights for requests that name no adapter."""
        return self._worker.version

    @property
    def context(self) -> int:
        """Maximum number of tokens of one conversation."""
        return min(self._limits.max_positions, self._limits.capacity)

    @property
    def model(self) -> CausalModel:
        """Model that is served."""
        return self._model

    @property
    def metrics(self) -> dict[str, float]:
        """Counts since the start: steps, generated_tokens, prefill_tokens, scored_tokens, cached_tokens, preemptions,
        failed_steps, updates; busy_s; update_s and kv_copy_s, the seconds that steps waited for updates and for copies
        of pages; max_update_stall_s, the longest wait for an update; max_running, the maximum number of requests in one
        step. Levels: running_now and waiting_now, requests; and the metrics of `kv_metrics`.
        """
        return self._worker.metrics

    @property
    def latencies(self) -> Latencies:
        """Latencies of the requests that generate."""
        return self._worker.latencies

    def describe(self, instance: str) -> ServedModel:
        """Describe the engine for clients of a server; `instance` is a random name of this start of the server."""
        model = self._model
        return ServedModel(
            model=self._name,
            version=self.version,
            dtype=str(model.dtype).removeprefix("torch."),
            numerics=model.path_name,
            vocab_size=model.vocab_size,
            max_positions=model.max_positions,
            context=self.context,
            token_bytes=token_bytes(model.kv_heads, model.dtype),
            instance=instance,
            state_bytes=upload_bytes(parameter.numel() for parameter in model.parameters().values()),
        )

    async def check(self) -> None:
        """Check that requests are answered. Raises the EngineError that every request would get otherwise."""
        if (problem := self._worker.problem) is not None:
            raise EngineError(str(problem))

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one turn. A request that reaches the model's last position finishes with "length"."""
        async with self._serving(await self._sequence(request, Reply())) as reply:
            completion: Completion = await reply.result()
        return completion

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Sample one turn in pieces. Each call into the kernels yields a piece. While a caller reads, a call takes
        about `worker.PIECE_S`, or one step if a step is longer. A slow reader delays no other request: its unread
        pieces are joined."""
        async with (
            self._serving(await self._sequence(request, Reply(streams=True))) as reply,
            aclosing(reply.pieces()) as pieces,
        ):
            async for piece in pieces:
                yield piece

    async def abort(self, request: str) -> None:
        self._worker.tell(lambda: self._worker.abort(request))

    async def score(self, request: ScoreRequest) -> Scores:
        """Compute log-probabilities of given tokens, scheduled with the requests that generate and within the same
        budgets; in exact numerics they are bitwise equal to those of the trainer's forward. An update of the weights
        restarts the request, so that the whole result has one version. An aborted request raises EngineError."""
        check_score(request, self._limits)
        self._arrivals += 1
        async with self._serving(Sequence.to_score(request, Reply(), arrival=self._arrivals)) as reply:
            scores: Scores = await reply.result()
        return scores

    async def release(self, conversation: str) -> None:
        self._worker.tell(lambda: self._worker.scheduler.release(conversation))

    async def pull(self, ref: WeightRef) -> None:
        """Serve new weights: stage them, then swap and verify them between two steps. The return of this call
        acknowledges the update. Parked conversations are dropped; `engine.update.live_kv` decides about the keys and
        values of running requests.

        A reference to an adapter loads it next to the other adapters, or replaces its older version; the base model
        cannot change while adapters are loaded.

        On any failure the served version is either the old or the new one, completely. A caller that missed the
        acknowledgement (for example because it was cancelled) may call again: the served version is acknowledged again.
        Raises WeightsError if the update failed its verification or took too long; the engine keeps serving the old
        version.
        """
        await self._take(ref, wakes=False)

    async def sleep(self) -> None:
        """Give the memory of weights, of their packed copies and of the cache back to the system. Running requests
        continue after the wake, after the tokens that they have sampled. Updates in progress are refused. An engine
        with adapters, or on a GPU, cannot sleep."""
        await self._worker.call(EngineError, f"engine {self._name}: sleep", self._worker.sleep)

    async def wake(self, ref: WeightRef) -> None:
        await self._take(ref, wakes=True)

    async def _take(self, ref: WeightRef, *, wakes: bool) -> None:
        check_model(ref, self._name)
        stays = STAYS_ASLEEP if wakes else OLD_STAYS
        late = WeightsError(
            f"{where(ref)}: not applied within engine.update.timeout_s = {self._config.update.timeout_s}; {stays}"
        )
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._config.update.timeout_s
        try:
            staged = await asyncio.wait_for(asyncio.to_thread(stage, self._model, ref), self._config.update.timeout_s)
        except TimeoutError:
            raise late from None
        update = Update(ref, staged, wakes=wakes)
        self._worker.ask(lambda: self._worker.update(update))
        try:
            if not await update.reply.within(max(0.0, deadline - clock())) and update.claim():
                raise late
            await update.reply.result()
        finally:
            update.claim()

    async def drop(self, adapter: str) -> None:
        """Serve no new request with an adapter. The adapter is unloaded when its running requests have finished."""
        await self._worker.call(EngineError, f"adapter {adapter}", lambda: self._worker.drop(adapter))

    async def close(self) -> None:
        self._worker.tell(self._worker.stop)
        await asyncio.to_thread(self._worker.join)

    @asynccontextmanager
    async def _serving(self, sequence: Sequence) -> AsyncIterator[Reply]:
        """Pass a request to the engine's thread. If the caller leaves before the answer, drop the request."""
        self._worker.ask(lambda: self._worker.add(sequence))
        try:
            yield sequence.reply
        finally:
            if not sequence.reply.given:
                self._worker.tell(lambda: self._worker.scheduler.remove(sequence))

    async def _sequence(self, request: GenerateRequest, reply: Reply) -> Sequence:
        """Check a request and make its `Sequence`. If the request asks for prompt_logprobs, its prompt is scored
        first."""
        max_new = check_request(request, self._limits)
        self._worker.check_adapter(request.adapter)
        self._arrivals += 1
        keep = self._config.kv.across_turns != "drop"
        sequence = Sequence.of(request, reply, arrival=self._arrivals, max_new=max_new, keep=keep)
        sequence.prompt_logprobs = await prompt_logprobs(self, request)
        return sequence
