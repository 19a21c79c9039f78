"""Construction of the preference loss that a config names."""

from __future__ import annotations

import msgspec

from sparring.algo.loss.preference.config import (
    DpoConfig,
    IpoConfig,
    KtoConfig,
    OrpoConfig,
    PreferenceLoss,
    RobustDpoConfig,
    SimPoConfig,
)
from sparring.algo.loss.preference.dpo import Dpo
from sparring.algo.loss.preference.kto import Kto
from sparring.algo.loss.preference.pairs import PairLoss
from sparring.algo.rare.preference.ipo import Ipo
from sparring.algo.rare.preference.orpo import Orpo
from sparring.algo.rare.preference.robust_dpo import RobustDpo
from sparring.algo.rare.preference.simpo import SimPo

FORMS = {DpoConfig: Dpo, RobustDpoConfig: RobustDpo, IpoConfig: Ipo, SimPoConfig: SimPo, OrpoConfig: Orpo}


def load_preference(config: PreferenceLoss) -> PairLoss | Kto:
    """Return the loss that `config` describes."""
    settings = msgspec.structs.asdict(config)
    return Kto(**settings) if isinstance(config, KtoConfig) else PairLoss(FORMS[type(config)](**settings))
