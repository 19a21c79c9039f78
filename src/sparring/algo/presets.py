"""Presets: the `[algo]` settings of named algorithms. docs/algorithms.toml has their sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PPO_CLIP = {"name": "clip", "low": 0.2, "high": 0.2}
_DAPO_CLIP = {"name": "clip", "low": 0.2, "high": 0.28}
_GSPO_CLIP = {"name": "clip", "low": 0.0003, "high": 0.0004}
_AREAL_MASK = {"weight": "token", "bound": "mask", "high": 5.0}
_CENTRED = {"name": "grpo", "normalise": False}
_PLAIN = {"gate": "none", "aggregation": "sequence_sum"}
"""REINFORCE's loss: log-probabilities times advantages, summed over a sequence."""

ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"gate": _PPO_CLIP, "aggregation": "sequence_mean"},
    "dr_grpo": {"credit": _CENTRED, "gate": _PPO_CLIP, "aggregation": "constant"},
    "dapo": {"gate": _DAPO_CLIP, "aggregation": "token_mean", "zero_variance_filter": True},
    "gspo": {"ratio": "sequence", "gate": _GSPO_CLIP, "aggregation": "sequence_mean"},
    "gspo_token": {
        "ratio": {"name": "sequence", "per_token": True},
        "gate": _GSPO_CLIP,
        "aggregation": "sequence_mean",
    },
    "luspo": {
        "ratio": "sequence",
        "gate": {"name": "clip", "low": 0.002, "high": 0.0025},
        "aggregation": "sequence_sum",
    },
    "gmpo": {"gate": "geometric", "aggregation": "sequence_mean"},
    "cispo": {"gate": "cispo", "aggregation": "token_mean"},
    "sapo": {"gate": "sapo", "aggregation": "sequence_mean"},
    "dppo": {"credit": _CENTRED, "gate": "tv_mask", "correction": "none", "aggregation": "constant"},
    "dppo_kl": {"credit": _CENTRED, "gate": "kl_mask", "correction": "none", "aggregation": "constant"},
    "clip_cov": {"gate": "clip_cov", "aggregation": "token_mean"},
    "kl_cov": {"gate": "kl_cov", "aggregation": "token_mean"},
    "vespo": {
        "credit": _CENTRED,
        "ratio": "product",
        "gate": "vespo",
        "correction": "none",
        "aggregation": "sequence_sum",
    },
    "m2po": {"gate": "m2po", "correction": "none", "aggregation": "token_mean"},
    "intellect_2": {"gate": {"name": "dual_clip", "low": 0.2, "high": 0.2, "bound": 4.0}, "aggregation": "token_mean"},
    "top_entropy": {"gate": _DAPO_CLIP, "aggregation": "token_mean", "top_entropy": 0.2, "zero_variance_filter": True},
    "decoupled_ppo": {"anchor": "proximal", "correction": _AREAL_MASK, "gate": _PPO_CLIP, "aggregation": "token_mean"},
    "decoupled_ppo_loglinear": {
        "anchor": "loglinear",
        "correction": _AREAL_MASK,
        "gate": _PPO_CLIP,
        "aggregation": "token_mean",
    },
    "ppo": {
        "credit": {"name": "gae", "lambda_policy": 0.95, "lambda_value": 0.95},
        "gate": _PPO_CLIP,
        "aggregation": "token_mean",
    },
    "vapo": {
        "credit": {"name": "gae", "lambda_value": 1.0, "length_alpha": 0.05},
        "gate": _DAPO_CLIP,
        "aggregation": "token_mean",
        "right_answers": {"coefficient": 0.1},
    },
    "prime": {
        "credit": {"name": "prime", "beta": 0.05},
        "gate": _PPO_CLIP,
        "aggregation": "token_mean",
        "difficulty": {"lowest": 0.2, "highest": 0.8, "inclusive": True},
    },
    "reinforce": {"credit": "reinforce", **_PLAIN},
    "rloo": {"credit": "rloo", **_PLAIN},
    "reinforce_plus_plus": {"credit": "reinforce_plus_plus", "gate": _PPO_CLIP, "aggregation": "sequence_mean"},
    "reinforce_plus_plus_baseline": {
        "credit": "reinforce_plus_plus_baseline",
        "gate": _PPO_CLIP,
        "aggregation": "sequence_mean",
    },
    "remax": {"credit": "remax", **_PLAIN},
    "maxrl": {"credit": "maxrl", **_PLAIN},
    "optimal_token_baseline": {"credit": "optimal_token_baseline", **_PLAIN},
    "spiral": {"credit": "rae", **_PLAIN},
    "opo": {"credit": "opo", "gate": "none", "aggregation": "token_mean"},
    "gpg": {"credit": "gpg", "gate": "none", "aggregation": "token_mean"},
    "gigpo": {"credit": "gigpo", "gate": _PPO_CLIP, "aggregation": "sequence_mean"},
    "mt_grpo": {"credit": "turn_level", "gate": _PPO_CLIP, "aggregation": "sequence_mean"},
    "grpo_process": {"credit": "process", "gate": _PPO_CLIP, "aggregation": "sequence_mean"},
    "raft": {"credit": "raft", **_PLAIN},
    "raft_plus_plus": {"credit": "raft_plus_plus", "gate": _PPO_CLIP, "aggregation": "sequence_mean"},
    "topr": {
        "credit": "topr",
        "ratio": "product",
        "gate": "topr",
        "correction": "none",
        "aggregation": "sequence_sum",
    },
}
"""Settings by preset. Keys that a preset leaves out keep their defaults. A paper that only defines a credit rule
(pass_at_k; gdpo, which needs weights from the recipe) has no preset: its rule combines with any preset."""
