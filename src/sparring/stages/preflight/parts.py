"""Check of a credit rule that reads named parts of the score: the environment reports them."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.algo.base import name_of
from sparring.errors import refusal
from sparring.recipe.run_config import RunConfig
from sparring.rollout.scorers.reward_scorer import PART
from sparring.stages.data.demonstrations import Conversation

WHERE = "algo.credit.weights"


def check_parts(config: RunConfig, played: Sequence[Conversation]) -> list[str]:
    """Refuse parts that no rubric has, and an environment whose scores have no parts. Return a sentence that names
    parts which did not occur in the `played` scores, though later ones may have them."""
    wanted = config.algo.credit.parts_read
    if "rl" not in config.run.stages or config.rl.preference is not None or not wanted:
        return []
    reported = {name_of(rule) for rule in config.algo.shaping} | ({PART} if config.rl.reward_model else set())
    environments = config.environments.values()
    reported |= {name for environment in environments for name in environment.rubric}
    scores = [conversation.score for conversation in played if conversation.score is not None]
    reported |= {name for score in scores for name in score.parts}
    missing = [name for name in wanted if name not in reported]
    if not missing:
        return []
    if all(environment.rubric for environment in environments):
        fix = "correct it, or add the part to the rubric"
        raise refusal(WHERE, f"parts of the score: {', '.join(sorted(reported))}", repr(missing[0]), fix)
    credit = repr(name_of(config.algo.credit))
    if scores and not reported:
        fix = "have the environment report them, of an empty answer too, or choose 'grpo'"
        raise refusal(WHERE, f"an environment whose scores have parts, with credit {credit}", "none of a task", fix)
    names = ", ".join(missing)
    return [f"{WHERE}: no task that was played reported {names}; a part that a whole group lacks counts for none of it"]
