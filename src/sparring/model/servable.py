"""Preflight: is a checkpoint complete, and can it be served with the requested numerics?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sparring.errors import BadInput, boundary
from sparring.model.attention import IMPLEMENTATION
from sparring.model.causal import CausalModel
from sparring.model.decoder import DENSE
from sparring.model.library import class_of
from sparring.model.load import DTYPES, build_model, load, read_config, refuse_incomplete
from sparring.model.peft import base_of

SMALL_BYTES = 1 << 30
"""Maximum size, in bytes, of a checkpoint that is simply loaded."""


def check_servable(
    path: str | Path, *, dtype: str, device: str, numerics: str, small_bytes: int = SMALL_BYTES
) -> CausalModel:
    """Prove that `load` would succeed, in seconds for a checkpoint of any size.

    For a large checkpoint, a model of two layers with random weights is made and verified. Names and shapes in the
    headers of its files are compared with its config, for the dense models of the Llama family; others may rename
    weights while loading.

    Args:
        small_bytes: maximum size, in bytes, of files that are loaded completely.

    Returns:
        The loaded model, or the small one.

    Raises:
        BadInput: a stage of the run would refuse the checkpoint.
    """
    where = base_of(path)
    config = read_config(where, numerics, "tokens")
    files = sorted(Path(where).glob("*.safetensors"))
    if not files or sum(file.stat().st_size for file in files) <= small_bytes:
        return load(path, dtype=dtype, device=device, numerics=numerics)
    if config.model_type in DENSE:
        _check_headers(where, config, files)
    with boundary(BadInput, where, "a config that the library makes a model of", "repair it or take another"):
        short = _shorten(config)
        module = class_of(short).from_config(short, dtype=DTYPES[dtype], attn_implementation=IMPLEMENTATION)
    return build_model(module.to(device), where, numerics=numerics)


def _check_headers(where: str, config: Any, files: list[Path]) -> None:
    from safetensors import safe_open

    with torch.device("meta"), boundary(BadInput, where, "a config that the library makes a model of", "repair it"):
        module = class_of(config).from_config(config)
    expected = {name: list(parameter.shape) for name, parameter in module.named_parameters()}  # a tied weight once
    shapes: dict[str, list[int]] = {}
    with boundary(BadInput, where, "safetensors files", "copy or download the checkpoint again"):
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    wrong = [
        (name, shapes[name], shape) for name, shape in expected.items() if name in shapes and shapes[name] != shape
    ]
    refuse_incomplete(where, expected.keys() - shapes.keys(), wrong)


def _shorten(config: Any) -> Any:
    """Shorten a config to two layers, or one of each kind, and few token ids."""
    text = config.get_text_config()
    if "per_layer_config" in (fields := text.to_dict()):
        short = type(text).from_dict(_with_few_layers(fields))
        if text is config:
            config = short
        else:
            config.text_config = short
        text = short
    else:
        kinds = getattr(text, "layer_types", None) or ()
        text.num_hidden_layers = min(text.num_hidden_layers, max(2, len(set(kinds))))
        if kinds:
            text.layer_types = [*dict.fromkeys(kinds), *kinds][: text.num_hidden_layers]
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(getattr(text, name), 512))
    if getattr(text, "pad_token_id", None) is not None:
        text.pad_token_id = 0  # below the reduced vocabulary; not every config allows None
    return config


def _with_few_layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce a config with per-layer settings to the first layer of each kind and, if the last layers read the keys of
    others, the first of each kind among these."""
    kinds = fields["layer_types"]
    own = len(kinds) - (fields.get("num_kv_shared_layers") or 0)
    halves = ((0, kinds[:own]), (own, kinds[own:]))
    parts = [[begin + part.index(kind) for kind in dict.fromkeys(part)] for begin, part in halves]
    chosen = [layer for part in parts for layer in sorted(part)]
    by_layer = {int(layer): value for layer, value in fields["per_layer_config"].items()}
    few = {new: by_layer[old] for new, old in enumerate(chosen) if old in by_layer}
    counts = {"num_hidden_layers": len(chosen), "num_kv_shared_layers": len(parts[1])}
    return {**fields, **counts, "layer_types": [kinds[layer] for layer in chosen], "per_layer_config": few}
