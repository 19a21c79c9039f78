"""All gates by name."""

from __future__ import annotations

from sparring.algo.gate.cispo import Cispo
from sparring.algo.gate.clip import Clip
from sparring.algo.gate.none import NoGate

GateRule = Clip | Cispo | NoGate
