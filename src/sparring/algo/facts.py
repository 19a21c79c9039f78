"""Sources of names, formulas and defaults. Each rule carries its own; docs/algorithms.md prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

OFF = "off"
"""The source of a default at which a setting does nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Sources of a rule. Its class carries them as `facts`."""

    source: str
    """The paper with its equations, or whose code in which file."""
    defaults: Mapping[str, str]
    """Source of each setting's default."""
    differences: tuple[str, ...]
    """Points in which the source differs. Empty: none known to us."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Named settings of `[algo]`."""

    sets: Mapping[str, Any]
    """The keys that it fills in."""
    source: str
    """Paper or code; see `Facts`."""
    differences: tuple[str, ...]
    """Points in which the source differs, beside those of the rules that it names."""


def name_of(rule: msgspec.Struct | type[msgspec.Struct]) -> str:
    """Return the name of a rule, or of its class, in a config."""
    return str(rule.__struct_config__.tag)
