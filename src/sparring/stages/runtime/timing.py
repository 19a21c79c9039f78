"""Trainer and engine under a stopwatch: which share of a step went into generating, training, both, neither."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import aclosing

from sparring.generation import Completion, Delta, GenerateRequest, ScoreRequest, Scores
from sparring.observe.spans import Spans
from sparring.protocols import Engine, Trainer
from sparring.types import Batch, CheckpointRef, Sample, StepResult, WeightRef


class WatchedEngine:
    """An engine whose waiting requests count as `generating`. Implements `protocols.Engine`."""

    def __init__(self, engine: Engine, spans: Spans) -> None:
        self._engine = engine
        self._spans = spans
        self._counted = dict(engine.metrics)

    @property
    def version(self) -> int:
        """The version that is served."""
        return self._engine.version

    @property
    def metrics(self) -> Mapping[str, float]:
        """As the engine."""
        return self._engine.metrics

    def lap(self) -> dict[str, float]:
        """Metrics of the step that ends now, `engine/<name>`: how far counts grew since the lap before, levels as they
        are."""
        before, self._counted = self._counted, dict(self._engine.metrics)
        is_level = {name: name.endswith("_now") or name.startswith("max_") for name in self._counted}
        return {
            f"engine/{name}": value - (0.0 if is_level[name] else before.get(name, 0.0))
            for name, value in self._counted.items()
        }

    async def generate(self, request: GenerateRequest) -> Completion:
        """As the engine."""
        with self._spans.span("generating"):
            return await self._engine.generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """As the engine; time that the reader takes counts too."""
        with self._spans.span("generating"):
            async with aclosing(self._engine.stream(request)) as pieces:
                async for piece in pieces:
                    yield piece

    async def abort(self, request: str) -> None:
        """As the engine."""
        await self._engine.abort(request)

    async def score(self, request: ScoreRequest) -> Scores:
        """As the engine; counts as `scoring`."""
        with self._spans.span("scoring"):
            return await self._engine.score(request)

    async def fork(self, request: str, seeds: Mapping[str, int]) -> tuple[GenerateRequest, ...]:
        """As the engine."""
        return await self._engine.fork(request, seeds)

    async def release(self, conversation: str) -> None:
        """As the engine."""
        await self._engine.release(conversation)

    async def pull(self, ref: WeightRef) -> None:
        """As the engine; counts as `updating`."""
        with self._spans.span("updating"):
            await self._engine.pull(ref)

    async def close(self) -> None:
        """As the engine."""
        await self._engine.close()


class WatchedTrainer:
    """A trainer whose computing counts as `training`. Implements `protocols.Trainer`."""

    def __init__(self, trainer: Trainer, spans: Spans) -> None:
        self._trainer = trainer
        self._spans = spans

    @property
    def version(self) -> int:
        """The version of the weights that the trainer holds."""
        return self._trainer.version

    async def forward(self, rows: Sequence[Sample], needs: Set[str]) -> Sequence[Mapping[str, tuple[float, ...]]]:
        """As the trainer."""
        with self._spans.span("training"):
            return await self._trainer.forward(rows, needs)

    async def score(self, teacher: str, request: ScoreRequest) -> Scores:
        """As the trainer."""
        with self._spans.span("training"):
            return await self._trainer.score(teacher, request)

    async def forward_backward(self, batch: Batch) -> Mapping[str, float]:
        """As the trainer."""
        with self._spans.span("training"):
            return await self._trainer.forward_backward(batch)

    async def step(self, *, ends_update: bool = True) -> StepResult:
        """As the trainer."""
        with self._spans.span("training"):
            return await self._trainer.step(ends_update=ends_update)

    async def push(self) -> WeightRef:
        """As the trainer; counts as `updating`."""
        with self._spans.span("updating"):
            return await self._trainer.push()

    async def save(self, path: str, *, stage: str, metrics: Mapping[str, float]) -> CheckpointRef:
        """As the trainer."""
        return await self._trainer.save(path, stage=stage, metrics=metrics)

    async def restore(self, ref: CheckpointRef) -> None:
        """As the trainer."""
        await self._trainer.restore(ref)


class StepClock:
    """Times of one step, for its metrics."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._last = time.monotonic()

    def lap(self, tokens: float) -> dict[str, float]:
        """Metrics of the step that ends now: `time/step_s`, `time/<activity>` as shares of it, and `time/tokens_per_s`.

        Args:
            tokens: sampled tokens of the step.
        """
        now = time.monotonic()
        step_s, self._last = now - self._last, now
        shares = {f"time/{name}": share for name, share in self._spans.shares().items()}
        return {"time/step_s": step_s, "time/tokens_per_s": tokens / step_s if step_s else 0.0, **shares}
