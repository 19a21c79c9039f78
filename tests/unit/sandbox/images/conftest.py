"""A store of images that the boxes' user can enter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from image_files import open_folder

from sparring.sandbox.images.store import ImageStore


@pytest.fixture
def store() -> Iterator[ImageStore]:
    with open_folder() as folder:
        yield ImageStore(folder / "images")
