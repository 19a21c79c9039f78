"""The user's cache folder, for files that can be made again: converted models, unpacked images."""

from __future__ import annotations

import os
from pathlib import Path

from sparring.errors import refusal


def user_cache(kind: str) -> Path:
    """Return the user's cache folder of one kind: `$XDG_CACHE_HOME/sparring/KIND` if that variable is an absolute path
    (XDG Base Directory Specification), otherwise `~/.cache/sparring/KIND`.

    Raises:
        BadInput: neither that variable nor a home folder is known.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        try:
            root = Path.home() / ".cache"
        except RuntimeError as error:
            raise refusal("the user's cache", "a home folder", str(error), "set XDG_CACHE_HOME to a place") from error
    return root / "sparring" / kind
