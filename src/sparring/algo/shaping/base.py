"""Base of the shaping rules, with the defaults of their class variables."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class BaseShaping(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of the shaping rules, which change rewards between scoring and credit. A rule is one file; `algo/rules.py`
    lists it."""

    needs_nonnegative_rewards: ClassVar[bool] = False
    """True if a reward below 0 is an error. Such a rule has to precede every rule that can make rewards negative."""
