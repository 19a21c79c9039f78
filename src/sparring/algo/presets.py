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
    "luspo": {"ratio": "sequence", "gate": {"name": "clip", "low": 0.002, "high": 0.0025}, "aggregation": "sequence_sum"},
    "gmpo": {"gate": "geometric", "aggregation": "sequence_mean"},
    "cispo": {"gate": "cispo", "aggregation": "token_mean"},
    "sapo": {"gate": "sapo", "aggregation": "sequence_mean"},
    "dppo": {
        "credit": {"name": "grpo", "normalise": False},
        "gate": "tv_mask",
        "correction": "none",
        "aggregation": "constant",
    },
    "dppo_kl": {
        "credit": {"name": "grpo", "normalise": False},
        "gate": "kl_mask",
        "correction": "none",
        "aggregation": "constant",
    },
    "clip_cov": {"gate": "clip_cov", "aggregation": "token_mean"},
    "kl_cov": {"gate": "kl_cov", "aggregation": "token_mean"},
    "vespo": {
        "credit": {"name": "grpo", "normalise": False},
        "ratio": "product",
        "gate": "vespo",
        "correction": "none",
        "aggregation": "sequence_sum",
    },
    "m2po": {"gate": "m2po", "correction": "none", "aggregation": "token_mean"},
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
    },
    "rloo": {"credit": "rloo", "gate": "none", "aggregation": "sequence_sum"},
    "reinforce_plus_plus": {
        "credit": "reinforce_plus_plus",
        "gate": {"name": "clip", "low": 0.2, "high": 0.2},
        "aggregation": "sequence_mean",
    },
    "reinforce_plus_plus_baseline": {
        "credit": "reinforce_plus_plus_baseline",
        "gate": {"name": "clip", "low": 0.2, "high": 0.2},
        "aggregation": "sequence_mean",
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
    "topr": {"credit": "topr", "ratio": "product", "gate": "topr", "correction": "none", "aggregation": "sequence_sum"},
}
"""What is not set here is the default, which the recipe may set."""

SOURCES: dict[str, str] = {
    "grpo": "DeepSeekMath, arXiv 2402.03300",
    "dr_grpo": "arXiv 2503.20783",
    "dapo": "arXiv 2503.14476: clip-higher, token mean, filter",
    "gspo": "arXiv 2507.18071, with its authors' bounds",
    "gspo_token": "arXiv 2507.18071, equation 13: for advantages that differ within a sequence",
    "luspo": "arXiv 2602.05261, equation 7, with its authors' bounds: GSPO's loss of a sequence times its length",
    "gmpo": "arXiv 2507.20673, equation 4",
    "cispo": "MiniMax-M1, arXiv 2506.13585",
    "sapo": "arXiv 2511.20347, equations 5 and 6",
    "dppo": "arXiv 2602.04879, equations 12 and 13 over a constant: binary total variation from what sampled",
    "dppo_kl": "the same, equation 14: binary KL divergence",
    "clip_cov": "arXiv 2505.22617, equations 10 to 12",
    "kl_cov": "arXiv 2505.22617, equations 10, 13 and 14",
    "vespo": "arXiv 2602.10693, equation 20; its authors' code divides by tokens instead of sequences",
    "m2po": "arXiv 2510.01161, algorithm 1, equation 5",
    "intellect_2": "arXiv 2505.07291: two-sided clip",
    "top_entropy": "arXiv 2506.01939: DAPO on the fifth of the tokens with the highest entropy",
    "decoupled_ppo": "AReaL, arXiv 2505.24298, equation 5, with its cap of 5",
    "decoupled_ppo_loglinear": "the same, the proximal policy guessed from versions",
    "ppo": "arXiv 1707.06347 with GAE, arXiv 1506.02438, with one lambda; takes `[rl.critic]`",
    "vapo": "arXiv 2504.05118, section 4, but for its loss on right answers; takes `[rl.critic]`",
    "rloo": "arXiv 2402.14740",
    "reinforce_plus_plus": "arXiv 2501.03262, equations 1, 4 and 5; takes `[algo.kl_reward]`",
    "reinforce_plus_plus_baseline": "arXiv 2501.03262, equations 1 and 6 to 8; takes `[algo.kl]` with k2",
    "remax": "arXiv 2310.10505",
    "opo": "arXiv 2505.23585",
    "gpg": "arXiv 2504.02546",
    "gigpo": "arXiv 2505.10978",
    "raft_plus_plus": "arXiv 2504.11343",
    "topr": "arXiv 2503.14286, equations 7 and 8; its authors' experiments divide by lengths",
}
"""Where each is from."""
