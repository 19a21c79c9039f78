"""The sizes of a checkpoint, read from its `config.json` alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparring.engine.config import EngineConfig
from sparring.errors import refusal
from sparring.model.config import DType, InitConfig
from sparring.model.hub import base_folder

NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "max_positions": ("max_position_embeddings", "n_positions", "max_sequence_length"),
    "vocab_size": ("vocab_size",),
}
"""Our name -> what architectures call it."""


def folder_shape(folder: Path) -> InitConfig:
    """The sizes of the checkpoint in `folder`, or of an adapter's base, as those of a fresh model.

    Raises:
        BadInput: there is no config or no weights in the folder, or the config does not say the sizes.
    """
    folder = base_folder(folder)
    file = folder / "config.json"
    config = _config(file)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise refusal(str(folder), "weights (*.safetensors)", "a folder without", "copy or download the whole checkpoint")
    found = {name: _size(config, keys, file) for name, keys in NAMES.items()}
    width, heads = found["hidden_size"], found["num_heads"]
    try:
        return InitConfig(
            **found,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or width // heads,
            intermediate_size=config.get("intermediate_size") or config.get("n_inner") or 4 * width,
        )
    except ValueError as error:
        raise refusal(str(file), "sizes that fit together", str(error), "check the model's path") from error


def context_room(shape: InitConfig, engine: EngineConfig, dtype: DType) -> int:
    """Most tokens of one conversation: the model's positions, or what the engine's cache holds where that is less."""
    value_bytes = 2 if dtype == "bfloat16" else 4
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * value_bytes
    return min(shape.max_positions, engine.cache_tokens(token_bytes))


def _config(file: Path) -> Mapping[str, Any]:
    """The config of the language model: the whole file, or its part where there are also other modalities."""
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refusal(str(file), "a model's config", str(error), "repair the checkpoint") from error
    if not isinstance(whole, dict):
        raise refusal(str(file), "a JSON object", type(whole).__name__, "repair the checkpoint")
    return whole.get("text_config") or whole


def _size(config: Mapping[str, Any], keys: tuple[str, ...], file: Path) -> int:
    for key in keys:
        if isinstance(config.get(key), int):
            return config[key]
    raise refusal(str(file), f"a causal LM's {keys[0]}", ", ".join(config) or "no keys", "check the model's path")
