"""Evaluation of weights on held-out tasks, for the eval stage, evaluation during training and `sparring eval`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from sparring.errors import EvaluationFailed, refusal
from sparring.observe.evaluation import Evaluation
from sparring.protocols import Engine, EnvFactory
from sparring.recipe.run_config import RunConfig
from sparring.rollout.evaluate import EvalPlan, Finding, ScoredRunner, evaluate, recorded, summarize
from sparring.rollout.metrics import Warnings
from sparring.stages.context import POLICY, Context
from sparring.stages.models.context_length import policy_context
from sparring.stages.models.player import open_role_engines
from sparring.stages.models.reward_model import scorers
from sparring.stages.runtime.rollouts import rollout_runner
from sparring.types import Task


def held_out(config: RunConfig, factory: EnvFactory, count: int, key: str = "eval.tasks") -> list[Task]:
    """Return the first `count` tasks of the environment's evaluation split; 0: all.

    Raises:
        BadInput: the split has fewer tasks.
    """
    source = factory.tasks("eval", config.run.seed)
    tasks: list[Task] = []
    while (not count or len(tasks) < count) and (task := source.next()) is not None:
        tasks.append(task)
    if len(tasks) < max(1, count):
        raise refusal(key, f"at most {len(tasks)}, the held-out tasks", str(count), "lower it, or raise env.held_out")
    return tasks


async def evaluate_folder(context: Context, folder: str, plan: EvalPlan, model: str = POLICY) -> Evaluation:
    """Evaluate a checkpoint folder of `model`. Recorded rollouts are not run again."""
    models = {**context.config.models, POLICY: context.config.models[model]}
    played = replace(context, config=msgspec.structs.replace(context.config, models=models))
    plan = replace(plan, max_context=policy_context(played.config, Path(folder)))
    findings = recorded(plan, context.store)
    if len(findings) < len(plan):
        engine = context.cluster.engine(model, path=folder)
        others = open_role_engines(context.config, context.cluster)
        try:
            findings = await _sample_missing(played, engine, Path(folder), plan, others)
        finally:
            for opened in (engine, *others.values()):
                await opened.close()
    result = summarize(plan, findings, context.config.eval.ks)
    check_lost(result, context.config.eval.max_lost, plan.stage)
    Warnings(partial(context.sink.event, plan.stage.replace("/", " ")), "").look(result.shortfalls)
    return result


def check_lost(result: Evaluation, most: float, name: str) -> None:
    """Check that few enough rollouts were lost.

    Raises:
        EvaluationFailed: infrastructure or judge broke too many rollouts; the message names some.
    """
    if result.lost_share <= most:
        return
    some = "; ".join(f"{lost.rollout} ({lost.failure})" for lost in result.lost[:3])
    raise EvaluationFailed(
        f"{name}: expected at most {most:.1%} of rollouts broken by infrastructure or judge (eval.max_lost), got "
        f"{len(result.lost)} of {result.rollouts}: {some}{'; ...' if len(result.lost) > 3 else ''}; "
        "the same command runs only these again"
    )


async def _sample_missing(
    context: Context, engine: Engine, folder: Path, plan: EvalPlan, others: Mapping[str, Engine]
) -> dict[int, Finding]:
    name = plan.stage.replace("/", " ")
    successes = ended = 0

    def done(number: int, finding: Finding) -> None:
        nonlocal successes, ended
        successes, ended = successes + bool(finding.success), ended + 1
        context.sink.log(name, number, {"rollout/success": successes / ended})

    context.sink.start(name, len(plan), context.config.eval.max_concurrent_rollouts)
    return await evaluate(
        ScoredRunner(rollout_runner(context, engine, folder, others), scorers(context)),
        plan,
        store=context.store,
        max_concurrent_rollouts=context.config.eval.max_concurrent_rollouts,
        done=done,
    )
