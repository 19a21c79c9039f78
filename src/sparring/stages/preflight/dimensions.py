"""What a model can hold of a conversation, and how many token ids it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.engine.config import EngineConfig
from sparring.errors import BadInput, boundary, refusal
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
        raise refusal(
            str(folder), "weights (*.safetensors)", "a folder without", "copy or download the whole checkpoint"
        )
    _check_config(folder / "config.json")
    return outline(folder, numerics="fast")


def _check_config(file: Path) -> None:
    """It is a JSON object of an architecture over tokens.

    Raises:
        BadInput: it is not.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from sparring.model.library import class_of

    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refusal(str(file), "a model's config", str(error), "repair the checkpoint") from error
    if not isinstance(found, dict):
        raise refusal(str(file), "a JSON object", type(found).__name__, "repair the checkpoint")
    with boundary(BadInput, str(file), "a config that the library knows", "check the model's path"):
        config = AutoConfig.from_pretrained(file.parent)
    if class_of(config) is AutoModelForCausalLM and type(config) not in AutoModelForCausalLM._model_mapping:
        raise refusal(str(file), "a causal LM's config", f"one of {config.model_type}", "check the model's path")


def context_room(shape: Outline, engine: EngineConfig, dtype: DType) -> int:
    """Most tokens of one conversation: the model's positions, or what the engine's cache holds where that is less."""
    return min(shape.max_positions, engine.cache_tokens(shape.token_bytes(dtype)))
