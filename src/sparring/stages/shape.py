"""The sizes of a checkpoint, read from its `config.json` alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparring.engine.config import EngineConfig
from sparring.errors import BadInput, boundary, refusal
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

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ALWAYS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
"""What architectures call the number of a layer's experts, of those that every token takes, and the width of these together."""

HEAD_BLOCK = 16
"""What heads are rounded up to in the cache (`model.kernels.pages.BLOCK`)."""

KINDS = ("layer_types", "layers_block_type")
"""What architectures call the list of their layers' kinds."""

WITHOUT_KEYS = ("linear_attention", "mamba", "moe", "mlp")
"""Kinds of layers that keep no keys and values."""


class Shape(InitConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes of a model."""

    num_attending: int
    """Layers that keep keys and values; the others have a recurrent state, or none."""
    num_experts: int = 0
    """Of a layer that has any, beside those that every token takes."""
    experts_size: int = 0
    """Widths of all experts of a layer together."""
    num_positions: int = 0
    """That have learned embeddings."""
    delta_size: int = 0
    """Of a layer with the gated delta rule, widths of all that it projects to and from."""
    input_size: int = 0
    """Of what each layer is given of a token's own embeddings, as Gemma 4's are."""
    kv_size: int = 0
    """Numbers in a token's keys, over all layers, where those differ; 0: they do not."""

    @property
    def mlp_size(self) -> int:
        """Width of a layer's MLP, or of all its experts."""
        return max(self.intermediate_size, self.experts_size)

    @staticmethod
    def of(init: InitConfig) -> Shape:
        """Those of a fresh model, in which every layer attends."""
        return Shape(**msgspec.structs.asdict(init), num_attending=init.num_layers)


def folder_shape(folder: Path) -> Shape:
    """The sizes of the checkpoint in `folder`, or of an adapter's base.

    Raises:
        BadInput: there is no config or no weights in the folder, or the config does not say the sizes.
    """
    folder = base_folder(folder)
    file = folder / "config.json"
    config = _config(file)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise refusal(str(folder), "weights (*.safetensors)", "a folder without", "copy or download the whole checkpoint")
    kinds = next((config[name] for name in KINDS if isinstance(config.get(name), list)), [])
    if kinds:
        config = {"num_hidden_layers": len(kinds), **config}
    found = {name: _size(config, keys, file) for name, keys in NAMES.items()}
    width, heads = found["hidden_size"], found["num_heads"]
    experts, width_of_expert = _most(config, EXPERTS), _most(config, ("moe_intermediate_size", "intermediate_size"))
    shared = _most(config, SHARED) or _most(config, ALWAYS) * width_of_expert
    heads_of = {of: _most(config, (f"linear_num_{of}_heads",)) for of in ("key", "value")}
    keys, values = (count * _most(config, (f"linear_{of}_head_dim",)) for of, count in heads_of.items())
    # latent keys and values are kept as the heads read them
    latent = sum(_most(config, (f"qk_{part}_head_dim",)) for part in ("nope", "rope")) if config.get("kv_lora_rank") else 0
    kv_heads = [(heads, latent)] if latent else _kv_heads(config, found["num_layers"], heads, width)
    shares = bool(config.get("num_kv_shared_layers"))
    mlp = config.get("intermediate_size") or config.get("n_inner") or 4 * width
    shared += mlp if config.get("enable_moe_block") else 0
    try:
        return Shape(
            **found,
            delta_size=2 * keys + 3 * values + 2 * heads_of["value"],
            num_positions=config.get("n_positions") or 0,  # GPT-2, and what took after it
            num_experts=experts,
            experts_size=experts * width_of_expert + shared if experts else 0,
            num_attending=max(1, found["num_layers"] - sum(kind in WITHOUT_KEYS for kind in kinds)),
            num_kv_heads=max(count for count, _ in kv_heads),
            head_dim=max(size for _, size in kv_heads),
            intermediate_size=2 * mlp if config.get("use_double_wide_mlp") else mlp,
            input_size=config.get("hidden_size_per_layer_input") or 0,
            kv_size=sum(count * _stored(size) for count, size in kv_heads) if len(set(kv_heads)) > 1 or shares else 0,
        )
    except ValueError as error:
        raise refusal(str(file), "sizes that fit together", str(error), "check the model's path") from error


def context_room(shape: Shape, engine: EngineConfig, dtype: DType) -> int:
    """Most tokens of one conversation: the model's positions, or what the engine's cache holds where that is less."""
    return min(shape.max_positions, engine.cache_tokens(token_bytes(shape, dtype)))


def token_bytes(shape: Shape, dtype: DType) -> int:
    """Size of one token's keys and values, over all layers that attend."""
    keys = shape.kv_size or shape.num_attending * shape.num_kv_heads * _stored(shape.head_dim)
    return 2 * keys * (2 if dtype == "bfloat16" else 4)


def _stored(head_dim: int) -> int:
    """A head's numbers in the cache."""
    return -(-head_dim // HEAD_BLOCK) * HEAD_BLOCK


def _kv_heads(config: Mapping[str, Any], num_layers: int, heads: int, width: int) -> list[tuple[int, int]]:
    """Of each layer that keeps keys how many heads have them, and the size of a head.

    Gemma 4's global layers have others than its local ones, and its last ones read what earlier ones keep. MiMo-V2's local ones
    have twice as many.
    """
    usual = config.get("num_key_value_heads") or heads, config.get("head_dim") or width // heads
    kinds = config.get("layer_types") or [None] * num_layers
    alike = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v", True) else None
    by_kind = {"full_attention": (alike or usual[0], config.get("global_head_dim") or usual[1])}
    if config.get("model_type") == "mimo_v2_flash":
        by_kind = {"sliding_attention": (2 * usual[0], usual[1])}
    each, found = {int(layer): own for layer, own in (config.get("per_layer_config") or {}).items()}, []
    for layer in range(max(1, num_layers - (config.get("num_kv_shared_layers") or 0))):
        count, size = by_kind.get(kinds[layer], usual)
        own = each.get(layer, {})
        found.append((own.get("num_key_value_heads", count), own.get("head_dim", size)))
    return found


def _config(file: Path) -> Mapping[str, Any]:
    """The config of the language model: the whole file, or its part where there are also other modalities."""
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refusal(str(file), "a model's config", str(error), "repair the checkpoint") from error
    if not isinstance(whole, dict):
        raise refusal(str(file), "a JSON object", type(whole).__name__, "repair the checkpoint")
    return _text_of(file, whole["text_config"]) if whole.get("text_config") else whole


def _text_of(file: Path, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """What such a file says of the language model, and what it leaves to the library to know, as those of Gemma 3 do."""
    from transformers import AutoConfig

    with boundary(BadInput, str(file), "a config that the library knows", "check the model's path"):
        return {**AutoConfig.from_pretrained(file.parent).get_text_config().to_dict(), **fields}


def _size(config: Mapping[str, Any], keys: tuple[str, ...], file: Path) -> int:
    for key in keys:
        if isinstance(config.get(key), int):
            return config[key]
    raise refusal(str(file), f"a causal LM's {keys[0]}", ", ".join(config) or "no keys", "check the model's path")


def _most(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """The first of these that is there, of a list for each layer the most; else 0."""
    for key in keys:
        value = config.get(key)
        numbers = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]
        if numbers and max(numbers):
            return max(numbers)
    return 0
