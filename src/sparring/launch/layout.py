"""Layout of a run: the settings that say where it is computed. They may change between a run's start and its resume,
because they change no sampled token and no weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

EXACT_ENGINES = ("native", "remote")
"""Engines that are the trainer's own module, and so sample the same tokens."""

ADDRESSES = ("engine.urls", "engine.api_key_env", "engine.silent_s", "engine.shared_folder")
"""Where the servers are, the patience with them, and the way of the weights to them."""

LAYOUT = (
    "run.threads",  # law 3: neither the bits of a forward pass nor those of a gradient depend on it
    "cluster",  # the places of the same engines
    *("engine.kind", *ADDRESSES),  # only among EXACT_ENGINES
    "engine.batch",  # law 3: a request does not depend on its neighbours
    # Pages that were dropped, moved or shared are those that the served version computes (law 4).
    *("engine.kv.across_turns", "engine.kv.idle_bytes", "engine.kv.offload_bytes", "engine.kv.share_prefixes"),
)
"""Settings, or tables of settings, of the layout.

Not among them: `run.device`, because another device has other kernels; `engine.kv.tokens` and `engine.kv.bytes`, which
limit the length of a conversation; `engine.update.live_kv`, which decides the versions that a running request reads;
`engine.vllm` and `engine.served_model`, because those engines promise no bits.
"""


def layout_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings of a run that may change with its layout: `LAYOUT`, or none if `depends_on_layout`; of a run
    on vLLM `ADDRESSES`, because its servers sample alike wherever they are."""
    if config["engine"]["kind"] == "vllm":
        return ADDRESSES
    return () if depends_on_layout(config) else LAYOUT


def depends_on_layout(config: Mapping[str, Any]) -> str:
    """Return why another layout would change a run's bits; empty if it would not."""
    kind = config["engine"]["kind"]
    if kind not in EXACT_ENGINES:
        return f'engine.kind is "{kind}", whose tokens are not those of the trainer\'s own module'
    fast = sorted(name for name, model in config["models"].items() if model["numerics"] == "fast")
    return f'models.{fast[0]}.numerics is "fast", whose bits depend on the layout' if fast else ""


def is_layout(difference: str) -> bool:
    """Return whether a difference, as of `config_differences`, is one of the layout."""
    return difference.startswith(tuple(f"{key}{end}" for key in LAYOUT for end in (" ", ".")))


def reason(begun: Mapping[str, Any], now: Mapping[str, Any], differences: Iterable[str]) -> str:
    """Return a clause that says why a run's layout may not change, or "" if none of the `differences` is of the
    layout."""
    why = depends_on_layout(begun) or depends_on_layout(now)
    return f" ({why})" if why and any(map(is_layout, differences)) else ""
