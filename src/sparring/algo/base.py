"""Names of rules in a recipe."""

from __future__ import annotations

import msgspec


def name_of(rule: msgspec.Struct | type[msgspec.Struct]) -> str:
    """Return the name that a config uses for a rule, given the rule or its class."""
    return str(rule.__struct_config__.tag)
