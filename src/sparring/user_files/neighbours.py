"""User files that import files of their own folder, with separate modules for each folder.

A file that a recipe names is in no package, and its folder is not on `sys.path`: two worlds with a `helpers.py` each
would share a module. So its `import` statements search its folder first, except for the standard library, and modules
from there are loaded under a name that contains the folder. Imports through `importlib` are unchanged.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

_FOLDERS: dict[Path, _Folder] = {}


def run_file(path: Path) -> ModuleType:
    """Run a file again as a module that can import files of its folder. The imported files run again only if one of
    them has changed."""
    path = path.resolve()
    folder = _FOLDERS.setdefault(path.parent, _Folder(path.parent))
    folder.forget_changed()
    return folder.run(path, (path.stem,))


def with_neighbours(path: Path) -> list[Path]:
    """Return a file and all files of its folder that it imports, directly or not, sorted by path."""
    files, waiting = set[Path](), [path.resolve()]
    while waiting:
        file = waiting.pop()
        if file in files or not file.is_file():
            continue
        files.add(file)
        with suppress(SyntaxError, ValueError, OSError):
            for parts in _imported_modules(
                ast.parse(file.read_bytes()), file.relative_to(path.resolve().parent).parts[:-1]
            ):
                for end in range(1, len(parts) + 1):
                    waiting += filter(None, [_place(path.resolve().parent, parts[:end])])
    return sorted(files)


class _Folder:
    """Modules of one folder, by the parts of their name: `helpers.py` is ("helpers",)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._parts: dict[str, tuple[str, ...]] = {}

    def forget_changed(self) -> None:
        """Forget all modules of the folder if one of their files has changed."""
        if any(_stamp(path) != stamp for path, stamp in self._stamps.items()):
            for name in self._parts:
                sys.modules.pop(name, None)
            self._stamps.clear()
            self._parts.clear()

    def run(self, path: Path, parts: tuple[str, ...]) -> ModuleType:
        """Run a file as the module with the name `parts`."""
        name = self._name(parts)
        inside = [str(path.parent)] if path.name == "__init__.py" else None
        loader = SourceFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader, submodule_search_locations=inside)
        assert spec is not None, "a loader was handed over"
        module = importlib.util.module_from_spec(spec)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
        self._parts[name], self._stamps[path] = parts, _stamp(path)
        sys.modules[name] = module  # the file's dataclasses resolve their type hints through it
        try:
            loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
        return module

    def _name(self, parts: Sequence[str]) -> str:
        return ".".join(
            [f"sparring_user_{xxhash.xxh3_64_hexdigest(str(self._folder).encode())}_{parts[0]}", *parts[1:]]
        )

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        """Import as `builtins.__import__` does, but search the folder first."""
        beneath = self._parts.get((globals or {}).get("__package__") or "") if level else ()
        if beneath is None or (level == 0 and name.partition(".")[0] in sys.stdlib_module_names):
            return builtins.__import__(name, globals, locals, fromlist, level)
        parts = (*beneath[: len(beneath) - level + 1], *filter(None, name.split(".")))
        if not parts or _place(self._folder, parts[:1]) is None:
            return builtins.__import__(name, globals, locals, fromlist, level)
        modules = [self._module(parts[:end]) for end in range(1, len(parts) + 1)]
        for attribute in fromlist or ():
            if not hasattr(modules[-1], attribute) and _place(self._folder, (*parts, attribute)) is not None:
                self._module((*parts, attribute))
        return modules[-1] if fromlist else modules[0]

    def _module(self, parts: tuple[str, ...]) -> ModuleType:
        """Return the module with the name `parts`; its first import runs it."""
        name, path = self._name(parts), _place(self._folder, parts)
        if name in sys.modules:
            return sys.modules[name]
        if path is None:
            raise ModuleNotFoundError(f"No module named {'.'.join(parts)!r} in {self._folder}", name=".".join(parts))
        module = self.run(path, parts)
        if len(parts) > 1:
            setattr(sys.modules[self._name(parts[:-1])], parts[-1], module)
        return module


def _place(folder: Path, parts: Sequence[str]) -> Path | None:
    """Return the file of a module in a folder; None if the folder lacks it."""
    path = folder.joinpath(*parts)
    return next((file for file in (path / "__init__.py", path.with_name(f"{path.name}.py")) if file.is_file()), None)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return status.st_mtime_ns, status.st_size


def _imported_modules(tree: ast.Module, package: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the modules that import statements name; `from x import y` names both `x` and `x.y`."""
    modules: list[tuple[str, ...]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            beneath = tuple(package[: len(package) - node.level + 1]) if node.level else ()
            base = (*beneath, *filter(None, (node.module or "").split(".")))
            modules += [base, *((*base, alias.name) for alias in node.names)]
    return [parts for parts in modules if parts and parts[0] not in sys.stdlib_module_names]
