"""The folder of a checkpoint, for verbs that take one: the folder itself, or the newest weights of a run."""

from __future__ import annotations

from pathlib import Path

from sparring.errors import refusal
from sparring.model.peft import is_adapter
from sparring.stages.context import APART, ORDER

PLACES = ("", "export", *(f"{stage}/model" for stage in reversed(ORDER) if stage not in (*APART, "export")))
"""Inside the folder that the user names, newest first."""


def find_checkpoint(path: Path) -> Path:
    """Return the Hugging Face or adapter folder that `path` means.

    Raises:
        BadInput: there is none.
    """
    for place in PLACES:
        if (path / place / "config.json").is_file() or is_adapter(path / place):
            return path / place
    got = "a folder without config.json" if path.is_dir() else "no folder"
    raise refusal(str(path), "a Hugging Face checkpoint folder or the folder of a run", got, "check the path")
