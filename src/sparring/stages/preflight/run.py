"""Preflight: everything that can be wrong is found here, not half an hour in. Trains nothing.

Each check returns what it found, one sentence each, and raises `BadInput` where a run would be refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sparring.errors import refusal
from sparring.harness.by_environment import mounts_of
from sparring.rollout.window import check_window
from sparring.sandbox.check import check_sandbox
from sparring.stages.context import ORDER, POLICY, Context
from sparring.stages.data.contamination import check_unseen_files
from sparring.stages.data.demonstrations import Conversation
from sparring.stages.data.preferences import check_compared
from sparring.stages.models.adapters import check_lora
from sparring.stages.models.context_length import outline_of
from sparring.stages.models.critic import check_critic
from sparring.stages.models.implicit_reward import check_implicit
from sparring.stages.models.objective import check_imitation, check_online
from sparring.stages.models.reference import check_reference
from sparring.stages.models.reward_scorers import check_reward_model
from sparring.stages.models.role_models import check_roles
from sparring.stages.models.teacher_format import check_read
from sparring.stages.models.teachers import check_collect, check_distill
from sparring.stages.preflight.engine import check_engine
from sparring.stages.preflight.environment import check_environment, check_repeats, check_shown, first_tasks
from sparring.stages.preflight.harness import check_files, players_of
from sparring.stages.preflight.judges import check_judges
from sparring.stages.preflight.memory import check_memory, shapes_of
from sparring.stages.preflight.metric_names import check_metrics
from sparring.stages.preflight.parts import check_parts
from sparring.stages.preflight.policy import check_model
from sparring.stages.preflight.rendering import check_rendering
from sparring.stages.preflight.sizes import check_sizes
from sparring.stages.preflight.teachers import check_teachers_answer
from sparring.stages.preflight.workers import Rehearsal
from sparring.stages.rl import ANNOTATIONS, correction_chosen
from sparring.stages.runtime.baselines import check_against
from sparring.stages.runtime.evaluation import held_out
from sparring.stages.runtime.periodic_evaluation import check_beside
from sparring.types import Task


async def check(context: Context, rehearsal: Rehearsal | None = None) -> list[str]:
    """Prove that the run can work, cheapest first.

    Args:
        rehearsal: who plays the rollouts of workers; None where the run has none.

    Raises:
        BadInput: the run would fail, and why.
    """
    config = context.config
    facts = _stages(context) + check_metrics(config)
    check_read(config)
    given = context.given()
    if given is not None:
        outline_of(given)
    shapes = shapes_of(config, given)
    shape = shapes[POLICY]
    facts += check_lora(context) + check_critic(context) + check_implicit(context)
    facts += check_reward_model(context, context.given()) + check_collect(context) + check_distill(context)
    facts += check_roles(context)
    facts += check_sizes(config, shape) + check_memory(context, shapes)
    _sampling(context)
    facts += check_engine(context, shape)
    if "rl" in config.run.stages:
        if config.rl.preference is None:
            config.algo.check(config.rollout.group_size, ANNOTATIONS)
        check_reference(context)
    for stage in {"rl", "distill"} & set(config.run.stages):
        # a teacher compares with nobody: a rollout may be alone in its group
        alone = msgspec.structs.replace(config.rollout, group_size=max(2, config.rollout.group_size))
        check_window(
            config.rollout if stage == "rl" else alone,
            groups_per_step=config.rl.groups_per_step if stage == "rl" else config.distill.groups_per_step,
            engine_tokens=config.engine.kv_tokens or None,
            rollout_tokens=shape.max_positions,
        )
    if "rl" in config.run.stages:
        facts += ["rollouts: the window cannot deadlock", correction_chosen(config)]
    facts += await check_judges(context) + await check_teachers_answer(context)
    facts += _held_out(context) + check_beside(context)
    tasks = first_tasks(context)
    check_repeats(context, tasks)
    check_shown(context)
    task = tasks[0]
    if task.box is not None or mounts_of(context.harness) is not None:
        check_sandbox(config.sandbox)
        facts += [f"sandbox: {config.sandbox.bwrap} isolates a command on this machine", *check_files(context)]
    facts += await _proven(context, tasks)
    environment_facts, held, shown = await _played(context, tasks, rehearsal)
    about, compared = check_compared(context)
    shown += compared
    about += check_online(config) + check_imitation(config)
    facts += about + environment_facts + check_rendering(context, shape, tasks, shown, held)
    return facts + check_model(context, shape)


async def _played(
    context: Context, tasks: Sequence[Task], rehearsal: Rehearsal | None
) -> tuple[list[str], list[Conversation], list[Conversation]]:
    """Play tasks of each environment. Return what was found, the conversations that were held and those to imitate."""
    facts, held, shown = await check_environment(context, tasks, rehearsal)
    rendered = context.given() is not None
    facts += players_of(context.config, held, rehearsal, rendered=rendered) + check_parts(context.config, held)
    return facts, held, shown


async def _proven(context: Context, tasks: Sequence[Task]) -> list[str]:
    if not context.config.sandbox.enabled and any(task.box is not None for task in tasks):
        return []
    proven, rows = await context.factory.prove(context.boxes)
    return [f"env: {proven} of {rows} rows have a right program, which passes their tests"] if proven else []


def _stages(context: Context) -> list[str]:
    stages, start = context.config.run.stages, context.given()
    if list(stages) != sorted(stages, key=ORDER.index):
        order = " -> ".join(sorted(stages, key=ORDER.index))
        raise refusal("run.stages", order, " -> ".join(stages), "write them in this order")
    if "init" not in stages and start is None:
        raise refusal(
            "run.stages", "`init` first", str(list(stages)), "add it, or give a checkpoint: models.policy.path"
        )
    checkpoints = context.config.eval.checkpoints
    if "eval" in stages and not set(checkpoints) & set(stages):
        raise refusal(
            "eval.checkpoints", f"one of the run's stages {list(stages)}", str(list(checkpoints)), "add one of these"
        )
    return [f"stages: {' -> '.join(stages)}"]


def _sampling(context: Context) -> None:
    if not {"rl", "distill"} & set(context.config.run.stages):
        return
    rollout = context.config.rollout
    if rollout.temperature == 0:
        raise refusal(
            "rollout.temperature",
            "above 0 while the run trains",
            "0",
            "raise it: the greedy rollouts of a task are all the same",
        )
    if rollout.top_k == 1:
        raise refusal(
            "rollout.top_k",
            "0, or 2 and more, while the run trains",
            "1",
            "raise it: the greedy rollouts of a task are all the same",
        )
    if rollout.min_p == 1:
        raise refusal(
            "rollout.min_p",
            "below 1 while the run trains",
            "1.0",
            "lower it: the greedy rollouts of a task are all the same",
        )


def _held_out(context: Context) -> list[str]:
    """Refuse an evaluation of more held-out tasks than there are, and files that train on them.

    Raises:
        BadInput: there are fewer, or one does.
    """
    config = context.config
    if "eval" not in config.run.stages:
        if config.eval.against:
            do = "add it, or leave eval.against out"
            raise refusal("eval.against", "a stage eval, to compare its result", str(list(config.run.stages)), do)
        return []
    tasks = held_out(context, config.eval.tasks)
    check_unseen_files(context, tasks)
    there = len(tasks)
    if config.eval.no_tool_tasks > there:
        few = f"at most {there}, the tasks of the evaluation"
        raise refusal("eval.no_tool_tasks", few, str(config.eval.no_tool_tasks), "lower it")
    return [f"eval: {there} held-out tasks", *check_against(context, tasks)]
