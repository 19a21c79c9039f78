"""An engine under load on a virtual clock: the real plan of steps over a real cache, without the kernels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from sparring.engine.cache.kv import KvCache, kv_metrics
from sparring.engine.cache.memory import PagedMemory
from sparring.engine.reply import Reply
from sparring.engine.scheduler import StepScheduler
from sparring.engine.sequence import Sequence
from sparring.engine.weight_names import ServedWeights
from sparring.generation import Completion, Delta, GenerateRequest
from sparring.testing.scripted_engine import Script, ScriptedEngine

PAGE = 16


class LoadedEngine(ScriptedEngine):
    """The scripted engine behind the native engine's queue: a step takes time, and every token that is prefilled takes
    more.

    Args:
        script: the ids to "sample" for a request.
        pages: of the cache, `PAGE` tokens each.
        slots: most requests in one step.
        step_s: time of a step.
        prefill_s: time of each token that is prefilled.
    """

    def __init__(
        self, script: Script, *, pages: int, slots: int = 256, step_s: float = 0.02, prefill_s: float = 0.001
    ) -> None:
        super().__init__(script)
        self._plans = StepScheduler(
            PagedMemory(KvCache(pages, PAGE, share_prefixes=True)), max_running=slots, max_batch_tokens=512
        )
        self._step_s, self._prefill_s = step_s, prefill_s
        self._prefilled = 0
        self._ended: dict[Sequence, asyncio.Event] = {}
        self._steps: asyncio.Task[None] | None = None
        self.served: list[tuple[float, GenerateRequest]] = []

    @property
    def metrics(self) -> dict[str, float]:
        """Return what the native engine reports of its load."""
        running, waiting = self._plans.load
        load = {"preemptions": self._plans.num_preempted, "running_now": running, "waiting_now": waiting}
        counts = {**load, "prefill_tokens": self._prefilled}
        return {**super().metrics, **{k: float(v) for k, v in counts.items()}, **kv_metrics(self._plans.cache, PAGE)}

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Yield a reply when it has had its steps."""
        sequence = Sequence.of(
            request, Reply(), arrival=len(self.requests), max_new=len(self._script(request)) + 1, keep=True
        )
        sequence.served = ServedWeights(version=self.version)
        self._ended[sequence] = ended = asyncio.Event()
        self._plans.add(sequence)
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._run())
        try:
            await ended.wait()
        finally:
            del self._ended[sequence]
            self._plans.remove(sequence)
        async for piece in super().stream(request):
            yield piece
        self.served.append((asyncio.get_running_loop().time(), request))

    async def release(self, conversation: str) -> None:
        """Forget a conversation's KV."""
        await super().release(conversation)
        self._plans.release(conversation)

    async def _run(self) -> None:
        """Take steps as long as anything is asked."""
        while self._plans.busy:
            chunks = self._plans.plan()
            read = sum(chunk.count for chunk in chunks if chunk.count > 1)
            self._prefilled += read
            await asyncio.sleep(self._step_s + self._prefill_s * read)
            for sequence, _, _, samples in chunks:
                if not samples or sequence not in self._ended or sequence.slot < 0:
                    continue
                tokens = (*self._script(sequence.request), 0)
                sequence.extend([tokens[len(sequence.logprobs)]], [0.0], self.version)
                if sequence.finish_reason:
                    self._plans.finish(sequence)
                    self._ended[sequence].set()
