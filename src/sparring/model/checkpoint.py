"""Checkpoint folders: the check that a folder holds a model with a wanted head, and the outline of this model."""

from __future__ import annotations

import json
from pathlib import Path

from sparring.errors import refusal
from sparring.model.hub import base_folder
from sparring.model.load import read_config
from sparring.model.outline import Outline, outline


def checkpoint_outline(folder: Path, head: str = "tokens") -> Outline:
    """Return the outline of the checkpoint in `folder`, or of an adapter's base, with the defaults of `outline`.

    Args:
        head: head that the checkpoint must have, as in `load`.

    Raises:
        BadInput: the folder has no config or no weights, transformers cannot make a model of the config, or the model
            has another head.
    """
    folder = base_folder(folder)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise refusal(
            str(folder), "weights (*.safetensors)", "none in the folder", "copy or download the whole checkpoint"
        )
    _check_config(folder / "config.json")
    read_config(str(folder), "fast", head)
    return outline(folder, numerics="fast", scalar=head == "scalar")


def _check_config(file: Path) -> None:
    """Refuse a file that is no JSON object."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refusal(str(file), "a model's config", str(error), "repair the checkpoint") from error
    if not isinstance(config, dict):
        raise refusal(str(file), "a JSON object", type(config).__name__, "repair the checkpoint")
