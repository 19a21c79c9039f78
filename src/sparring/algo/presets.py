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
    "gspo_token": {
        "ratio": {"name": "sequence", "per_token": True},
        "gate": {"name": "clip", "low": 3e-4, "high": 4e-4},
        "aggregation": "sequence_mean",
    },
    "luspo": {"ratio": "sequence", "gate": {"name": "clip", "low": 3e-4, "high": 4e-4}, "aggregation": "sequence_sum"},
    "gmpo": {"gate": "geometric", "aggregation": "sequence_mean"},
    "cispo": {"gate": "cispo", "aggregation": "token_mean"},
    "sapo": {"gate": "sapo", "aggregation": "sequence_mean"},
    "dppo": {"gate": "tv_mask", "aggregation": "token_mean"},
    "clip_cov": {"gate": "clip_cov", "aggregation": "token_mean"},
    "kl_cov": {"gate": "kl_cov", "aggregation": "token_mean"},
    "vespo": {"ratio": "product", "gate": "vespo", "aggregation": "sequence_sum"},
    "m2po": {"gate": "m2po", "aggregation": "token_mean"},
    "intellect_2": {"gate": {"name": "dual_clip", "low": 0.2, "high": 0.2, "bound": 4.0}, "aggregation": "token_mean"},
    "top_entropy": {"gate": {"name": "clip", "low": 0.2, "high": 0.28}, "aggregation": "token_mean", "top_entropy": 0.2},
    "decoupled_ppo": {
        "anchor": "proximal",
        "correction": {"weight": "token", "high": 5.0},
        "gate": {"name": "clip", "low": 0.2, "high": 0.2},
        "aggregation": "token_mean",
    },
    "decoupled_ppo_loglinear": {
        "anchor": "loglinear",
        "correction": {"weight": "token", "high": 5.0},
        "gate": {"name": "clip", "low": 0.2, "high": 0.2},
        "aggregation": "token_mean",
    },
    "ppo": {
        "credit": {"name": "gae", "lambda_policy": 0.95, "lambda_value": 0.95},
        "gate": {"name": "clip", "low": 0.2, "high": 0.2},
        "aggregation": "token_mean",
    },
    "vapo": {
        "credit": {"name": "gae", "lambda_value": 1.0, "length_alpha": 0.05},
        "gate": {"name": "clip", "low": 0.2, "high": 0.28},
        "aggregation": "token_mean",
        "right_answers": {"coefficient": 0.1},
    },
    "prime": {
        "credit": {"name": "prime", "beta": 0.05},
        "gate": {"name": "clip", "low": 0.2, "high": 0.2},
        "aggregation": "token_mean",
        "difficulty": {"lowest": 0.2, "highest": 0.8, "inclusive": True},
    },
    "rloo": {"credit": "rloo", "gate": "none", "aggregation": "sequence_sum"},
    "reinforce_plus_plus": {
        "credit": "reinforce_plus_plus",
        "gate": {"name": "clip", "low": 0.2, "high": 0.2},
        "aggregation": "token_mean",
    },
    "reinforce_plus_plus_baseline": {
        "credit": "reinforce_plus_plus_baseline",
        "gate": {"name": "clip", "low": 0.2, "high": 0.2},
        "aggregation": "token_mean",
    },
    "remax": {"credit": "remax", "gate": "none", "aggregation": "sequence_sum"},
    "opo": {"credit": "opo", "gate": "none", "aggregation": "token_mean"},
    "gpg": {"credit": "gpg", "gate": "none", "aggregation": "token_mean"},
    "gigpo": {"credit": "gigpo", "gate": {"name": "clip", "low": 0.2, "high": 0.2}, "aggregation": "sequence_mean"},
    "raft_plus_plus": {
        "credit": "raft_plus_plus",
        "gate": {"name": "clip", "low": 0.2, "high": 0.2},
        "aggregation": "sequence_mean",
    },
    "topr": {"credit": "topr", "ratio": "product", "gate": "topr", "aggregation": "sequence_sum"},
}
"""What is not set here is the default, which the recipe may set."""

SOURCES: dict[str, str] = {
    "grpo": "DeepSeekMath, arXiv 2402.03300",
    "dr_grpo": "arXiv 2503.20783",
    "dapo": "arXiv 2503.14476: clip-higher, token mean, filter",
    "gspo": "arXiv 2507.18071, with its authors' bounds",
    "gspo_token": "arXiv 2507.18071, equation 13: for advantages that differ within a sequence",
    "luspo": "length-unbiased: GSPO's loss of a sequence times its length, arXiv 2602.05261",
    "gmpo": "arXiv 2507.20673",
    "cispo": "MiniMax-M1, arXiv 2506.13585",
    "sapo": "arXiv 2511.20347",
    "dppo": "arXiv 2602.04879, binary total variation",
    "clip_cov": "arXiv 2505.22617",
    "kl_cov": "arXiv 2505.22617",
    "vespo": "arXiv 2602.10693",
    "m2po": "arXiv 2510.01161",
    "intellect_2": "arXiv 2505.07291: two-sided clip",
    "top_entropy": "arXiv 2506.01939: DAPO on the fifth of the tokens with the highest entropy",
    "decoupled_ppo": "AReaL, arXiv 2505.24298, equation 5, with its cap of 5",
    "decoupled_ppo_loglinear": "the same, the proximal policy guessed from versions",
    "ppo": "arXiv 1707.06347 with GAE, arXiv 1506.02438, with one lambda; takes `[rl.critic]`",
    "vapo": "arXiv 2504.05118, section 4; takes `[rl.critic]`",
    "prime": "arXiv 2502.01456, with its filter of prompts; takes `[rl.implicit]`",
    "rloo": "arXiv 2402.14740",
    "reinforce_plus_plus": "arXiv 2501.03262",
    "reinforce_plus_plus_baseline": "arXiv 2501.03262",
    "remax": "arXiv 2310.10505",
    "opo": "arXiv 2505.23585",
    "gpg": "arXiv 2504.02546",
    "gigpo": "arXiv 2505.10978",
    "raft_plus_plus": "arXiv 2504.11343",
    "topr": "arXiv 2503.14286",
}
"""Where each is from."""
