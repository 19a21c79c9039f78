"""Real boxes for the tests of this folder: one event loop and one pool per test file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from boxed_program import descendants

from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.types import BoxSpec, ExecResult


class Bench:
    """A pool and the loop that it lives in."""

    def __init__(self, runner: asyncio.Runner, boxes: BubblewrapBoxes) -> None:
        self.runner = runner
        self.boxes = boxes

    def run(self, work: Callable[[BubblewrapBoxes], Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await work(self.boxes)

        return self.runner.run(bounded())

    def box(self, work: Callable[[Any], Any], spec: BoxSpec = BoxSpec(timeout_s=20.0)) -> Any:
        """What comes of work with a fresh box, which is closed then."""

        async def with_box(boxes: BubblewrapBoxes) -> Any:
            box = await boxes.take(spec)
            try:
                return await work(box)
            finally:
                await box.close()

        return self.run(with_box)

    def python(self, *codes: str, **spec: Any) -> ExecResult:
        """The codes, one after another in one fresh box; the last one's result."""

        async def work(box: Any) -> ExecResult:
            return [await box.python(code) for code in codes][-1]

        return self.box(work, BoxSpec(**{"timeout_s": 20.0} | spec))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        boxes = BubblewrapBoxes(SandboxConfig(servers=2, concurrency=4))
        yield Bench(runner, boxes)
        runner.run(boxes.close())


@pytest.fixture
def family() -> Callable[[int], list[int]]:
    """`descendants` without those that this process had before the test: a world that lives on has processes of its
    own."""
    earlier = set(descendants(os.getpid()))
    return lambda pid: [process for process in descendants(pid) if process not in earlier]
