"""All credit rules by name."""

from __future__ import annotations

from sparring.algo.credit.grpo import Grpo

CreditRule = Grpo
