"""What a parametrised test leaves to the full suite, and what is made once in a suite."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the suite's own, filled by the first worker that asks for it: read-only.

    Args:
        name: of the folder.
        make: fills it.
    """
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (base / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / f"{name}.made").exists():
            (base / name).mkdir()
            make(base / name)
            (base / f"{name}.made").touch()
    return base / name


def short_of(values: Iterable[Any], short: Container[Any]) -> list[Any]:
    """Return all values for `parametrize`, marked `full` but for those of the short suite.

    Args:
        values: of the full suite; a tuple stands for several parameters.
        short: the values that `make test` takes too.
    """
    return [value if value in short else _full(value) for value in values]


def _full(value: Any) -> Any:
    several = value if isinstance(value, tuple) else (value,)
    return pytest.param(*several, marks=pytest.mark.full)
