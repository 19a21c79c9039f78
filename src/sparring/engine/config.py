"""Section `[engine]`, with a table for each of its topics. Torch-free."""

from __future__ import annotations

from operator import attrgetter
from typing import Literal

import msgspec

from sparring.errors import refusal

PAGE_SIZE = 16
"""Tokens per page of the cache."""


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[engine.vllm]`: the server that `kind = "vllm"` starts."""

    python: str = ""
    """Python interpreter that has vLLM; empty: the one that runs Sparring."""

    arguments: tuple[str, ...] = ()
    """Further arguments of vLLM's own command line, such as `["--enforce-eager"]` or `["--tensor-parallel-size",
    "2"]`."""

    start_timeout_s: float = 600.0
    """Time limit for loading and compiling, in seconds."""

    stalled_s: float = 60.0
    """Seconds that vLLM may take for a step, compilation included. If one of several servers takes longer, it gets no
    more requests until it answers."""

    def __post_init__(self) -> None:
        for name in ("start_timeout_s", "stalled_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[engine.batch]`: size of a step of the engine."""

    max_running: int = 128
    """Maximum number of requests that are computed together; further requests wait."""

    max_tokens: int = 2048
    """Maximum number of new tokens of a step: one for each request that generates, the rest for prompts, which are
    split into chunks."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens < self.max_running:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) must be at least max_running ({self.max_running}): "
                "every running request adds a token per step"
            )


class KvConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[engine.kv]`: cache of keys and values."""

    tokens: int = 0
    """Tokens whose keys and values fit into the cache; 0: as many as fit into `bytes`."""

    bytes: int = 512 << 20
    """Size of the cache if `tokens` is 0; smaller if `engine.batch.max_running` requests of full length need less. A
    model with recurrent state stores up to the same amount again in states: one for each running request, the others
    for conversations between turns and for common prefixes of prompts."""

    across_turns: Literal["keep", "drop", "offload"] = "keep"
    """keep: the next turn of a conversation prefills only its new tokens, unless the conversation's cache was evicted;
    offload: an evicted cache is copied to host memory and back; drop: every turn is prefilled completely."""

    idle_bytes: int = 0
    """Maximum number of bytes of the cache for conversations between their turns; beyond this limit the conversations
    idle longest are evicted. 0: all bytes that running requests do not need."""

    offload_bytes: int = 2 << 30
    """Bytes of host memory for "offload"; when they are full, the conversations stored longest ago are evicted."""

    share_prefixes: bool = True
    """Compute full pages of a common prefix once for all requests that begin with it."""

    def __post_init__(self) -> None:
        if self.bytes < 1:
            raise ValueError(f"bytes must be at least 1, got {self.bytes}")
        for name in ("tokens", "idle_bytes", "offload_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")

    def capacity(self, token_bytes: int) -> int:
        """Return the number of tokens that the cache holds if one token's keys and values take `token_bytes` in all
        layers: whole pages, at least one. No conversation can be longer."""
        return max(1, (self.tokens or self.bytes // token_bytes) // PAGE_SIZE) * PAGE_SIZE


class UpdateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[engine.update]`: updates of the engine's weights."""

    live_kv: Literal["keep", "recompute", "drain"] = "keep"
    """Treatment of running requests when the weights are updated. keep: they continue with their cached keys and
    values, recorded per token; recompute: keys and values are recomputed under the new weights; drain: the update waits
    until running requests have finished."""

    timeout_s: float = 300.0
    """Time limit, in seconds, for an update to arrive and be applied; a late update is refused and the old weights stay
    in service."""

    retries: int = 3
    """Retries of a late or refused update. Meanwhile the old weights stay in service and no newer rollouts begin; after
    the last retry the run ends, and the same command resumes it."""

    retry_delay_s: float = 5.0
    """Longest pause before the first retry; it doubles with each."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {self.timeout_s}")
        for name in ("retries", "retry_delay_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[engine]`. In exact numerics the sampled tokens depend neither on other requests nor on where the engine
    runs, so most of these settings change no sampled token (`launch/resume.py` has the list)."""

    kind: Literal["native", "vllm", "remote", "openai"] = "native"
    """native: the trainer's own module, bitwise equal to the trainer; vllm: a vLLM server, or several `sparring serve`
    of vLLM, not bitwise equal; remote: one or several `sparring serve`, bitwise equal; openai: a server of OpenAI's
    completions API with token ids, which takes no weights and so can only evaluate. Most tables below are for the
    native engine."""

    urls: tuple[str, ...] = ()
    """Addresses of the servers of a remote engine, each `http://host:port`, or `unix:path` for a socket. Requests are
    distributed among several servers (docs/engine/fleet.md). With vllm the servers are `sparring serve --set
    engine.kind=vllm`; without an address the run starts one vLLM server. An openai engine has one address, including
    the path up to `/v1`."""

    api_key_env: str = ""
    """Environment variable with the API key of the servers at `urls`; empty: no key. A value such as `Basic
    dXNlcjpwYXNzd29yZA==` is a user and a password, which are refused in a URL."""

    silent_s: float = 10.0
    """Seconds without an answer to a ping after which one of several servers gets no more requests. Its running
    requests continue at the other servers."""

    shared_folder: str = ""
    """Folder that the server of a remote engine sees under the same path, for weights; used if the server does not
    share this machine's memory. Empty: weights are then sent over HTTP."""

    served_model: str = ""
    """Name of the model on an openai server; empty: the server's only model."""

    batch: BatchConfig = BatchConfig()
    """Size of a step."""

    kv: KvConfig = KvConfig()
    """Cache of keys and values."""

    update: UpdateConfig = UpdateConfig()
    """Updates of the weights."""

    vllm: VllmConfig = VllmConfig()
    """Settings of the server that `kind = "vllm"` starts."""

    @property
    def elsewhere(self) -> bool:
        """True if the engine is one `sparring serve` or several, at `urls`."""
        return bool(self.urls) and self.kind != "openai"

    @property
    def exact(self) -> bool:
        """True if the engine is the trainer's own module; with exact numerics its results are then bitwise equal to the
        trainer's."""
        return self.kind in ("native", "remote")

    def __post_init__(self) -> None:
        needed = {"native": False, "remote": True, "openai": True}
        if needed.get(self.kind, bool(self.urls)) != bool(self.urls):
            given = f'{len(self.urls)} with kind "{self.kind}"'
            raise ValueError(f'urls must be set for kind "remote" and "openai" and not for "native", got {given}')
        if self.kind == "openai" and len(self.urls) > 1:
            raise ValueError(f'urls must be one server with kind "openai", got {len(self.urls)}')
        if not self.silent_s > 0:
            raise ValueError(f"silent_s must be above 0, got {self.silent_s}")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"urls must be different servers, got {', '.join(self.urls)}")


def check_settings(engine: EngineConfig) -> None:
    """Check that the settings that an engine of this kind does not have are at their defaults. Raises BadInput for a
    setting that is not."""
    if engine.kind == "native":
        return
    advice = "leave it out; the server decides it"
    if engine.elsewhere:
        advice = "leave it out; give it to `sparring serve`, as --set engine.{name}={value}"
    elif engine.kind == "vllm":
        advice = "leave it out; vLLM's own settings go into engine.vllm.arguments"
    # `RemoteClient.check` compares the context of a remote engine with that of the recipe's cache
    theirs = ["kv.idle_bytes", *(() if engine.kind == "remote" else ("kv.tokens",))]
    if engine.urls:
        theirs += ["kv.across_turns", "update.live_kv", "vllm"]
    for name in theirs:
        value_of = attrgetter(name)
        if (value := value_of(engine)) != value_of(EngineConfig()):
            expected = 'its default with engine.kind = "%s"%s' % (engine.kind, " and urls" * bool(engine.urls))
            raise refusal(f"engine.{name}", expected, repr(value), advice.format(name=name, value=value))
    if engine.kv.across_turns == "offload":
        raise refusal("engine.kv.across_turns", '"keep" or "drop" with vLLM', '"offload"', "choose one of these")
