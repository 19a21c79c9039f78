"""Overrides of `[train]` by a stage."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sparring.train.config import TrainConfig

TrainOverrides = Annotated[dict[str, int | float | str | bool], msgspec.Meta(extra={"keys_of": TrainConfig})]
"""Any keys of `[train]`, with valid values (`validation.convert` checks them)."""
