"""Checkpoint folders of some ten thousand random parameters, of any Hugging Face family: for tests, never for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 80


def tiny_model(family: str, out_path: str | Path, *, tied: bool = False, seed: int = 0, **settings: Any) -> Path:
    """Write a two-layer model with random norms and biases too, so that nothing in it is trivially right.

    Args:
        family: a `model_type` of the library: "qwen3", "llama", "qwen2", "mistral", "phi3", ...
        out_path: folder to write.
        tied: whether the LM head is the embedding matrix.
        seed: decides the weights.
        settings: further fields of the library's config.

    Returns:
        The folder.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 72,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family in ("qwen3", "mistral"):
        shape["head_dim"] = 16
    if family == "mistral":
        shape["sliding_window"] = 24
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**shape, **settings}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            centre = 1.0 if "norm" in name and parameter.dim() == 1 and not name.endswith("bias") else 0.0
            parameter.normal_(centre, 0.2, generator=generator)
    out = Path(out_path)
    module.save_pretrained(out)
    return out
