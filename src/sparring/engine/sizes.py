"""Sizes of an engine's cache: what `[engine]` pays for with a given model."""

from __future__ import annotations

from typing import NamedTuple

from sparring.engine.config import PAGE_SIZE, EngineConfig
from sparring.kernels.pages import token_bytes
from sparring.model.causal import CausalModel
from sparring.model.states import state_bytes


class Sizes(NamedTuple):
    """Pages of the cache, bytes of each, pages in host memory, and slots of recurrent state (0 for a model without)."""

    num_pages: int
    page_bytes: int
    host_pages: int
    num_states: int

    @staticmethod
    def of(model: CausalModel, config: EngineConfig) -> Sizes:
        """Compute the sizes: no more pages than all running requests of full length could use; states for those that
        run and as many parked ones."""
        most = config.max_running * -(-model.max_positions // PAGE_SIZE)
        states = min(2 * config.max_running, config.states(state_bytes(model.recurrent))) if model.recurrent else 0
        size = token_bytes(model.kv_heads, model.dtype)
        page_bytes = PAGE_SIZE * size
        num_pages = min(config.cache_tokens(size) // PAGE_SIZE, most)
        return Sizes(num_pages, page_bytes, config.host_pages(page_bytes), states)
