"""Preflight of a checkpoint: it is whole, and can be served with the numerics asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from sparring.errors import BadInput, boundary
from sparring.model.attention import IMPLEMENTATION
from sparring.model.causal import CausalModel
from sparring.model.decoder import DENSE
from sparring.model.load import DTYPES, load, read_config, refuse_incomplete, served
from sparring.model.peft import base_of

SMALL_BYTES = 1 << 30
"""A checkpoint up to here is simply loaded."""


def check_servable(path: str | Path, *, dtype: str, device: str, numerics: str, small_bytes: int = SMALL_BYTES) -> CausalModel:
    """Prove what `load` would, in seconds whatever the size of the checkpoint.

    Of a large one two layers with random weights are made and proven, and the names and shapes in its files' headers are compared
    with those that its config asks for (of the dense models of the Llama family; others may rename weights as they load).

    Args:
        path: checkpoint folder, or an adapter's.
        dtype: as for `load`.
        device: as for `load`.
        numerics: as for `load`.
        small_bytes: up to this size of its files the checkpoint is loaded as a run will load it.

    Returns:
        The model that was made, which may be the small one.

    Raises:
        BadInput: a stage of the run would be refused when it loads the checkpoint.
    """
    where = base_of(path)
    config = read_config(where, numerics)
    files = sorted(Path(where).glob("*.safetensors"))
    if not files or sum(file.stat().st_size for file in files) <= small_bytes:
        return load(path, dtype=dtype, device=device, numerics=numerics)
    if config.model_type in DENSE:
        _check_headers(where, config, files)
    with boundary(BadInput, where, "a config that the library makes a model of", "repair it or take another"):
        module = transformers.AutoModelForCausalLM.from_config(
            _shortened(config), dtype=DTYPES[dtype], attn_implementation=IMPLEMENTATION
        )
    return served(module.to(device), where, numerics=numerics)


def _check_headers(where: str, config: Any, files: list[Path]) -> None:
    from safetensors import safe_open

    with torch.device("meta"), boundary(BadInput, where, "a config that the library makes a model of", "repair it"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: list(parameter.shape) for name, parameter in module.named_parameters()}  # a tied weight once
    found: dict[str, list[int]] = {}
    with boundary(BadInput, where, "safetensors files", "copy or download the checkpoint again"):
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                found |= {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    wrong = [(name, found[name], shape) for name, shape in expected.items() if name in found and found[name] != shape]
    refuse_incomplete(where, expected.keys() - found.keys(), wrong)


def _shortened(config: Any) -> Any:
    """The same architecture with two layers, or one of every kind, and few token ids."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    text.num_hidden_layers = min(text.num_hidden_layers, max(2, len(set(kinds))))
    if kinds:
        text.layer_types = [*dict.fromkeys(kinds), *kinds][: text.num_hidden_layers]
    text.vocab_size = min(text.vocab_size, 512)
    if getattr(text, "pad_token_id", None) is not None:
        text.pad_token_id = 0  # one of the few; not every config takes none
    return config
