"""How large the cache of a model is."""

from __future__ import annotations

from sparring.engine.config import PAGE_SIZE, EngineConfig
from sparring.model.causal import CausalModel


def token_bytes(model: CausalModel) -> int:
    """Size of one token's keys and values, over all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype.itemsize


def num_pages_of(model: CausalModel, config: EngineConfig) -> int:
    """Pages that the config pays for, and no more than all running requests of full length could use."""
    most = config.max_running * -(-model.max_positions // PAGE_SIZE)
    return min(config.cache_tokens(token_bytes(model)) // PAGE_SIZE, most)
