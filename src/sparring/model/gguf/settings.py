"""Settings in the head of a GGUF file that transformers does not read.

transformers reads the settings of its table and silently ignores the rest, such as a head size or scaled positions. The
rest is read here or refused, since a model without it would compute something else.

Source: the GGUF specification of the ggml project (docs/gguf.md), `[llm].*`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from sparring.errors import refusal

HARMLESS = {"tensor_data_layout", "pooling_type", "vocab_size", "context_length", "block_count"}
FACTOR, ORIGINAL = "rope.scaling.factor", "rope.scaling.original_context_length"
REQUIRED = (
    *("attention.head_count", "attention.layer_norm_rms_epsilon", "block_count", "context_length"),
    *("embedding_length", "feed_forward_length"),
)
"""Settings that llama.cpp requires; transformers would take a default of the model's family."""
POSITIVE = {*REQUIRED, "attention.head_count_kv", "attention.sliding_window", "rope.freq_base", FACTOR, ORIGINAL}
"""Settings that have to be above 0. transformers accepts any value and would make a model of it that computes nothing
useful."""
THETA = 10000.0
"""Base of the rotary frequencies where a file has none (llama.cpp, `llama_model::load_hparams`), and of the sliding
layers of Gemma 3."""
FREQUENCIES = "rope_freqs.weight"
"""Tensor with a divisor for each rotary frequency: the position scaling of converted Llama 3 models."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Llama 3's position scaling (Llama 3.1 model card and code, 2024)."""
DO = "take the model's Hugging Face folder"


def complete(
    config: dict[str, Any], arch: str, fields: Mapping[str, Any], divisors: np.ndarray | None, where: str
) -> None:
    """Add the settings that transformers does not read to a config.

    Args:
        config: config of transformers, changed in place.
        arch: the file's `general.architecture`.
        fields: all settings of the file by name.

    Raises:
        BadInput: a setting is unknown, or its value is not supported.
    """
    own = {key.removeprefix(f"{arch}."): value for key, value in fields.items() if key.startswith(f"{arch}.")}
    for key in POSITIVE & own.keys():
        check_positive(own[key], f"{arch}.{key}", where)
    names = (str(config.get("model_type", arch)).removesuffix("_text"), arch)
    mapping: Mapping[str, Any] = GGUF_CONFIG_MAPPING
    taken = {key: name for arch_name in names for key, name in mapping.get(arch_name, {}).items()}
    rotated = {key: own[key] for key in ("rope.dimension_count",) if key in own}  # taken, and yet to be checked
    own = {key: value for key, value in own.items() if taken.get(key) is None and key not in HARMLESS} | rotated
    _head_size(config, own, where)
    _positions(config, own, divisors, where)
    # what llama.cpp takes where the file says nothing; each family of transformers has defaults of its own
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if arch == "gemma3":
        _gemma3(config, own, where)
    if own.get("expert_count") == 0:
        own = {key: value for key, value in own.items() if not key.startswith("expert_")}
    if own:
        key, value = next(iter(sorted(own.items())))
        raise refusal(where, "settings that can be read", f"{arch}.{key} = {str(value)[:40]}", DO)


def check_positive(value: object, name: str, where: str) -> None:
    """Refuse a setting that is no finite number above 0."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise refusal(where, f"a number above 0 as {name}", "none" if value is None else str(value)[:40], DO)


def _head_size(config: dict[str, Any], own: dict[str, Any], where: str) -> None:
    size = own.pop("attention.key_length", None) or config.get("head_dim")
    size = size or config["hidden_size"] // config["num_attention_heads"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := own.pop(key, size)) != size:
            raise refusal(where, f"{key} {size}, the size of a head", str(other), DO)
    config["head_dim"] = size


def _positions(config: dict[str, Any], own: dict[str, Any], divisors: np.ndarray | None, where: str) -> None:
    """Set scaled rotary positions: linear, YaRN (arXiv 2309.00071) or Llama 3's. As in llama.cpp, a factor without a
    type is a linear one."""
    scaling = {key: own.pop(key) for key in list(own) if key.startswith("rope.scaling.")}
    kind = scaling.pop("rope.scaling.type", "linear" if FACTOR in scaling else "none")
    scaled: dict[str, Any] = {}
    if kind in ("linear", "yarn") and "gemma" not in str(config.get("model_type")):
        factor, original = scaling.pop(FACTOR, None), scaling.pop(ORIGINAL, None)
        check_positive(factor, f"{FACTOR} of {kind} positions", where)
        scaled = {"rope_type": kind, "factor": factor}
        if original is not None and kind == "yarn":
            scaled["original_max_position_embeddings"] = original
    elif kind != "none":
        raise refusal(where, "rope.scaling.type none, linear or yarn of a model without sliding layers", repr(kind), DO)
    scaling.pop("rope.scaling.finetuned", None)
    if scaling and kind != "none":
        raise refusal(where, "scaled positions by type, factor and original length", f"also {sorted(scaling)[0]}", DO)
    if divisors is not None:
        if scaled:
            raise refusal(where, f"scaled positions or {FREQUENCIES}", "both", DO)
        scaled = _llama3(divisors, config, where)
    config.setdefault("rope_theta", THETA)
    if scaled:
        config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), **scaled}


def _llama3(divisors: np.ndarray, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    factor = float(divisors.max())
    if not 0 < factor < math.inf:
        raise refusal(where, f"divisors above 0 in {FREQUENCIES}", f"{factor:g} as the largest", DO)
    size, theta = config["head_dim"], config.get("rope_theta", THETA)
    low, high, original = LLAMA3.values()
    expected = []
    for index in range(size // 2):
        wave = 2 * math.pi * theta ** (2 * index / size)
        smooth = (original / wave - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        expected.append(1.0 if wave < original / high else factor if wave > original / low else between)
    if divisors.shape != (size // 2,) or not np.allclose(divisors, expected, rtol=1e-5):
        raise refusal(where, f"Llama 3's scaling in {FREQUENCIES}", "other divisors", DO)
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _gemma3(config: dict[str, Any], own: dict[str, Any], where: str) -> None:
    """Refuse sliding-window layers that transformers would not make, and set the scale of attention: by the width in
    the largest model, which has 62 layers, by the head size in all others (llama.cpp, `llama_model_gemma3`)."""
    layers = config["num_hidden_layers"]
    sliding = [bool((layer + 1) % 6) for layer in range(layers)]
    for key, known in (("attention.sliding_window_pattern", (6, sliding)), ("rope.freq_base_swa", (THETA,))):
        if (value := own.pop(key, known[0])) not in known:
            raise refusal(where, f"{key} {known[0]}, which the library has", str(value)[:40], DO)
    check_positive(config.get("sliding_window"), "gemma3.attention.sliding_window", where)
    wide = layers == 62
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := own.pop(key, None)) is not None:
            config[key] = cap
