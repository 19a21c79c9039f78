"""Which credit a config asks for."""

from __future__ import annotations

from sparring.algo.config import GrpoConfig
from sparring.algo.credit.grpo import Grpo
from sparring.algo.credit.shuffled import Shuffled
from sparring.protocols import Credit


def load_credit(config: GrpoConfig, *, seed: int) -> Credit:
    """The credit of `config`; `seed` is the run's and matters for the shuffled control only."""
    credit = Grpo(config)
    return Shuffled(credit, seed=seed) if config.control == "shuffled" else credit
