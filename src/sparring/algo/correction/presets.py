"""Presets of `[algo.correction]`: settings by name, with their sources and the differences from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparring.algo.facts import Preset

PRESETS: dict[str, Preset] = {
    "none": Preset(
        sets={},
        source="no correction",
        differences=(),
    ),
    "tis": Preset(
        sets={"weight": "token", "high": 2.0},
        source='Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training"',
        differences=(),
    ),
    "sequence_tis": Preset(
        sets={"weight": "sequence", "high": 2.0},
        source='Liu et al. 2025, "When speed kills stability", sequence-level truncation',
        differences=(),
    ),
    "turn_tis": Preset(
        sets={"weight": "turn", "high": 2.0},
        source="ours: `sequence_tis` of one turn",
        differences=(),
    ),
    "normalised_tis": Preset(
        sets={"weight": "token", "high": 2.0, "normalise": True},
        source="Kong 1992, over the weights of `tis`",
        differences=(),
    ),
    "icepop": Preset(
        sets={"weight": "token", "bound": "mask", "low": 0.5, "high": 5.0},
        source="arXiv 2510.18855, with its bounds",
        differences=(),
    ),
    "token_mis": Preset(
        sets={"weight": "token", "bound": "mask", "high": 2.0},
        source='Liu et al. 2025, "When speed kills stability", token-level masks',
        differences=(
            ('verl\'s code, by the same authors, removes rejected tokens from the denominator: denominator = "kept".'),
        ),
    ),
    "mis": Preset(
        sets={"weight": "sequence", "bound": "mask", "high": 2.0},
        source='Liu et al. 2025, "When speed kills stability", sequence-level masks',
        differences=(
            ('verl\'s code, by the same authors, removes rejected tokens from the denominator: denominator = "kept".'),
        ),
    ),
    "geometric": Preset(
        sets={"weight": "geometric", "bound": "mask", "low": 0.999, "high": 1.002},
        source="ours: the geometric mean of a sequence's ratios as its weight, masked",
        differences=(
            (
                "No published method: others only mask by the geometric mean, and kept tokens keep their own ratios as "
                "in `seq_mask_tis`."
            ),
        ),
    ),
    "seq_mask_tis": Preset(
        sets={
            "weight": "token",
            "bound": "none",
            "reject": "k1",
            "reject_above": 0.0010005,
            "reject_below": -0.001998,
        },
        source=(
            "NeMo RL's `seq-mask-tis` (loss_functions.py): sequences are kept if the geometric mean of their ratios is "
            "from 0.999 to 1.002; tokens of kept sequences keep their own ratios"
        ),
        differences=("The bounds are log 0.999 and log 1.002, rounded to 7 digits.",),
    ),
    "geometric_rejection": Preset(
        sets={"reject": "k1", "reject_above": 0.001, "reject_below": -0.002, "denominator": "kept"},
        source=(
            'Liu et al. 2025, "When speed kills stability"; verl (rollout_corr_helper.py): rejection by the '
            "geometric mean, out of the denominator"
        ),
        differences=("The bounds are the logarithms of 0.999 and 1.002, rounded; verl has no default.",),
    ),
    "k3_rejection": Preset(
        sets={"reject": "k3", "reject_above": 0.01, "denominator": "kept"},
        source=(
            'Li et al. 2026, "Trust region masking for long-horizon LLM reinforcement learning"; verl '
            "(rollout_corr_helper.py): out of the denominator"
        ),
        differences=("0.01 is ours; verl has no default.",),
    ),
    "tis_k3_rejection": Preset(
        sets={"weight": "token", "high": 2.0, "reject": "k3", "reject_above": 0.01, "denominator": "kept"},
        source="`tis` and `k3_rejection`",
        differences=("0.01 is ours; verl has no default.",),
    ),
    "off_policy_mask": Preset(
        sets={"reject": "k1", "reject_above": 0.01, "only_negative": True, "compare": "now"},
        source="DeepSeek-V3.2, arXiv 2512.02556, section 3.1",
        differences=("0.01 is ours; the paper gives no number, TRL suggests 0.5, slime has 1e-4.",),
    ),
    "metrics": Preset(
        sets={"weight": "token", "high": 2.0, "metrics_only": True},
        source="ours: measures what `tis` would do",
        differences=(),
    ),
}
"""Presets by name."""

CORRECTIONS: Mapping[str, Mapping[str, Any]] = {name: preset.sets for name, preset in PRESETS.items()}
"""Keys and values that each preset sets."""
