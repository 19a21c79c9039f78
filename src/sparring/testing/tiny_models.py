"""Checkpoint folders with some ten thousand random parameters, of any Hugging Face family, for tests only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 80

_LOCAL_AND_GLOBAL = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 6, "num_experts": 6}
_SIGMOID_ROUTER = {
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_DELTA_RULE = {
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
_SHARED_EXPERT = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, **_EXPERTS}
FEATURES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 24},
    "mixtral": {"sliding_window": 24, **_EXPERTS},
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 24, "norm_topk_prob": True, **_EXPERTS},
    "gemma2": {
        **_LOCAL_AND_GLOBAL,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        **_LOCAL_AND_GLOBAL,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
        },
    },
    "gemma4_text": {
        **_LOCAL_AND_GLOBAL,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 24,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "final_logit_softcapping": 3.0,
    },
    "mimo_v2_flash": {
        **_LOCAL_AND_GLOBAL,
        **_SIGMOID_ROUTER,
        "n_shared_experts": 0,
        "v_head_dim": 12,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "glm4v": {},
    "phi3": {"sliding_window": 24},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "gpt2": {"num_key_value_heads": 4, "n_inner": 72},
    "gpt_neox": {"num_key_value_heads": 4},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "stablelm": {"hidden_size": 64, "use_qkv_bias": True},
    "phi": {"hidden_size": 64},
    "cohere2": {**_LOCAL_AND_GLOBAL, "logit_scale": 0.25},
    "qwen2_moe": {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, **_EXPERTS},
    "glm4_moe": {"head_dim": 16, **_SIGMOID_ROUTER},
    "deepseek_v3": {**_LATENT, **_SIGMOID_ROUTER},
    "deepseek_v2": {**_LATENT, "head_dim": 8, **_SIGMOID_ROUTER, "n_group": 1, "topk_method": "greedy"},
    "gpt_oss": {
        **_LOCAL_AND_GLOBAL,
        **_EXPERTS,
        "swiglu_limit": 1.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3_next": {**_DELTA_RULE, **_SHARED_EXPERT},
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_5_moe_text": {**_DELTA_RULE, **_SHARED_EXPERT},
    "nemotron_h": {
        "head_dim": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
}
"""Settings of each family, chosen so that its special features have an effect within a few dozen tokens."""


def _axes(*sections: int, **settings: int) -> dict[str, Any]:
    """Return settings for rotary positions with sections for time, height and width; the three positions are equal in
    text."""
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections]},
        **settings,
    }


TEXT = {
    "qwen2_5_vl_text": _axes(2, 2, 2),
    "qwen3_vl_text": _axes(4, 2, 2, head_dim=16),
    "glm4v_text": _axes(2, 2, 2),
    "glm4v_moe_text": _axes(1, 1, 1),
    "glm_ocr_text": _axes(2, 2, 2),
}
"""Settings of the text part of vision-language models, by its `model_type`."""

EYES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 48,
}
"""Settings of the vision part of vision-language models, with the fields of several architectures."""


def tiny_model(family: str, out_path: str | Path, *, tied: bool = False, seed: int = 0, **settings: Any) -> Path:
    """Write a two-layer model and return its folder. Norms and biases are random too: no operation is the identity.

    Args:
        family: `model_type` of the library: "qwen3", "llama", "qwen2", "mistral", "phi3", ..., or of a vision-language
            model.
        tied: whether the LM head is the embedding matrix.
        settings: further fields of the library's config, or of its text part.
    """
    import torch

    module = _module(family, tied, settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            centre = 1.0 if "norm" in name and parameter.dim() == 1 and not name.endswith("bias") else 0.0
            centre = -3.0 if name.endswith("A_log") else centre  # a state that forgets in dozens of tokens, not in two
            parameter.normal_(centre, 0.2, generator=generator)
        for name, buffer in sorted(module.named_buffers()):
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2, generator=generator)
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
    out = Path(out_path)
    module.save_pretrained(out)
    return out


def _module(family: str, tied: bool, settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    from sparring.model.library import class_of

    default = AutoConfig.for_model(family)
    text = default.get_text_config()
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
    shape |= {**FEATURES.get(text.model_type, {}), **TEXT.get(text.model_type, {}), **settings}
    if text is default:
        config = AutoConfig.for_model(family, **shape)
    else:
        eyes = getattr(default, "vision_config", None) or default.sub_configs.get("vision_config")
        parts = {} if eyes is None else {"vision_config": {**EYES, "model_type": eyes.model_type}}
        parts["text_config"] = {**shape, "model_type": text.model_type}
        config = AutoConfig.for_model(family, **parts, tie_word_embeddings=tied)
    return class_of(config).from_config(config)
