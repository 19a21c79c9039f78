"""Pools of boxes under test, by `[sandbox] kind`: ours; and with SPARRING_SANDBOX=package.module:factory one of yours,
on the same contracts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from image_files import open_folder, python_image
from sandboxes import Bench, Work

from sparring.protocols import Boxes, Sandbox
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.images.image import UnpackedImage
from sparring.sandbox.make import make_boxes
from sparring.types import BoxSpec

KIND = os.environ.get("SPARRING_SANDBOX", "bubblewrap")
IN_IMAGE = "bubblewrap, in an image"
KINDS = [KIND, *([pytest.param(IN_IMAGE, marks=pytest.mark.full)] if KIND == "bubblewrap" else [])]


class ImagedBoxes:
    """Pool whose boxes are those of one image. Implements `Boxes`.

    Args:
        boxes: pool of boxes of any image.
    """

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes

    async def take(self, spec: BoxSpec) -> Sandbox:
        return await self._boxes.take(replace(spec, image="of its own"))

    async def close(self) -> None:
        await self._boxes.close()


@pytest.fixture(scope="module", params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Runs a coroutine function with a pool of the implementation under test."""
    with open_folder() as folder, asyncio.Runner() as runner:
        if request.param == IN_IMAGE:
            image = UnpackedImage(python_image(folder))
            boxes: Boxes = ImagedBoxes(BubblewrapBoxes(SandboxConfig(servers=1), image_of=lambda name: image))
        else:
            boxes = make_boxes(SandboxConfig(kind=request.param, servers=1))

        async def bounded(work: Work) -> Any:
            async with asyncio.timeout(60):
                return await work(boxes)

        yield lambda work: runner.run(bounded(work))
        runner.run(boxes.close())
