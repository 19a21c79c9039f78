"""Files of a run that readers may open at any time: each is there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file under a name beside it, then give it its own. What stands at that name, a link too, is removed and
    never written through.

    Args:
        path: of the file.
        data: all that it holds.
        mode: its permissions, narrowed by the process's mask.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(path.name + ".part")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(data)
    draft.replace(path)
