"""`[engine]`: how much the engine takes on at once and what it keeps. Torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

PAGE_SIZE = 16
"""Tokens per page of the cache."""


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.vllm]`: the server that `kind = "vllm"` starts."""

    python: str = ""
    """Python interpreter that has vLLM; empty: the one that runs Sparring."""

    arguments: tuple[str, ...] = ()
    """Further arguments of vLLM's own command line, such as `["--enforce-eager"]` or `["--tensor-parallel-size",
    "2"]`."""

    start_timeout_s: float = 600.0
    """Seconds that loading and compiling may take."""

    def __post_init__(self) -> None:
        if not self.start_timeout_s > 0:
            raise ValueError(f"start_timeout_s must be above 0, got {self.start_timeout_s}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine]`. None of these changes a sampled token: in exact numerics a request does not see its neighbours."""

    kind: Literal["native", "vllm", "remote", "openai"] = "native"
    """native: the trainer's own model, so that the two agree to the bit; vllm: a vLLM server, which does not; remote: a
    `sparring serve` on this machine, which does; openai: a server that speaks OpenAI's completions with token ids,
    which takes no weights and so only evaluates. The settings below are the native engine's."""

    url: str = ""
    """Of a remote or openai engine: `http://host:port`, or `unix:path` of a socket; for openai with the path up to
    `/v1`."""

    api_key_env: str = ""
    """Environment variable with the key that the server at `url` wants; empty: none. A value such as
    `Basic dXNlcjpwYXNzd29yZA==` is a user and a password; in the URL they are refused."""

    served_model: str = ""
    """Name of the model on an openai server; empty: the server's only model."""

    max_running: int = 128
    """Requests that are computed together; more wait."""

    max_batch_tokens: int = 2048
    """New tokens of one step: one per request that generates, the rest for prompts, which are cut into chunks."""

    kv_tokens: int = 0
    """Tokens whose keys and values fit into the cache; 0: what `kv_bytes` holds."""

    kv_bytes: int = 512 << 20
    """Size of the cache when `kv_tokens` is 0; less where `max_running` requests of full length need less. A model with
    recurrent state holds up to as much again in states: one for each request that runs, the others for conversations
    between turns and for what several prompts begin with."""

    kv_across_turns: Literal["keep", "drop", "offload"] = "keep"
    """keep: a conversation's next turn prefills only what is new, unless others needed the room meanwhile; offload: it
    is then copied to host memory and back; drop: every turn starts over."""

    idle_kv_bytes: int = 0
    """Cache that conversations may occupy between their turns, in bytes; beyond it the longest idle are evicted. 0: all
    that no running request needs."""

    offload_bytes: int = 2 << 30
    """Host memory for "offload"; when it is full, the conversations go that have lain there longest."""

    share_prefixes: bool = True
    """Compute full pages of a common prefix once for all requests that begin with it."""

    live_kv: Literal["keep", "recompute", "drain"] = "keep"
    """Treatment of running requests in an update of the weights. keep: they continue with their cached keys and values,
    recorded per token; recompute: keys and values are computed again under the new weights; drain: the update waits
    until the requests are done."""

    update_timeout_s: float = 300.0
    """Seconds that an update may take to arrive and be applied; a late one is refused and the old weights serve on."""

    update_retries: int = 3
    """Repetitions of a late or refused update. Meanwhile the old weights serve on and no newer rollouts begin; after
    the last one the run ends; the same command resumes it."""

    update_retry_delay_s: float = 5.0
    """Longest pause before the first repetition; doubles with each."""

    vllm: VllmConfig = VllmConfig()
    """The server that `kind = "vllm"` starts."""

    @property
    def exact(self) -> bool:
        """True if the engine is the trainer's own module; with exact numerics it then gives the trainer's bits."""
        return self.kind in ("native", "remote")

    def cache_tokens(self, token_bytes: int) -> int:
        """Return the number of tokens that the cache holds, in whole pages and at least one: no conversation can be
        longer.

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

    def idle_pages(self, page_bytes: int) -> int | None:
        """Return the number of pages of the cache that idle conversations may occupy; None for all."""
        return self.idle_kv_bytes // page_bytes if self.idle_kv_bytes else None

    def host_pages(self, page_bytes: int) -> int:
        """Return the number of pages in host memory."""
        return self.offload_bytes // page_bytes if self.kv_across_turns == "offload" else 0

    def __post_init__(self) -> None:
        if (self.kind in ("remote", "openai")) != bool(self.url):
            raise ValueError(
                f'url must be set for kind "remote" and "openai" and no other, got {self.url!r} with kind "{self.kind}"'
            )
        for name in ("max_running", "max_batch_tokens", "kv_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.update_timeout_s > 0:
            raise ValueError(f"update_timeout_s must be above 0, got {self.update_timeout_s}")
        for name in ("kv_tokens", "idle_kv_bytes", "offload_bytes", "update_retries", "update_retry_delay_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_running ({self.max_running}): "
                "every running request adds a token per step"
            )
