"""All gates by name."""

from __future__ import annotations

from sparring.algo.gate.cispo import Cispo
from sparring.algo.gate.clip import Clip
from sparring.algo.gate.clip_cov import ClipCov
from sparring.algo.gate.dual_clip import DualClip
from sparring.algo.gate.geometric import Geometric
from sparring.algo.gate.kl_cov import KlCov
from sparring.algo.gate.kl_mask import KlMask
from sparring.algo.gate.m2po import M2po
from sparring.algo.gate.none import NoGate
from sparring.algo.gate.sapo import Sapo
from sparring.algo.gate.topr import Topr
from sparring.algo.gate.tv_mask import TvMask
from sparring.algo.gate.vespo import Vespo

GateRule = Clip | DualClip | Cispo | Sapo | TvMask | KlMask | Geometric | ClipCov | KlCov | Vespo | M2po | Topr | NoGate
