"""Where names, formulas and defaults are from. The facts stand beside what they are about; docs/algorithms.md prints
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

OFF = "off"
"""The source of a default at which a setting does nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a rule is held against. Its class carries them as `facts`."""

    source: str
    """The paper with its equations, or whose code in which file."""
    defaults: Mapping[str, str]
    """Where the default of each setting is from."""
    differences: tuple[str, ...]
    """What the source does in another way. Empty: nothing that we know of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Settings under a name."""

    sets: Mapping[str, Any]
    """The keys that it fills in."""
    source: str
    """As in `Facts`."""
    differences: tuple[str, ...]
    """As in `Facts`; what the rules that it names differ in stands with them."""


def name_of(rule: msgspec.Struct | type[msgspec.Struct]) -> str:
    """Return the name of a rule, or of its class, in a config."""
    return str(rule.__struct_config__.tag)
