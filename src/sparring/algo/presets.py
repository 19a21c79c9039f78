"""Algorithms by name: what each sets in `[algo]`."""

from __future__ import annotations

from typing import Any

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"gate": {"name": "clip", "low": 0.2, "high": 0.2}, "aggregation": "sequence_mean"},
    "dr_grpo": {
        "credit": {"name": "grpo", "normalise": False},
        "gate": {"name": "clip", "low": 0.2, "high": 0.2},
        "aggregation": "constant",
        "zero_variance_filter": False,
    },
    "dapo": {"gate": {"name": "clip", "low": 0.2, "high": 0.28}, "aggregation": "token_mean"},
    "gspo": {"ratio": "sequence", "gate": {"name": "clip", "low": 3e-4, "high": 4e-4}, "aggregation": "sequence_mean"},
    "cispo": {"gate": "cispo", "aggregation": "token_mean"},
    "ppo": {
        "credit": {"name": "gae", "lambda_policy": 0.95, "lambda_value": 0.95},
        "gate": {"name": "clip", "low": 0.2, "high": 0.2},
        "aggregation": "token_mean",
    },
    "vapo": {
        "credit": {"name": "gae", "lambda_value": 1.0, "length_alpha": 0.05},
        "gate": {"name": "clip", "low": 0.2, "high": 0.28},
        "aggregation": "token_mean",
    },
}
"""grpo: arXiv 2402.03300; dr_grpo: 2503.20783; dapo: 2503.14476 (clip-higher, token mean, filter); gspo: 2507.18071 with its
authors' bounds; cispo: 2506.13585; ppo: 1707.06347, with one lambda; vapo:
2504.05118, section 4, but for its loss on right answers. The last two need `[rl.critic]`."""
