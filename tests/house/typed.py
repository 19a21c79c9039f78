"""Types: mypy is strict over the whole source."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def unlawful(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what mypy is told to leave out: a module whose errors it ignores, or the strictness."""
    for override in settings["tool"]["mypy"]["overrides"]:
        if override.get("ignore_errors"):
            yield f"pyproject.toml: mypy ignores {', '.join(override['module'])}: type them"
    if not settings["tool"]["mypy"].get("strict"):
        yield "pyproject.toml: mypy is strict"


def findings() -> Iterator[str]:
    """Yield what mypy is told to leave out in this project."""
    yield from unlawful(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
