"""Sizes of an engine's cache for a given model and `[engine]`."""

from __future__ import annotations

from typing import NamedTuple

from sparring.engine.config import PAGE_SIZE, EngineConfig
from sparring.kernels.pages import token_bytes
from sparring.model.causal import CausalModel
from sparring.model.states import state_bytes


class Sizes(NamedTuple):
    """Sizes of a cache.

    Attributes:
        idle_pages: maximum number of pages that only conversations between their turns hold.
        num_states: slots of recurrent state; 0 without recurrent layers.
    """

    num_pages: int
    page_bytes: int
    host_pages: int
    idle_pages: int
    num_states: int

    @staticmethod
    def of(model: CausalModel, config: EngineConfig) -> Sizes:
        """Compute the sizes. There are at most as many pages as all running requests of full length could use, and
        states for all running requests and the same number of parked states."""
        most = config.batch.max_running * -(-model.max_positions // PAGE_SIZE)
        states = 0
        if model.recurrent:
            states = min(2 * config.batch.max_running, max(1, config.kv.bytes // state_bytes(model.recurrent)))
        size = token_bytes(model.kv_heads, model.dtype)
        page_bytes = PAGE_SIZE * size
        num_pages = min(config.kv.capacity(size) // PAGE_SIZE, most)
        host_pages = config.kv.offload_bytes // page_bytes if config.kv.across_turns == "offload" else 0
        idle_pages = config.kv.idle_bytes // page_bytes if config.kv.idle_bytes else num_pages
        return Sizes(num_pages, page_bytes, host_pages, idle_pages, states)
