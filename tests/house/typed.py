"""Types: mypy is strict over the source, but for a list of modules in pyproject.toml that may only shrink."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MOST_UNTYPED = 101
"""Modules whose types are not checked yet. A new module is never one of them."""


def untyped(settings: Mapping[str, Any]) -> list[str]:
    """Return the modules whose errors mypy is told to ignore."""
    overrides = settings["tool"]["mypy"]["overrides"]
    return [name for override in overrides if override.get("ignore_errors") for name in override["module"]]


def unlawful(settings: Mapping[str, Any], source: Path, most: int) -> Iterator[str]:
    """Yield what is wrong with the list: a length other than `most`, a module that is gone, more than a module."""
    names = untyped(settings)
    if len(names) > most:
        yield f"pyproject.toml: mypy ignores {len(names)} modules, more than {most}: type yours"
    elif len(names) < most:
        yield f"tests/house/typed.py: lower MOST_UNTYPED from {most} to {len(names)}"
    if names != sorted(set(names)):
        yield "pyproject.toml: the modules that mypy ignores are sorted, each once"
    for name in names:
        if not (source / name.replace(".", "/")).with_suffix(".py").is_file():
            yield f"pyproject.toml: {name} is no module"
    if not settings["tool"]["mypy"].get("strict"):
        yield "pyproject.toml: mypy is strict"


def findings() -> Iterator[str]:
    """Yield what is wrong with the list of the project."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    yield from unlawful(settings, ROOT / "src", MOST_UNTYPED)
