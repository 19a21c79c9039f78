"""What a run would be refused for when it loads a checkpoint, found before: also of one that is too large to load in
time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from refusals import refused_at
from safetensors.torch import load_file, save_file

from sparring.errors import BadInput
from sparring.model.servable import SMALL_BYTES, check_servable
from sparring.testing.tiny_models import tiny_model

sizes = pytest.mark.parametrize("small_bytes", [SMALL_BYTES, 0], ids=["loaded", "by its headers"])
Q = "model.layers.1.self_attn.q_proj.weight"


def checked_path(path: Path, small_bytes: int, numerics: str = "exact") -> str:
    return check_servable(path, dtype="float32", device="cpu", numerics=numerics, small_bytes=small_bytes).path_name


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@sizes
@pytest.mark.parametrize(
    "family", ["qwen3", "llama", "phi3", "gemma3_text", "gpt_oss", "gemma4_text", "gemma4", "qwen3_vl"]
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_checkpoint_passes(tmp_path: Path, small_bytes: int, family: str, tied: bool) -> None:
    path = tiny_model(family, tmp_path, tied=tied)
    assert checked_path(path, small_bytes).startswith("exact-")
    assert checked_path(path, small_bytes, "fast") == "fast"


@sizes
def test_weights_that_are_missing(tmp_path: Path, small_bytes: int) -> None:
    path = tiny_model("qwen3", tmp_path)
    rewrite(path, lambda tensors: tensors.pop(Q))
    with refused_at(str(path), f"all weights of its config, got none for {Q} (1 in all)"):
        checked_path(path, small_bytes)


@sizes
def test_weights_of_another_shape(tmp_path: Path, small_bytes: int) -> None:
    path = tiny_model("llama", tmp_path)
    rewrite(path, lambda tensors: tensors.update({Q: tensors[Q][:24].clone()}))
    with refused_at(str(path), f"{Q} of shape [48, 48]"):
        checked_path(path, small_bytes)


@sizes
def test_files_cut_short(tmp_path: Path, small_bytes: int) -> None:
    path = tiny_model("qwen3", tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(BadInput, match="got SafetensorError"):
        checked_path(path, small_bytes)


@sizes
def test_an_architecture_that_is_not_exact(tmp_path: Path, small_bytes: int) -> None:
    path = tiny_model("minimax_m3_vl_text", tmp_path)
    with pytest.raises(
        BadInput, match='MiniMaxM3VLForCausalLM, whose logits may; .*row by row: grouped_mm, .*numerics = "fast"'
    ):
        checked_path(path, small_bytes)
    assert checked_path(path, small_bytes, "fast") == "fast"


@sizes
def test_an_architecture_that_cannot_be_served_at_all(tmp_path: Path, small_bytes: int) -> None:
    path = tiny_model("modernbert-decoder", tmp_path)
    with pytest.raises(BadInput, match="ModernBertDecoderForCausalLM, whose logits differ"):
        checked_path(path, small_bytes, "fast")


@sizes
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h"])
def test_layers_with_recurrent_state(tmp_path: Path, small_bytes: int, family: str) -> None:
    path = tiny_model(family, tmp_path)
    with refused_at(str(path), f"got a {family} model, with linear_attention layers"):
        checked_path(path, small_bytes)
    assert checked_path(path, small_bytes, "fast") == "fast"


@sizes
def test_attention_in_chunks(tmp_path: Path, small_bytes: int) -> None:
    path = tiny_model("qwen3", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "layer_types": ["linear_attention", "chunked_attention"]}))
    for numerics in ("exact", "fast"):
        with refused_at(str(path), "got a qwen3 model, with chunked_attention layers"):
            checked_path(path, small_bytes, numerics)


def test_per_layer_configs_are_shortened_by_kind(tmp_path: Path) -> None:
    """One of each kind, and one of each kind of those that read the keys of others."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 4
    path = tiny_model("gemma4_text", tmp_path, num_hidden_layers=12, layer_types=kinds, num_kv_shared_layers=6)
    model = check_servable(path, dtype="float32", device="cpu", numerics="exact", small_bytes=0)
    assert {layer: tuple(one) for layer, one in model.kv_heads.items()} == {
        0: (2, 16, 0),
        1: (2, 24, 1),
        2: (2, 16, 0),
        3: (2, 24, 1),
    }
