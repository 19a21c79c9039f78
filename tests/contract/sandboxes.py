"""What the contracts of boxes share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sparring.protocols import Boxes

Work = Callable[[Boxes], Awaitable[Any]]
Bench = Callable[[Work], Any]
