"""Real boxes for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.types import BoxSpec

InBox = Callable[..., Any]


@pytest.fixture(scope="module")
def in_box() -> Iterator[InBox]:
    """Runs `await work(box)` with a box of its own, whose spec is what is named."""
    with asyncio.Runner() as runner:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1), {})

        async def bounded(work: Callable[[Any], Any], spec: BoxSpec) -> Any:
            async with asyncio.timeout(60):
                box = await boxes.take(spec)
                try:
                    return await work(box)
                finally:
                    await box.close()

        yield lambda work, **spec: runner.run(bounded(work, BoxSpec(**{"timeout_s": 20.0} | spec)))
        runner.run(boxes.close())
