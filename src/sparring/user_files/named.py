"""Python objects that a recipe names: `path/to/file.py:name`, which may import files of its folder, or
`package.module:name`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from sparring.errors import BadInput, boundary, refusal
from sparring.observe.wait_reports import waiting
from sparring.user_files.neighbours import run_file


def named(name: str, where: str) -> Any:
    """Return the object at `path/to/file.py:name` or `package.module:name`; refuse (`BadInput`) a name that has no
    object, and a module that fails to run."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise refusal(where, "path/to/file.py:name or package.module:name", repr(name), "add the part after the colon")
    module = _from_file(Path(source), where) if source.endswith(".py") else _from_package(source, where)
    if not hasattr(module, attribute):
        names = [n for n, v in vars(module).items() if callable(v) and v.__module__ == module.__name__]
        raise refusal(
            where, f"a name defined in {source}", repr(attribute), f"use one of: {', '.join(names) or 'none'}"
        )
    return getattr(module, attribute)


def _from_package(source: str, where: str) -> Any:
    expected, advice = f"an installed module {source}", "install it, or name a file.py"
    with waiting(f"the import of {source}"), boundary(BadInput, where, expected, advice):
        return importlib.import_module(source)


def _from_file(path: Path, where: str) -> Any:
    if not path.is_file():
        raise refusal(
            where, f"a Python file {path}", "no such file", "check the path; it is relative to the working directory"
        )
    advice = "correct it; what ends the process belongs under if __name__ == '__main__':"
    with waiting(f"the import of {path}"), boundary(BadInput, where, f"a Python file {path} that runs", advice):
        return run_file(path)
