"""All checks before a run, the same as `sparring check`. No weights are trained.

Each check returns facts, one sentence each, and raises `BadInput` to refuse the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from sparring.errors import BadInput, refusal
from sparring.harness.by_environment import mounts_of
from sparring.model.outline import Outline
from sparring.observe.wait_reports import waiting
from sparring.protocols import Boxes, EnvFactory
from sparring.recipe.run_config import RunConfig
from sparring.rollout.window import check_window
from sparring.sandbox.check import check_sandbox
from sparring.stages.context import ORDER, POLICY, Context, RunFiles, given_checkpoint
from sparring.stages.data.contamination import check_unseen_files
from sparring.stages.data.demonstrations import Conversation
from sparring.stages.data.preferences import check_compared
from sparring.stages.models.annotators import writable
from sparring.stages.models.context_length import outline_of
from sparring.stages.models.objective import check_imitation, check_online
from sparring.stages.models.policy import check_model
from sparring.stages.models.teacher_format import check_unused
from sparring.stages.models.uses import USES, used_models
from sparring.stages.preflight.engine import check_engine, check_updates
from sparring.stages.preflight.environment import check_environment, check_repeats, check_shown, first_tasks
from sparring.stages.preflight.harness import check_files, check_images, players_of
from sparring.stages.preflight.memory import check_memory, shapes_of
from sparring.stages.preflight.metric_names import check_metrics
from sparring.stages.preflight.own_rules import check_own_rules
from sparring.stages.preflight.parts import check_parts
from sparring.stages.preflight.rendering import check_rendering
from sparring.stages.preflight.sizes import check_sizes
from sparring.stages.preflight.workers import Rehearsal
from sparring.stages.rl import correction_chosen
from sparring.stages.runtime.baselines import check_against
from sparring.stages.runtime.evaluation import held_out
from sparring.stages.runtime.periodic_evaluation import check_beside
from sparring.types import Task


async def check(context: Context, rehearsal: Rehearsal | None = None) -> list[str]:
    """Check that the run can work, cheapest checks first."""
    config, factory, start = context.config, context.factory, given_checkpoint(context.config)
    if start is not None:
        outline_of(start)
    shapes = shapes_of(config, start)
    shape = shapes[POLICY]
    facts = _check_recipe(context, shapes)
    for use in USES:
        facts += await use.ask(context)
    facts += _check_held_out(context, factory) + check_beside(config, factory)
    tasks = first_tasks(config, factory)
    check_repeats(config, factory, tasks)
    check_shown(config, factory)
    task = tasks[0]
    if task.box is not None or mounts_of(context.harness) is not None:
        check_sandbox(config.sandbox)
        facts.append(f"sandbox: {config.sandbox.bwrap} isolates a command on this machine")
        facts += check_files(config, context.harness)
        facts += await check_images(context.harness, factory, context.boxes, tasks)
    facts += await _check_programs(config, factory, context.boxes, tasks)
    environment_facts, played, demonstrated = await _play_tasks(context, tasks, rehearsal)
    about, compared = check_compared(config, factory)
    demonstrated += compared
    about += check_online(config) + check_imitation(config)
    with waiting("tasks and demonstrations as tokens"):
        facts += about + environment_facts + check_rendering(context, factory, shape, tasks, demonstrated, played)
    return facts + check_model(context, shape) + check_updates(config)


def _check_recipe(context: Context, shapes: Mapping[str, Outline]) -> list[str]:
    config, shape = context.config, shapes[POLICY]
    checks: tuple[Callable[[], list[str]], ...] = (
        *(partial(each, config) for each in (_check_stages, check_metrics, check_unused_settings, _check_sampling)),
        *(partial(use.check, context) for use in USES),
        *(partial(each, config, shape) for each in (check_sizes, check_engine, _check_algo)),
        partial(check_memory, context, shapes),
        context.cluster.check,
    )
    facts, refused = list[str](), dict[str, BadInput]()
    for part in checks:
        try:
            facts += part()
        except BadInput as error:
            refused.setdefault(str(error), error)
    if refused:
        raise BadInput("\n".join(refused), next(iter(refused.values())).where)
    return facts


def _check_algo(config: RunConfig, shape: Outline) -> list[str]:
    facts, stages = list[str](), {"rl", "distill"} & set(config.run.stages)
    if "rl" in stages and config.rl.preference is None:
        config.algo.check(config.rollout.group_size, writable())
        facts += check_own_rules(config.algo, config.rollout.group_size)
    for stage in stages:
        # distillation compares no rollouts, so a group may have a single one
        alone = msgspec.structs.replace(config.rollout, group_size=max(2, config.rollout.group_size))
        check_window(
            config.rollout if stage == "rl" else alone,
            groups_per_step=config.rl.groups_per_step if stage == "rl" else config.distill.groups_per_step,
            engine_tokens=config.engine.kv.tokens or None,
            rollout_tokens=shape.max_positions,
        )
    return facts + (["rollouts: the window cannot deadlock", correction_chosen(config)] if "rl" in stages else [])


async def _play_tasks(
    context: Context, tasks: Sequence[Task], rehearsal: Rehearsal | None
) -> tuple[list[str], list[Conversation], list[Conversation]]:
    facts, played, demonstrated = await check_environment(context, tasks, rehearsal)
    rendered = given_checkpoint(context.config) is not None
    facts += players_of(context.config, played, rehearsal, rendered=rendered) + check_parts(context.config, played)
    return facts, played, demonstrated


async def _check_programs(config: RunConfig, factory: EnvFactory, boxes: Boxes, tasks: Sequence[Task]) -> list[str]:
    if not config.sandbox.enabled and any(task.box is not None for task in tasks):
        return []
    proven, rows = await factory.prove(boxes)
    return [f"env: {proven} of {rows} rows have a right program, which passes their tests"] if proven else []


def _check_stages(config: RunConfig) -> list[str]:
    stages, start = config.run.stages, given_checkpoint(config)
    if list(stages) != sorted(stages, key=ORDER.index):
        order = " -> ".join(sorted(stages, key=ORDER.index))
        raise refusal("run.stages", order, " -> ".join(stages), "write them in this order")
    if "init" not in stages and start is None:
        raise refusal(
            "run.stages", "`init` first", str(list(stages)), "add it, or give a checkpoint: models.policy.path"
        )
    checkpoints = config.eval.checkpoints
    if "eval" in stages and not set(checkpoints) & set(stages):
        raise refusal(
            "eval.checkpoints", f"one of the run's stages {list(stages)}", str(list(checkpoints)), "add one of these"
        )
    return [f"stages: {' -> '.join(stages)}"]


def check_unused_settings(config: RunConfig) -> list[str]:
    """Refuse unused chat format settings of models that read the policy's own tokens in the rl stage."""
    used = used_models(config, "rl") if "rl" in config.run.stages else []
    reading = {one.model for one in used if one.kind != "engine"}
    for name in sorted(reading & config.models.keys() - {POLICY}):
        check_unused(config, name)
    return []


def _check_sampling(config: RunConfig) -> list[str]:
    if not {"rl", "distill"} & set(config.run.stages):
        return []
    greedy = (("temperature", 0, "above 0", "raise"), ("top_k", 1, "0, or 2 and more,", "raise"))
    for key, value, expected, fix in (*greedy, ("min_p", 1, "below 1", "lower")):
        if (actual := getattr(config.rollout.sampling, key)) == value:
            why = f"{fix} it: the greedy rollouts of a task are all the same"
            raise refusal(f"rollout.sampling.{key}", f"{expected} while the run trains", f"{actual:g}", why)
    return []


def _check_held_out(files: RunFiles, factory: EnvFactory) -> list[str]:
    config = files.config
    if "eval" not in config.run.stages:
        if config.eval.against:
            fix = "add it, or leave eval.against out"
            raise refusal("eval.against", "a stage eval, to compare its result", str(list(config.run.stages)), fix)
        return []
    tasks = held_out(config, factory, config.eval.tasks)
    check_unseen_files(config, tasks)
    there = len(tasks)
    if config.eval.no_tool_tasks > there:
        few = f"at most {there}, the tasks of the evaluation"
        raise refusal("eval.no_tool_tasks", few, str(config.eval.no_tool_tasks), "lower it")
    return [f"eval: {there} held-out tasks", *check_against(files, tasks)]
