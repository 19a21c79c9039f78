"""`[engine]`: how much the engine takes on at once and what it keeps. Torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

PAGE_SIZE = 16
"""Tokens per page of the cache."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None of these changes a sampled token: in exact numerics a request does not see its neighbours."""

    max_running: int = 128
    """Requests that are computed together; more wait."""

    max_batch_tokens: int = 2048
    """New tokens of one step: one per request that generates, the rest for prompts, which are cut into chunks."""

    kv_tokens: int = 0
    """Tokens whose keys and values fit into the cache; 0: what `kv_bytes` holds."""

    kv_bytes: int = 512 << 20
    """Size of the cache when `kv_tokens` is 0; less where `max_running` requests of full length need less. A model with recurrent
    state holds up to as much again in states: one for each request that runs, the others for conversations between turns."""

    kv_across_turns: Literal["keep", "drop"] = "keep"
    """keep: a conversation's next turn prefills only what is new; drop: it starts over."""

    share_prefixes: bool = True
    """Whether requests that begin with the same tokens compute full pages of them once."""

    live_kv: Literal["keep", "recompute", "drain"] = "keep"
    """What an update of the weights does with requests under way. keep: they go on with the keys and values they have, and it is
    recorded per token; recompute: they compute them again under the new weights; drain: the update waits until they are done."""

    update_timeout_s: float = 300.0
    """How long an update may take to arrive and to wait for its turn; a late one is refused and the old weights serve on."""

    def cache_tokens(self, token_bytes: int) -> int:
        """Tokens that the cache holds, in whole pages and at least one: no conversation can be longer.

        Args:
            token_bytes: size of one token's keys and values, over all layers.
        """
        return max(1, (self.kv_tokens or self.kv_bytes // token_bytes) // PAGE_SIZE) * PAGE_SIZE

    def states(self, state_bytes: int) -> int:
        """Recurrent states that are held beside the cache, at least one.

        Args:
            state_bytes: size of one sequence's, over all layers.
        """
        return max(1, self.kv_bytes // state_bytes)

    def __post_init__(self) -> None:
        for name in ("max_running", "max_batch_tokens", "kv_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.update_timeout_s > 0:
            raise ValueError(f"update_timeout_s must be above 0, got {self.update_timeout_s}")
        if self.kv_tokens < 0:
            raise ValueError(f"kv_tokens must be 0 (automatic) or more, got {self.kv_tokens}")
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_running ({self.max_running}): "
                "every running request adds a token per step"
            )
