"""Facts that every gate carries, with the values that most have."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from sparring.algo.facts import Facts
from sparring.algo.tokens import RatioKind, Unit


class BaseGate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of the gates: the facts that the configuration and the loss read. A gate is one file: its equation, its
    settings as fields, and those of these facts in which it differs. `algo/rules.py` lists it; nothing else names
    it."""

    facts: ClassVar[Facts]
    """The gate's sources."""

    unit: ClassVar[Unit]
    """The tokens whose ratios it looks at together."""

    takes: ClassVar[tuple[RatioKind, ...]] = ("token", "mean")
    """Kinds of ratio that it can be given."""

    moves_idle_tokens: ClassVar[bool] = False
    """True if tokens of advantage 0 can get a gradient, or change that of others in the optimiser step."""
