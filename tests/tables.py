"""Settings of a config's tables by the names of the keys alone, for tests that set a few."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, TypeVar

import msgspec

Config = TypeVar("Config", bound=msgspec.Struct)


def with_settings(config: Config, **settings: Any) -> Config:
    """Return a config with some settings replaced.

    Args:
        config: config whose keys are settings or tables of settings.
        settings: values by key. A key of a table is named alone, `live_kv`, or with its table, `kv_tokens`.
    """
    tables: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in settings.items():
        table, key = _place(config, name)
        tables[table][key] = value
    changed = {
        table: msgspec.structs.replace(getattr(config, table), **keys) for table, keys in tables.items() if table
    }
    return msgspec.structs.replace(config, **tables[""], **changed)


def _place(config: msgspec.Struct, name: str) -> tuple[str, str]:
    """Return the table of a setting, empty for the config itself, and its key there."""
    if name in config.__struct_fields__ and not isinstance(getattr(config, name), msgspec.Struct):
        return "", name
    for table in config.__struct_fields__:
        inner = getattr(config, table)
        if isinstance(inner, msgspec.Struct):
            for key in inner.__struct_fields__:
                if name in (key, f"{table}_{key}"):
                    return table, key
    raise TypeError(f"{type(config).__name__} and its tables have no key {name}")
