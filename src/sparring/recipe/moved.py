"""Keys of earlier versions that are spelled otherwise now. They still load, and the user is told the new spelling."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from typing import Any

from sparring.errors import refusal

_TOPICS = {
    "rollout.sampling": (
        *("temperature", "top_p", "top_k", "min_p", "logit_bias"),
        *("max_turn_tokens", "min_turn_tokens", "stop_strings", "constraint"),
    ),
    "rollout.limits": ("max_turns", "max_tokens", "max_tool_calls", "timeout_s"),
    "rollout.timeouts": ("stalled_s",),
    "rollout.retries": ("outage_s",),
    "rollout.gateway": ("listen", "lease_s", "shown_to_workers"),
    "engine.batch": ("max_running",),
    "engine.kv": ("offload_bytes", "share_prefixes"),
    "engine.update": ("live_kv",),
}
"""Keys that kept their names, by their new table."""

MOVED = {
    "run.cluster": "cluster.kind",
    "rollout.gateway": "rollout.gateway.url",
    "rollout.retries": "rollout.retries.rebuilds",
    "rollout.task_retries": "rollout.retries.groups",
    "rollout.retry_delay_s": "rollout.retries.delay_s",
    "rollout.rewards_within_s": "rollout.rewards.within_s",
    "rollout.rewards_under": "rollout.rewards.under",
    "rollout.policy_failure_reward": "rollout.rewards.policy_failure",
    **{
        f"rollout.{at}_timeout_s": f"rollout.timeouts.{at}_s"
        for at in ("box", "open", "turn", "tool", "score", "close")
    },
    "engine.url": "engine.urls",
    "engine.max_batch_tokens": "engine.batch.max_tokens",
    "engine.kv_tokens": "engine.kv.tokens",
    "engine.kv_bytes": "engine.kv.bytes",
    "engine.kv_across_turns": "engine.kv.across_turns",
    "engine.idle_kv_bytes": "engine.kv.idle_bytes",
    "engine.update_timeout_s": "engine.update.timeout_s",
    "engine.update_retries": "engine.update.retries",
    "engine.update_retry_delay_s": "engine.update.retry_delay_s",
    **{f"{table.partition('.')[0]}.{key}": f"{table}.{key}" for table, keys in _TOPICS.items() for key in keys},
}
"""New key of each old key. `rollout.gateway` and `rollout.retries` have the name of a table now, and are old where
their value is no table. The value of `engine.url` is one of `engine.urls`."""

_log = logging.getLogger("sparring.recipe")
told: set[str] = set()
"""Old keys whose new spelling was told in this process."""


def moved(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a recipe with its old keys spelled anew.

    Args:
        data: parsed recipe, which is not changed.
        where: source of the recipe; the user is told the new spelling of its old keys. Empty: nothing is told.

    Raises:
        BadInput: an old key and its new one are both set.
    """
    result, found = copy.deepcopy(data), []
    for old, new in MOVED.items():
        (section, key), (*tables, name) = old.split("."), new.split(".")
        table = result.get(section)
        if not isinstance(table, dict) or key not in table or _is_table(new, table[key]):
            continue
        value, inner = table.pop(key), result
        for topic in tables:
            inner = inner.setdefault(topic, {}) if isinstance(inner, dict) else inner
        if not isinstance(inner, dict):
            continue  # the table itself is refused
        if name in inner:
            raise refusal(f"{where}: {new}", "one spelling of a key", f"{old} too", "leave the old one out")
        inner[name] = _new_value(new, value)
        found.append(old)
    if where:
        tell(found, where)
    return result


def moved_override(key: str, value: Any) -> tuple[str, Any]:
    """Return the new spelling of the key that an override sets, and its value."""
    section, _, rest = key.partition(".")
    old = f"{section}.{rest.partition('.')[0]}"
    if old not in MOVED or _is_table(MOVED[old], value if key == old else {}):
        return key, value
    return MOVED[old] + key[len(old) :], _new_value(MOVED[old], value)


def tell(keys: Iterable[str], where: str) -> None:
    """Tell the user the new spelling of old keys, of each once in a process."""
    new = [key for key in keys if key not in told]
    told.update(new)
    if new:
        spelled = ", ".join(f"{key} is {MOVED[key]}" for key in new)
        _log.warning("%s: keys have moved, and both spellings load: %s", where, spelled)


def _new_value(new: str, value: Any) -> Any:
    """Return the value of the key that moved to `new`."""
    if new != "engine.urls":
        return value
    return [value] if value != "" else []


def _is_table(new: str, value: Any) -> bool:
    """Return whether a value, of a key that moved to `new`, is meant as the new table of that name. A list is meant so
    too: it is what `[[rollout.gateway]]` says, and is refused as no table."""
    return new in ("rollout.gateway.url", "rollout.retries.rebuilds") and isinstance(value, (dict, list))
