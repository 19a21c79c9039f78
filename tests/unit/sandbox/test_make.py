"""`[sandbox] kind` names a backend, or is refused by name."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from refusals import refused_at

from sparring.errors import BadInput
from sparring.sandbox.check import check_sandbox
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.make import make_boxes
from sparring.types import BoxSpec

BACKEND = """
import msgspec
from sparring.sandbox.bubblewrap import BubblewrapBoxes

class Mine(BubblewrapBoxes):
    pass

def factory(config, mounts):
    return Mine(config, mounts)

def other(config, mounts):
    return Mine(msgspec.structs.replace(config, bwrap="bwrap"), mounts)

def nothing(config, mounts):
    return None

def fails(config, mounts):
    raise RuntimeError("no cloud")
"""


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[str]:
    """A module of a user's, whose folder is on the path."""
    name = f"backend_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(BACKEND)
    sys.path.insert(0, str(tmp_path))
    yield name
    sys.path.remove(str(tmp_path))


def test_a_backend_of_the_user_s_makes_the_boxes(backend: str) -> None:
    async def main() -> str:
        boxes = make_boxes(SandboxConfig(kind=f"{backend}:factory", servers=1))
        assert type(boxes).__module__ == backend
        box = await boxes.take(BoxSpec(timeout_s=20.0))
        result = await box.exec("echo mine")
        await boxes.close()
        return result.stdout

    assert asyncio.run(main()) == "mine\n"


def test_a_kind_that_makes_no_boxes_is_refused(backend: str) -> None:
    for kind in ("no_such_module:factory", f"{backend}:gone", f"{backend}:nothing"):
        with refused_at("sandbox.kind", "package.module:factory"):
            make_boxes(SandboxConfig(kind=kind))
    with pytest.raises(BadInput, match="no cloud"):
        make_boxes(SandboxConfig(kind=f"{backend}:fails"))


def test_a_backend_needs_no_bubblewrap_to_be_checked(backend: str) -> None:
    check_sandbox(SandboxConfig(kind=f"{backend}:other", bwrap="no-such-program", servers=1))
    with refused_at("sandbox.kind", "boxes that run a command"):
        check_sandbox(SandboxConfig(kind=f"{backend}:factory", bwrap="no-such-program", servers=1))


@pytest.mark.parametrize("kind", ["docker", ":factory", "module:", ""])
def test_a_kind_has_a_module_and_a_name(kind: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="package.module:factory"):
        msgspec.convert({"kind": kind}, SandboxConfig)
