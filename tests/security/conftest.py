"""Real boxes for the tests of this folder."""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from image_files import open_folder, python_image

from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.groups import hierarchy_of_this_process
from sparring.sandbox.images.image import UnpackedImage
from sparring.sandbox.mounts import box_identity
from sparring.types import BoxSpec

InBox = Callable[..., Any]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this machine cannot show, as the marks say."""
    makes_groups = hierarchy_of_this_process() is not None

    def is_possible(item: pytest.Item) -> bool:
        program = item.get_closest_marker("program")
        has_program = program is None or shutil.which(program.args[0], path="/usr/bin:/bin") is not None
        is_there = bool(box_identity()) or item.get_closest_marker("root") is None
        return has_program and is_there and (makes_groups or item.get_closest_marker("groups") is None)

    left_out = [item for item in items if not is_possible(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_possible(item)]


@pytest.fixture(scope="session")
def unpacked() -> Iterator[Callable[[], UnpackedImage]]:
    """An image with a shell and a Python, which is made when it is first asked for."""
    with open_folder() as folder:
        yield functools.cache(lambda: UnpackedImage(python_image(folder)))


@pytest.fixture(scope="module")
def in_box(unpacked: Callable[[], UnpackedImage]) -> Iterator[InBox]:
    """Runs `await work(box)` with a box of its own, whose spec is what is named; any image is that of `unpacked`."""
    with asyncio.Runner() as runner:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1), {}, lambda name: unpacked())

        async def bounded(work: Callable[[Any], Any], spec: BoxSpec) -> Any:
            async with asyncio.timeout(60):
                box = await boxes.take(spec)
                try:
                    return await work(box)
                finally:
                    await box.close()

        yield lambda work, **spec: runner.run(bounded(work, BoxSpec(**{"timeout_s": 20.0} | spec)))
        runner.run(boxes.close())
