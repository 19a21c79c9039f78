"""Sources of formulas and defaults. Each rule carries its own; docs/algorithms.md prints them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

OFF = "off"
"""Source of a default that turns a setting off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Sources of one rule, the class variable `facts` of its class."""

    source: str
    """Paper with equation numbers, or a project and its file."""
    defaults: Mapping[str, str]
    """Source of each setting's default."""
    differences: tuple[str, ...]
    """Points in which the source differs from this implementation. Empty: none known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Named settings of `[algo]`."""

    sets: Mapping[str, Any]
    """Keys that it fills in, with their values."""
    source: str
    """Paper or code, as in `Facts`."""
    differences: tuple[str, ...]
    """Points in which the source differs, in addition to those of the rules that it names."""


def name_of(rule: msgspec.Struct | type[msgspec.Struct]) -> str:
    """Return the name that a config uses for a rule, given the rule or its class."""
    return str(rule.__struct_config__.tag)
