"""GGUF files by path, and the cached folders of their conversions. Torch-free."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from sparring.errors import refusal
from sparring.observe.terminal import say
from sparring.scratch import scratch
from sparring.user_cache import user_cache

SUFFIX = ".gguf"
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
"""Suffix of the name of a file that holds a part of a model."""
FORM = 3
"""Version of the output of `convert`; a new version uses new folders."""


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file at `path`: the file itself, or the only one of a folder without config.json. None if there
    is none. Raises BadInput if the folder holds several files, or a part of a model."""
    files = [path] if path.suffix.lower() == SUFFIX and path.is_file() else []
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() == SUFFIX and file.is_file())
    for file in files:
        if PART.search(file.name):
            raise refusal(
                str(file), "a whole model in one GGUF file", "a part of one", "merge it: llama-gguf-split --merge"
            )
    if len(files) > 1:
        named = ", ".join(file.name for file in files[:3])
        raise refusal(
            str(path), "a folder with one GGUF file", f"{len(files)}: {named}", "give the path of one of them"
        )
    return files[0] if files else None


def converted(file: Path) -> Path:
    """Return the checkpoint folder of a GGUF file. It is converted at its first use and cached under the digest of its
    bytes in `$XDG_CACHE_HOME/sparring/gguf`, by default `~/.cache/sparring/gguf`.

    Raises:
        BadInput: the file cannot be converted (see `convert`), or the cache cannot be written.
    """
    seen = file.stat()
    other = _find_tokenizer(file)
    digest = _digest(file, seen.st_size, seen.st_mtime_ns)
    if other is not None:
        digest += _digest(other, other.stat().st_size, other.stat().st_mtime_ns)[:8]
    folder = user_cache("gguf") / f"{file.stem}-{digest}-{FORM}"
    if not (folder / "config.json").is_file():
        say(f"converting {file} once, into {folder}", stream=sys.stderr)
        write(file, folder, seen)
    return folder


def write(file: Path, folder: Path, seen: os.stat_result | None = None) -> None:
    """Convert a GGUF file into `folder`. The folder appears complete or not at all, even with concurrent writers.

    Raises:
        BadInput: as `convert`; or the file's size or time changed since `seen` (None: since the call), the package
            `gguf` is not installed, or the disk cannot be written.
    """
    seen = seen or file.stat()
    if find_spec("gguf") is None:
        raise refusal(str(file), "the package gguf, which reads it", "none installed", "pip install 'sparring[gguf]'")
    from sparring.model.gguf.convert import convert

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch(folder.parent, folder.name) as staging:
            staging.chmod(0o755)
            other = _find_tokenizer(file)
            convert(file, other, staging)
            now = file.stat()
            if (now.st_size, now.st_mtime_ns) != (seen.st_size, seen.st_mtime_ns):
                remedy = "wait until it is written, and begin again"
                raise refusal(str(file), "a file that stays as it is", "one that changed while it was read", remedy)
            _set_times(staging, max(source.stat().st_mtime_ns for source in filter(None, (file, other))))
            if not folder.exists():
                os.rename(staging, folder)
    except OSError as error:
        remedy = "free its disk, or choose another place (of the cache: XDG_CACHE_HOME)"
        raise refusal(str(folder), "a place to write the converted checkpoint", str(error), remedy) from error


def _find_tokenizer(file: Path) -> Path | None:
    other = file.parent / "tokenizer.json"
    return other if other.is_file() else None


def _set_times(folder: Path, changed_ns: int) -> None:
    """Give the files the modification time of their source, so that a second conversion gives the same files: a run
    recognises a changed model by these times."""
    for file in folder.iterdir():
        os.utime(file, ns=(changed_ns, changed_ns))


@lru_cache(maxsize=64)
def _digest(file: Path, size: int, changed_ns: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
