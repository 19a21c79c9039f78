"""Sources of the losses that sections configure, for docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sparring.algo.facts import OFF, Facts
from sparring.recipe.sections.distill import DistillConfig
from sparring.recipe.sections.preference import BradleyTerryConfig, StepsConfig, TurnsConfig
from sparring.recipe.sections.rl import ImplicitConfig

_RUN = "ours: of the run, not of the algorithm"

FACTS: Mapping[type[msgspec.Struct], Facts] = {
    BradleyTerryConfig: Facts(
        source="arXiv 2203.02155, equation 1; margins arXiv 2307.09288, equation 2; centring arXiv 2312.09244",
        defaults={"centre": OFF},
        differences=(),
    ),
    StepsConfig: Facts(
        source="arXiv 2305.20050",
        defaults={"separator": "the data of arXiv 2305.20050 has a step per line"},
        differences=("Labels are right and not; the paper's third, neutral, is one of the two.",),
    ),
    TurnsConfig: Facts(source="ours: `steps` of whole replies", defaults={}, differences=()),
    ImplicitConfig: Facts(
        source="arXiv 2502.01456, section 3",
        defaults={"model": "the paper: the policy that training begins with", "train": _RUN},
        differences=(),
    ),
    DistillConfig: Facts(
        source="Lu and Thinking Machines Lab 2025, On-Policy Distillation; GKD, arXiv 2306.13649, section 2",
        defaults={
            "steps": _RUN,
            "groups_per_step": _RUN,
            "train": _RUN,
            "stop": _RUN,
            "teachers": _RUN,
            "over": "On-Policy Distillation: the sampled token",
            "divergence": "On-Policy Distillation",
            "beta": "TRL's GKD",
            "top_k": "ours",
            "estimator": "On-Policy Distillation",
            "ratio_cap": "ours, after `tis`",
            "tokenizers": "ours: the plain case",
            "feedback": OFF,
            "decay": "ours; SDPO (arXiv 2601.20802) has a moving average, too",
            "observations": OFF,
            "aggregation": "ours, as in `[algo]`",
            "max_concurrent_scores": _RUN,
            "retries": _RUN,
            "retry_delay_s": _RUN,
        },
        differences=("GKD also mixes answers of a data set in; here the student samples all of them.",),
    ),
}
"""Sources by config class. They are not in `recipe.sections`, where users read about keys."""
