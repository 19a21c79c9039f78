"""Pools of boxes under test, by `[sandbox] kind`: ours; and with SPARRING_SANDBOX=package.module:factory one of yours,
on the same contracts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
from sandboxes import Bench, Work

from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.make import make_boxes

KINDS = [os.environ.get("SPARRING_SANDBOX", "bubblewrap")]


@pytest.fixture(scope="module", params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Runs a coroutine function with a pool of the implementation under test."""
    with asyncio.Runner() as runner:
        boxes = make_boxes(SandboxConfig(kind=request.param, servers=1))

        async def bounded(work: Work) -> Any:
            async with asyncio.timeout(60):
                return await work(boxes)

        yield lambda work: runner.run(bounded(work))
        runner.run(boxes.close())
