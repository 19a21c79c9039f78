"""What the contracts of boxes share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sparring.protocols import Boxes
from sparring.types import BoxSpec

Work = Callable[[Boxes], Awaitable[Any]]
Bench = Callable[[Work], Any]
SPEC = BoxSpec(timeout_s=20.0, processes=32)


def in_box(bench: Bench, work: Callable[[Any], Awaitable[Any]], spec: BoxSpec = SPEC) -> Any:
    """Return what comes of work with a fresh box, which is closed then."""

    async def with_box(boxes: Boxes) -> Any:
        box = await boxes.take(spec)
        try:
            return await work(box)
        finally:
            await box.close()

    return bench(with_box)
