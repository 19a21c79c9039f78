"""Base of the shaping rules, with the defaults of their class variables."""

from __future__ import annotations

from typing import ClassVar

from sparring.algo.base import NamedRule


class BaseShaping(NamedRule, frozen=True, kw_only=True):
    """Base of the shaping rules, which change rewards between scoring and credit. A rule is one file; `algo/rules.py`
    lists it."""

    needs_nonnegative_rewards: ClassVar[bool] = False
    """True if a reward below 0 is an error. Such a rule has to precede every rule that can make rewards negative."""
