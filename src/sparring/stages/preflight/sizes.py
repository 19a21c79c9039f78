"""Check of sizes: the model has room for a turn, and memory for the record of a group and a step."""

from __future__ import annotations

from sparring.errors import refusal
from sparring.model.outline import Outline
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import ONLINE_STAGES
from sparring.stages.preflight.machine import machine_memory
from sparring.stages.preflight.memory import GIB

ROLLOUT, TOKEN = 2048, 16
"""Bytes of a recorded rollout of one turn, and of each token with its text and log-probability. Measured; a step takes
more."""


def check_sizes(config: RunConfig, shape: Outline) -> list[str]:
    """Refuse turns longer than the model's context, and groups or steps whose record alone fills the memory.

    Returns:
        Warnings; `run.memory = "warn"` only warns of memory.
    """
    rollout, here, warnings = config.rollout, machine_memory(), list[str]()
    longest = rollout.sampling.max_turn_tokens
    if longest > shape.max_positions and longest != type(rollout.sampling)().max_turn_tokens:
        expected = f"at most {shape.max_positions}, the positions of the model"
        remedy = "lower it: a turn ends with the context anyway"
        raise refusal("rollout.sampling.max_turn_tokens", expected, str(longest), remedy)
    limits = [environment.limits for environment in config.environments.values()]
    sampled = max(min(each.max_tokens, each.max_turns * longest) for each in limits)
    group = rollout.group_size * (ROLLOUT + TOKEN * min(sampled, shape.max_positions))
    for stage in (one for one in ONLINE_STAGES if one in config.run.stages):
        groups = getattr(config, stage).groups_per_step
        step = group * groups * (rollout.max_lag + 1)
        if step <= here:
            continue
        if group > here:
            key, size, content, others = "rollout.group_size", group, f"{rollout.group_size} rollouts", ""
        else:
            content = f"{groups} groups of {rollout.group_size} rollouts"
            content += f", of {rollout.max_lag + 1} steps at once" if rollout.max_lag else ""
            key, size, others = f"{stage}.groups_per_step", step, ", rollout.group_size or env.limits.max_tokens"
        expected = f"rollouts whose record fits into the {here / GIB:.1f} GiB of this machine"
        actual, remedy = f"{content}, which take {size / GIB:,.1f} GiB or more", f"lower {key}{others}"
        if config.run.memory == "refuse":
            raise refusal(key, expected, actual, f'{remedy}; or set run.memory = "warn" to begin all the same')
        warnings.append(f"{key}: warning: expected {expected}, got {actual}; {remedy}")
    return warnings
