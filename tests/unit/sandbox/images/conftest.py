"""A store of images that the boxes' user can enter."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparring.sandbox.images.store import ImageStore


@pytest.fixture
def store() -> Iterator[ImageStore]:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    yield ImageStore(folder / "images")
    shutil.rmtree(folder)
