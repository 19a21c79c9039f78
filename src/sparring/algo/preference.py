"""Construction of the preference loss that a config names."""

from __future__ import annotations

import msgspec

from sparring.algo.loss.preference.config import KtoConfig
from sparring.algo.loss.preference.kto import Kto
from sparring.algo.loss.preference.pairs import PairLoss
from sparring.algo.preference_rules import PreferenceLoss


def load_preference(config: PreferenceLoss) -> PairLoss | Kto:
    """Return the loss that `config` describes."""
    return Kto(**msgspec.structs.asdict(config)) if isinstance(config, KtoConfig) else PairLoss(config)
