"""Base of all rules that a recipe chooses by name."""

from __future__ import annotations

import msgspec


class NamedRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of rules that a recipe chooses by name. The class's tag is the name, its fields are the settings."""


def check_positive(**settings: float) -> None:
    """Refuse a setting that is not above 0 (`ValueError`)."""
    for name, value in settings.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")


def name_of(rule: msgspec.Struct | type[msgspec.Struct]) -> str:
    """Return the name that a config uses for a rule, given the rule or its class."""
    return str(rule.__struct_config__.tag)
