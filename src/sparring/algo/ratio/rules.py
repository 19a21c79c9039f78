"""All ratios by name."""

from __future__ import annotations

from sparring.algo.ratio.product import ProductRatio
from sparring.algo.ratio.sequence import SequenceRatio
from sparring.algo.ratio.token import TokenRatio
from sparring.algo.ratio.turn import TurnRatio

RatioRule = TokenRatio | SequenceRatio | TurnRatio | ProductRatio
