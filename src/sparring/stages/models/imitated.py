"""What the rl stage imitates beside its own objective: right answers, or what tools answered."""

from __future__ import annotations

from sparring.recipe.run_config import RunConfig
from sparring.errors import refusal


def imitation(config: RunConfig) -> float:
    """The scale of the imitate term; 0 where nothing is imitated."""
    right = config.algo.right_answers
    return config.rl.observations if right is None else right.coefficient


def check_imitation(config: RunConfig) -> list[str]:
    """The imitate term has one scale, and `[algo]` a part in the stage.

    Returns:
        What was found, one sentence each.

    Raises:
        BadInput: it is not so.
    """
    if config.algo.right_answers is None or "rl" not in config.run.stages:
        return []
    where, do = "algo.right_answers", "leave one of them out"
    if config.rl.preference is not None:
        raise refusal(where, "none with rl.preference, which replaces [algo]", "a table", do)
    if config.rl.observations:
        got = f"a table and {config.rl.observations:g}"
        raise refusal(where, "none with rl.observations, for one scale is all that the imitate term has", got, do)
    return [f"rl: right answers are imitated, times {config.algo.right_answers.coefficient:g}"]
