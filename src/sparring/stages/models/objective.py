"""The objective of the rl stage: `[algo]` or online preference optimisation, with an optional imitate term."""

from __future__ import annotations

from sparring.algo.credit.pairs import Pairs
from sparring.algo.pipeline import load_credit
from sparring.errors import refusal
from sparring.protocols import Credit, Loss
from sparring.recipe.run_config import RunConfig


def credit_chosen(config: RunConfig) -> Credit:
    """Return the credit rule of the stage: pairs under `[rl] preference`, otherwise the rule of `[algo]`."""
    if config.rl.preference is not None:
        return Pairs()
    return load_credit(config.algo, seed=config.run.seed, max_tokens=config.rollout.sampling.max_turn_tokens)


def preference_loss(config: RunConfig) -> Loss | None:
    """Return the loss of `[rl] preference`, or None for a run without that table."""
    if config.rl.preference is None:
        return None
    from sparring.algo.preference import load_preference

    return load_preference(config.rl.preference)


def needs_reference(config: RunConfig) -> bool:
    """Return whether the loss compares the policy with a reference model."""
    if config.rl.preference is None:
        return config.algo.needs_reference
    return config.rl.preference.has_reference


def check_online(config: RunConfig) -> list[str]:
    """Refuse `[rl] preference` together with settings that it replaces, or with groups of one rollout."""
    if config.rl.preference is None or "rl" not in config.run.stages:
        return []
    if config.algo.needs_reference or config.algo.entropy_bonus:
        raise refusal(
            "[algo]", "neither kl nor entropy_bonus with rl.preference, which replaces it", "one", "leave it out"
        )
    if config.rollout.group_size < 2:
        actual, fix = str(config.rollout.group_size), "raise it: rl.preference compares rollouts of one group"
        raise refusal("rollout.group_size", "at least 2 rollouts to compare", actual, fix)
    return ["rl: the best rollout of each group against its worst"]


def imitation_scale(config: RunConfig) -> float:
    """Return the scale of the imitate term; 0 imitates no tokens."""
    right = config.algo.right_answers
    return config.rl.observations if right is None else right.coefficient


def check_imitation(config: RunConfig) -> list[str]:
    """Refuse `algo.right_answers` with `rl.preference`, or with `rl.observations`, which scales imitation too."""
    if config.algo.right_answers is None or "rl" not in config.run.stages:
        return []
    where, fix = "algo.right_answers", "leave one of them out"
    if config.rl.preference is not None:
        raise refusal(where, "none with rl.preference, which replaces [algo]", "a table", fix)
    if config.rl.observations:
        actual = f"a table and {config.rl.observations:g}"
        raise refusal(where, "none with rl.observations, because both set the scale of the imitate term", actual, fix)
    return [f"rl: right answers are imitated, times {config.algo.right_answers.coefficient:g}"]
