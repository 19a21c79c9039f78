"""Which correction a config asks for."""

from __future__ import annotations

from sparring.algo.correction.none import NoCorrection
from sparring.algo.correction.token_truncate import TokenTruncate
from sparring.protocols import Correction


def load_correction(name: str, *, cap: float) -> Correction:
    """The correction called `name`: none or token_truncate; `cap` bounds the weights of the latter."""
    return TokenTruncate(cap) if name == TokenTruncate.name else NoCorrection()
