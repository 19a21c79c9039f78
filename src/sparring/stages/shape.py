"""What a model can hold of a conversation, and how many token ids it has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparring.engine.config import EngineConfig
from sparring.errors import refusal
from sparring.model.config import DType
from sparring.model.hub import base_folder

if TYPE_CHECKING:
    from sparring.model.outline import Outline


def folder_shape(folder: Path) -> Outline:
    """The sizes of the checkpoint in `folder`, or of an adapter's base, in the defaults of `outline`.

    Raises:
        BadInput: there is no config or no weights in the folder, or the library makes no model of the config.
    """
    from sparring.model.outline import outline

    folder = base_folder(folder)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise refusal(str(folder), "weights (*.safetensors)", "a folder without", "copy or download the whole checkpoint")
    return outline(folder, numerics="fast")


def context_room(shape: Outline, engine: EngineConfig, dtype: DType) -> int:
    """Most tokens of one conversation: the model's positions, or what the engine's cache holds where that is less."""
    return min(shape.max_positions, engine.cache_tokens(shape.token_bytes(dtype)))
