"""Presets: the `[algo]` settings of named algorithms, with their sources and the differences from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparring.algo.facts import Preset

_PPO_CLIP = {"name": "clip", "low": 0.2, "high": 0.2}
_DAPO_CLIP = {"name": "clip", "low": 0.2, "high": 0.28}
_GSPO_CLIP = {"name": "clip", "low": 0.0003, "high": 0.0004}
_AREAL_MASK = {"weight": "token", "bound": "mask", "high": 5.0}
_CENTRED = {"name": "grpo", "normalise": False}
_PLAIN = {"gate": "none", "aggregation": "sequence_sum"}
"""REINFORCE's loss: log-probabilities times advantages, summed over a sequence."""

_KL_OF_EQUATION_3 = "No KL penalty: equation 3 subtracts 0.04 times the k3 estimate. Add kl = { coefficient = 0.04 }."
_KL_IN_LOSS = "No KL penalty, which GRPO's objective has: add kl."
_KL_IN_REWARD = "The paper's reward holds a KL penalty for RLHF, which is not set: add kl_reward."
_FLAT_GROUPS = "Flat groups are dropped; the authors replace them by others, so that updates keep their size."
_ENTROPY_RUNS = (
    "The authors' runs (verl, recipe/entropy) replace groups whose answers are all right or all wrong: "
    "zero_variance_filter = true drops them."
)
_DPPO_DIFFERENCES = (
    (
        "L is `rollout.max_turn_tokens` unless max_tokens is set; the authors' recipe takes the largest "
        "length of an answer."
    ),
    "The ratio has no bound; the authors' larger runs bound it by 5.",
)
_AREAL_DIFFERENCES = (
    "Advantages are GRPO's; the paper's are returns without a critic, normalised over the batch.",
    (
        "5 is the default cap of the first releases (`behave_imp_weight_cap`, `token_mask`); later releases have "
        "none by default."
    ),
)

PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        sets={"gate": _PPO_CLIP, "aggregation": "sequence_mean"},
        source="DeepSeekMath, arXiv 2402.03300, equation 3 and section 4.1.2",
        differences=(_KL_OF_EQUATION_3, "The clip range is PPO's 0.2, for which the paper gives no number."),
    ),
    "dr_grpo": Preset(
        sets={"credit": _CENTRED, "gate": _PPO_CLIP, "aggregation": "constant"},
        source="arXiv 2503.20783, section 3.2",
        differences=(
            (
                "L is `rollout.max_turn_tokens` unless max_tokens is set: it bounds one turn, not a rollout with many, "
                "and the size of a step depends on it. The authors' L is the largest length of an answer."
            ),
        ),
    ),
    "dapo": Preset(
        sets={"gate": _DAPO_CLIP, "aggregation": "token_mean", "zero_variance_filter": True},
        source="arXiv 2503.14476, equations 8, 10 and 11, with the bounds of section 4.1",
        differences=(
            _FLAT_GROUPS,
            "A group is flat if all rewards are equal; the authors' code compares accuracies.",
            (
                "The mean is over all tokens of the optimiser step, as in the authors' code; equation 8 has one per "
                "prompt."
            ),
            'The punishment of overlong answers (equation 13) is not set: add shaping = [{ name = "overlong" }].',
        ),
    ),
    "gspo": Preset(
        sets={"ratio": "sequence", "gate": _GSPO_CLIP, "aggregation": "sequence_mean"},
        source="arXiv 2507.18071, equations 5 to 7, with the bounds of section 5.1",
        differences=(),
    ),
    "gspo_token": Preset(
        sets={"ratio": {"name": "sequence", "per_token": True}, "gate": _GSPO_CLIP, "aggregation": "sequence_mean"},
        source=(
            "arXiv 2507.18071, equations 13 and 14, for advantages that differ within a sequence; bounds of section 5.1"
        ),
        differences=(),
    ),
    "luspo": Preset(
        sets={
            "ratio": "sequence",
            "gate": {"name": "clip", "low": 0.002, "high": 0.0025},
            "aggregation": "sequence_sum",
        },
        source="arXiv 2602.05261, equation 7, with its authors' bounds: GSPO's loss of a sequence times its length",
        differences=(),
    ),
    "gmpo": Preset(
        sets={"gate": "geometric", "aggregation": "sequence_mean"},
        source="arXiv 2507.20673, equation 4",
        differences=(),
    ),
    "cispo": Preset(
        sets={"gate": "cispo", "aggregation": "token_mean"},
        source="MiniMax-M1, arXiv 2506.13585, equations 4 and 5",
        differences=(
            (
                "The mean is over all tokens of the optimiser step; equation 4 divides each prompt's answers by "
                "their own tokens."
            ),
            "The authors also filter flat groups and punish length like DAPO; neither is set.",
        ),
    ),
    "sapo": Preset(
        sets={"gate": "sapo", "aggregation": "sequence_mean"},
        source="arXiv 2511.20347, equations 5 and 6",
        differences=(),
    ),
    "dppo": Preset(
        sets={"credit": _CENTRED, "gate": "tv_mask", "correction": "none", "aggregation": "constant"},
        source=(
            "arXiv 2602.04879, equations 12 and 13, binary total variation from what sampled; advantages, "
            "aggregation and bound of its recipe in verl (examples/dppo_trainer)"
        ),
        differences=_DPPO_DIFFERENCES,
    ),
    "dppo_kl": Preset(
        sets={"credit": _CENTRED, "gate": "kl_mask", "correction": "none", "aggregation": "constant"},
        source="arXiv 2602.04879, equations 12 and 14, binary KL divergence; the rest as `dppo`",
        differences=_DPPO_DIFFERENCES,
    ),
    "clip_cov": Preset(
        sets={"gate": "clip_cov", "aggregation": "token_mean"},
        source="arXiv 2505.22617, equations 10 to 12, and its authors' code (verl, core_algos.py, `clip_cov`)",
        differences=(_ENTROPY_RUNS,),
    ),
    "kl_cov": Preset(
        sets={"gate": "kl_cov", "aggregation": "token_mean"},
        source="arXiv 2505.22617, equations 10, 13 and 14, and its authors' code (verl, core_algos.py, `kl_cov`)",
        differences=(_ENTROPY_RUNS,),
    ),
    "vespo": Preset(
        sets={
            "credit": _CENTRED,
            "ratio": "product",
            "gate": "vespo",
            "correction": "none",
            "aggregation": "sequence_sum",
        },
        source="arXiv 2602.10693, equation 20",
        differences=(
            'Its authors\' code divides by tokens instead of sequences: aggregation = "token_mean".',
            (
                "Its authors' recipe leaves verl's division of advantages by the group's deviation on: credit = { "
                "normalise = true }."
            ),
        ),
    ),
    "m2po": Preset(
        sets={"gate": "m2po", "correction": "none", "aggregation": "token_mean"},
        source="arXiv 2510.01161, algorithm 1 and equation 5",
        differences=(),
    ),
    "intellect_2": Preset(
        sets={"gate": {"name": "dual_clip", "low": 0.2, "high": 0.2, "bound": 4.0}, "aggregation": "token_mean"},
        source="arXiv 2505.07291: the two-sided clip",
        differences=(
            ("Its run also has a KL penalty, an entropy bonus and a filter that replaces flat groups; none is set."),
        ),
    ),
    "top_entropy": Preset(
        sets={"gate": _DAPO_CLIP, "aggregation": "token_mean", "top_entropy": 0.2, "zero_variance_filter": True},
        source="arXiv 2506.01939: DAPO on the fifth of the tokens with the highest entropy",
        differences=(
            _FLAT_GROUPS,
            "The fifth is of a whole optimiser step; the authors' code takes a fifth of each micro-batch.",
        ),
    ),
    "decoupled_ppo": Preset(
        sets={"anchor": "proximal", "correction": _AREAL_MASK, "gate": _PPO_CLIP, "aggregation": "token_mean"},
        source=(
            "AReaL, arXiv 2505.24298, equation 5, and its code (areal/utils/functional.py, `ppo_actor_loss_fn`): a "
            "token whose weight is above 5 is masked, and counts in the denominator"
        ),
        differences=_AREAL_DIFFERENCES,
    ),
    "decoupled_ppo_loglinear": Preset(
        sets={"anchor": "loglinear", "correction": _AREAL_MASK, "gate": _PPO_CLIP, "aggregation": "token_mean"},
        source=(
            'as `decoupled_ppo`, with AReaL\'s `prox_logp_method = "loglinear"`: the proximal policy estimated from '
            "versions"
        ),
        differences=_AREAL_DIFFERENCES,
    ),
    "ppo": Preset(
        sets={
            "credit": {"name": "gae", "lambda_policy": 0.95, "lambda_value": 0.95},
            "gate": _PPO_CLIP,
            "aggregation": "token_mean",
        },
        source="arXiv 1707.06347, equation 7, with GAE, arXiv 1506.02438, and one lambda",
        differences=(
            "It takes `[rl.critic]`; no entropy bonus, which the paper's equation 9 has.",
            (
                "Advantages are whitened over the update's tokens, as in common implementations; the paper does not "
                "mention it."
            ),
        ),
    ),
    "vapo": Preset(
        sets={
            "credit": {"name": "gae", "lambda_value": 1.0, "length_alpha": 0.05},
            "gate": _DAPO_CLIP,
            "aggregation": "token_mean",
            "right_answers": {"coefficient": 0.1},
        },
        source="arXiv 2504.05118, section 4",
        differences=(
            (
                "It takes `[rl.critic]`, whose warmup_steps are the paper's value pretraining, and "
                "`rollout.group_size` its group sampling."
            ),
        ),
    ),
    "prime": Preset(
        sets={
            "credit": {"name": "prime", "beta": 0.05},
            "gate": _PPO_CLIP,
            "aggregation": "token_mean",
            "difficulty": {"lowest": 0.2, "highest": 0.8, "inclusive": True},
        },
        source="arXiv 2502.01456, equation 5, with its filter of prompts",
        differences=(
            "It takes `[rl.implicit]`.",
            (
                "The authors' code also whitens the advantages over the batch, which fixes the size of a step, and has "
                "another leave-one-out: see the credit."
            ),
        ),
    ),
    "reinforce": Preset(
        sets={"credit": "reinforce", **_PLAIN},
        source="Williams 1992",
        differences=("No baseline; the constant of the credit is 0.",),
    ),
    "rloo": Preset(
        sets={"credit": "rloo", **_PLAIN}, source="arXiv 2402.14740, section 2.2", differences=(_KL_IN_REWARD,)
    ),
    "reinforce_plus_plus": Preset(
        sets={"credit": "reinforce_plus_plus", "gate": _PPO_CLIP, "aggregation": "sequence_mean"},
        source="arXiv 2501.03262, equations 1, 4 and 5",
        differences=(_KL_IN_REWARD,),
    ),
    "reinforce_plus_plus_baseline": Preset(
        sets={"credit": "reinforce_plus_plus_baseline", "gate": _PPO_CLIP, "aggregation": "sequence_mean"},
        source="arXiv 2501.03262, equations 1 and 6 to 8",
        differences=(
            'The paper\'s loss holds a k2 penalty (equation 8), which is not set: add kl with estimator = "k2".',
        ),
    ),
    "remax": Preset(
        sets={"credit": "remax", **_PLAIN}, source="arXiv 2310.10505, algorithm 1", differences=(_KL_IN_REWARD,)
    ),
    "maxrl": Preset(
        sets={"credit": "maxrl", **_PLAIN}, source="arXiv 2602.02710, its estimator on policy", differences=()
    ),
    "optimal_token_baseline": Preset(
        sets={"credit": "optimal_token_baseline", **_PLAIN},
        source="arXiv 2602.07078, its estimator on policy",
        differences=(),
    ),
    "spiral": Preset(
        sets={"credit": "rae", **_PLAIN},
        source="arXiv 2506.24119, algorithm 1: self-play, a baseline per role",
        differences=(),
    ),
    "opo": Preset(
        sets={"credit": "opo", "gate": "none", "aggregation": "token_mean"}, source="arXiv 2505.23585", differences=()
    ),
    "gpg": Preset(
        sets={"credit": "gpg", "gate": "none", "aggregation": "token_mean"}, source="arXiv 2504.02546", differences=()
    ),
    "gigpo": Preset(
        sets={"credit": "gigpo", "gate": _PPO_CLIP, "aggregation": "sequence_mean"},
        source="arXiv 2505.10978",
        differences=(_KL_IN_LOSS,),
    ),
    "mt_grpo": Preset(
        sets={"credit": "turn_level", "gate": _PPO_CLIP, "aggregation": "sequence_mean"},
        source="arXiv 2505.11821, version 1, section 4.2: GRPO with turn-level advantages",
        differences=(_KL_IN_LOSS,),
    ),
    "grpo_process": Preset(
        sets={"credit": "process", "gate": _PPO_CLIP, "aggregation": "sequence_mean"},
        source="DeepSeekMath, arXiv 2402.03300, section 4.1.3: process supervision",
        differences=(_KL_OF_EQUATION_3,),
    ),
    "raft": Preset(
        sets={"credit": "raft", **_PLAIN},
        source="arXiv 2304.06767, algorithm 1: the likelihood of the best",
        differences=(
            (
                "The best of a group are trained in the same step; the paper collects them over prompts and fine-tunes "
                "until convergence."
            ),
        ),
    ),
    "raft_plus_plus": Preset(
        sets={"credit": "raft_plus_plus", "gate": _PPO_CLIP, "aggregation": "sequence_mean"},
        source="arXiv 2504.11343, section 2",
        differences=(),
    ),
    "topr": Preset(
        sets={
            "credit": "topr",
            "ratio": "product",
            "gate": "topr",
            "correction": "none",
            "aggregation": "sequence_sum",
        },
        source="arXiv 2503.14286, equations 7 and 8",
        differences=('Its authors\' experiments divide by lengths: aggregation = "sequence_mean".',),
    ),
}
"""Presets by name. Keys that a preset leaves out keep their defaults. A paper that only defines a credit rule
(pass_at_k; gdpo, which needs weights from the recipe) has no preset: its rule combines with any preset."""

ALGORITHMS: Mapping[str, Mapping[str, Any]] = {name: preset.sets for name, preset in PRESETS.items()}
"""Keys and values that each preset sets."""
