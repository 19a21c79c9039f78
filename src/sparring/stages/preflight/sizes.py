"""Check of sizes: the model has room for a turn, and memory for the record of a group and a step."""

from __future__ import annotations

from sparring.errors import refusal
from sparring.model.outline import Outline
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import ONLINE_STAGES
from sparring.stages.preflight.machine import machine_memory
from sparring.stages.preflight.memory import GIB

ROLLOUT, TOKEN = 2048, 16
"""Bytes of a recorded rollout of one turn, and of each token with its text and log-probability; measured, and less than
a step takes."""


def check_sizes(config: RunConfig, shape: Outline) -> list[str]:
    """Refuse turns longer than the model's context, and groups or steps whose record alone fills the memory.

    Returns:
        Warnings; `run.memory = "warn"` only warns of memory.
    """
    rollout = config.rollout
    if (
        rollout.sampling.max_turn_tokens > shape.max_positions
        and rollout.sampling.max_turn_tokens != type(rollout.sampling)().max_turn_tokens
    ):
        expected = f"at most {shape.max_positions}, the positions of the model"
        do = "lower it: a turn ends with the context anyway"
        raise refusal("rollout.sampling.max_turn_tokens", expected, str(rollout.sampling.max_turn_tokens), do)
    here, warnings = machine_memory(), []
    for stage in ONLINE_STAGES:
        if stage not in config.run.stages:
            continue
        groups = getattr(config, stage).groups_per_step
        group = record_bytes(config, shape, groups=1, lag=0)
        step = record_bytes(config, shape, groups=groups, lag=rollout.max_lag)
        if step <= here:
            continue
        many = group > here
        key = "rollout.group_size" if many else f"{stage}.groups_per_step"
        size = group if many else step
        what = f"{rollout.group_size} rollouts" if many else f"{groups} groups of {rollout.group_size} rollouts"
        at_once = "" if many or not rollout.max_lag else f", of {rollout.max_lag + 1} steps at once"
        expected = f"rollouts whose record fits into the {here / GIB:.1f} GiB of this machine"
        got = f"{what}{at_once}, which take {size / GIB:,.1f} GiB or more"
        do = f"lower {key}" + ("" if many else ", rollout.group_size or env.limits.max_tokens")
        if config.run.memory == "refuse":
            raise refusal(key, expected, got, f'{do}; or set run.memory = "warn" to begin all the same')
        warnings.append(f"{key}: warning: expected {expected}, got {got}; {do}")
    return warnings


def record_bytes(config: RunConfig, shape: Outline, *, groups: int, lag: int) -> int:
    """Return the bytes of the record of `groups` groups for one step and for each of `lag` further steps, if every
    rollout samples its maximum number of tokens."""
    rollout = config.rollout
    limits = [environment.limits for environment in config.environments.values()]
    sampled = max(min(each.max_tokens, each.max_turns * rollout.sampling.max_turn_tokens) for each in limits)
    tokens = min(sampled, shape.max_positions)
    return groups * (lag + 1) * rollout.group_size * (ROLLOUT + TOKEN * tokens)
