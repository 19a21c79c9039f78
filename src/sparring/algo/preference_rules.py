"""All preference losses that a recipe can name. Torch-free."""

from __future__ import annotations

from sparring.algo.loss.preference.config import KtoConfig
from sparring.algo.loss.preference.dpo import Dpo
from sparring.algo.rare.preference.ipo import Ipo
from sparring.algo.rare.preference.orpo import Orpo
from sparring.algo.rare.preference.robust_dpo import RobustDpo
from sparring.algo.rare.preference.simpo import SimPo

PreferenceLoss = Dpo | RobustDpo | Ipo | KtoConfig | SimPo | Orpo
"""Choices of `[preference] loss`."""

ComparingLoss = Dpo | RobustDpo | Ipo | SimPo
"""Losses that need two replies to one prompt and nothing else: choices of `[rl] preference`."""
