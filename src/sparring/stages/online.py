"""Online preference optimisation: what the reinforcement-learning stage needs beside its credit and its loss."""

from __future__ import annotations

from sparring.algo.credit.load import load_credit
from sparring.algo.credit.pairs import Pairs
from sparring.algo.loss.preference.config import WITHOUT_REFERENCE
from sparring.errors import refusal
from sparring.protocols import Credit
from sparring.stages.context import Context


def credit_chosen(context: Context) -> Credit:
    """What turns scores into something to learn: `[algo]`, or pairs where `[rl] preference` asks for them."""
    config, longest = context.config, context.config.rollout.max_turn_tokens
    return load_credit(config.algo, seed=config.run.seed, max_tokens=longest) if config.rl.preference is None else Pairs()


def check_online(context: Context) -> list[str]:
    """Rollouts can be compared as `[rl] preference` asks.

    Returns:
        What was found, one sentence each.

    Raises:
        BadInput: they cannot.
    """
    config = context.config
    if config.rl.preference is None or "rl" not in config.run.stages:
        return []
    if config.rollout.group_size < 2:
        got, do = str(config.rollout.group_size), "raise it: a rollout is preferred to another of its group"
        raise refusal("rollout.group_size", "at least 2 rollouts to compare", got, do)
    sampling = config.rollout.sampling()
    truncates = sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0 or sampling.constraint is not None
    if truncates and not isinstance(config.rl.preference, WITHOUT_REFERENCE):
        got, do = "truncated or constrained sampling", "sample from the whole vocabulary, or choose simpo"
        raise refusal("[rollout]", "rollouts whose tokens the reference of rl.preference can judge", got, do)
    return ["rl: the best rollout of each group against its worst"]
