"""A fresh Qwen3-architecture model from a seed, written as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from sparring.model.config import InitConfig
from sparring.model.save import share

# a progress bar on stderr would tear the live view
transformers.utils.logging.disable_progress_bar()


def create(
    init: InitConfig,
    vocab_size: int,
    out_path: str | Path,
    seed: int,
    *,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    bos_token_id: int | None = None,
) -> Path:
    """Write config, generation config and float32 weights of a random model.

    The weights are a function of `init`, `vocab_size` and `seed`: matrices and embeddings are drawn from one generator
    in the order of their names, norms are one and biases zero (the initialisation of the Qwen3 family).

    Args:
        out_path: folder to write; created if missing.
        eos_token_id: id or ids that end a turn, for the generation config.
        pad_token_id: id for padding, which only other tools use.
        bos_token_id: id that begins a text, if the tokenizer has one.
    """
    config = config_of(init, vocab_size)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = eos_token_id, pad_token_id, bos_token_id
    with torch.device("meta"):
        module = transformers.Qwen3ForCausalLM(config)
    module.to_empty(device="cpu")
    module.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            if parameter.dim() >= 2:
                parameter.normal_(0.0, init.initializer_range, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    out = Path(out_path)
    out.mkdir(parents=True, exist_ok=True)
    module.save_pretrained(out)
    share(out)
    return out


def config_of(init: InitConfig, vocab_size: int) -> transformers.Qwen3Config:
    """Return the transformers config of this shape, in float32."""
    return transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=init.hidden_size,
        num_hidden_layers=init.num_layers,
        num_attention_heads=init.num_heads,
        num_key_value_heads=init.num_kv_heads,
        head_dim=init.head_dim,
        intermediate_size=init.intermediate_size,
        max_position_embeddings=init.max_positions,
        tie_word_embeddings=init.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": init.rope_theta},
        initializer_range=init.initializer_range,
        dtype="float32",
    )
