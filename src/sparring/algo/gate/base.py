"""Base of the gates, with the defaults of their class variables."""

from __future__ import annotations

from typing import ClassVar

from sparring.algo.base import NamedRule
from sparring.algo.tokens import RatioKind, Unit


class BaseGate(NamedRule, frozen=True, kw_only=True):
    """Base of the gates: class variables that the configuration and the loss read.

    A gate is one file: its equation, its settings as fields, and the class variables in which it differs from the
    defaults below. `algo/rules.py` lists it; nothing else names it.
    """

    unit: ClassVar[Unit] = "token"
    """Unit of tokens whose ratios the gate combines."""

    takes: ClassVar[tuple[RatioKind, ...]] = ("token", "mean")
    """Kinds of ratio that the gate accepts."""

    moves_idle_tokens: ClassVar[bool] = False
    """True if tokens with an advantage of 0 can get a gradient, or affect the gradient of other tokens of the step."""
