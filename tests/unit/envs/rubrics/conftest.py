"""Boxes of the rubrics that run code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def boxes(runner: asyncio.Runner) -> Iterator[BubblewrapBoxes]:
    async def made() -> BubblewrapBoxes:
        return BubblewrapBoxes(SandboxConfig(servers=2))

    boxes = runner.run(made())
    yield boxes
    runner.run(boxes.close())
