"""Presets of `[algo.correction]`: settings by name. docs/algorithms.toml has their sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "tis": {"weight": "token", "high": 2.0},
    "sequence_tis": {"weight": "sequence", "high": 2.0},
    "turn_tis": {"weight": "turn", "high": 2.0},
    "normalised_tis": {"weight": "token", "high": 2.0, "normalise": True},
    "icepop": {"weight": "token", "bound": "mask", "low": 0.5, "high": 5.0},
    "token_mis": {"weight": "token", "bound": "mask", "high": 2.0},
    "mis": {"weight": "sequence", "bound": "mask", "high": 2.0},
    "geometric": {"weight": "geometric", "bound": "mask", "low": 0.999, "high": 1.002},
    "seq_mask_tis": {
        "weight": "token",
        "bound": "none",
        "reject": "k1",
        "reject_above": 0.0010005,
        "reject_below": -0.001998,
    },
    "geometric_rejection": {"reject": "k1", "reject_above": 0.001, "reject_below": -0.002, "denominator": "kept"},
    "k3_rejection": {"reject": "k3", "reject_above": 0.01, "denominator": "kept"},
    "tis_k3_rejection": {"weight": "token", "high": 2.0, "reject": "k3", "reject_above": 0.01, "denominator": "kept"},
    "off_policy_mask": {"reject": "k1", "reject_above": 0.01, "only_negative": True, "compare": "now"},
    "metrics": {"weight": "token", "high": 2.0, "metrics_only": True},
}
"""Settings by preset."""
