"""Hooks around the methods of a part: time spans, and prefixes of metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from sparring.observe.spans import Spans
from sparring.protocols import Trainer
from sparring.types import Batch, StepResult

T = TypeVar("T")


class Overlay:
    """Object with some methods replaced; all other attributes are those of `target`."""

    def __init__(self, target: Any, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._target = target
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def timed(part: T, spans: Spans, activities: Mapping[str, str]) -> T:
    """Return `part` with time spans around some of its methods.

    Args:
        part: engine or trainer; the methods are coroutines or return asynchronous iterators.
        activities: name of the span by method. An iterator's span includes the time of its reader.
    """
    wrapped = {name: _with_span(getattr(part, name), partial(spans.span, span)) for name, span in activities.items()}
    return cast(T, Overlay(part, wrapped))


def _with_span(method: Callable[..., Any], span: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    async def awaited(result: Awaitable[Any]) -> Any:
        with span():
            return await result

    async def iterated(result: AsyncIterator[Any]) -> AsyncIterator[Any]:
        with span():
            async with aclosing(cast(Any, result)) as items:
                async for item in items:
                    yield item

    def call(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        return iterated(result) if isinstance(result, AsyncIterator) else awaited(result)

    return call


def prefixed(
    trainer: Trainer, use: str, of_batch: Callable[[Mapping[str, float]], Mapping[str, float]] = dict
) -> Trainer:
    """Return `trainer`, which trains a model other than the policy, with `use` as a prefix of its metrics:
    `critic/loss_value`. `of_batch` maps a batch's metrics to those that are reported."""

    def named(metrics: Mapping[str, float]) -> dict[str, float]:
        return {f"{use}/{name}": value for name, value in metrics.items()}

    async def forward_backward(batch: Batch) -> Mapping[str, float]:
        return named(of_batch(await trainer.forward_backward(batch)))

    async def step(*, ends_update: bool = True) -> StepResult:
        result = await trainer.step(ends_update=ends_update)
        return replace(result, metrics=named(result.metrics))

    return cast(Trainer, Overlay(trainer, {"forward_backward": forward_backward, "step": step}))
