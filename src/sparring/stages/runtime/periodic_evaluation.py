"""Evaluation during an online stage: `[eval] every`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from sparring.errors import EvaluationFailed, refusal
from sparring.observe.evaluation import Evaluation
from sparring.observe.statistics import Estimate
from sparring.protocols import EnvFactory, Scorer
from sparring.recipe.run_config import RunConfig
from sparring.rollout.evaluate import EvalPlan, ScoredRunner
from sparring.rollout.evaluator import Evaluator
from sparring.rollout.load import EvalShare
from sparring.rollout.metrics import Warnings
from sparring.rollout.runner import RolloutRunner
from sparring.stages.context import ONLINE_STAGES, Context
from sparring.stages.runtime.evaluation import check_lost, held_out


@asynccontextmanager
async def periodic_evaluator(
    runner: RolloutRunner,
    context: Context,
    judges: Sequence[Scorer],
    *,
    share: EvalShare,
    stage: str,
    done: int,
    trained: int,
) -> AsyncIterator[Evaluator]:
    """Open the evaluator of a stage. The end of the context waits for the last evaluation; an error cancels it.

    Results are recorded as `<stage>/eval`, under the step whose weights were served when the evaluation began.

    Args:
        share: share of the rollouts in flight.
        done: steps of the last checkpoint.
        trained: last step that is trained again unchanged; results of later steps are discarded.
    """
    config, eval_stage, every = context.config, f"{stage}/eval", context.config.eval.every
    tasks = held_out(config, context.factory, config.eval.every_tasks, "eval.every_tasks") if every else ()
    context.store.truncate(eval_stage, trained)
    finished = {step for step, _ in context.store.metrics(eval_stage, after=done - 1)}
    warnings = Warnings(partial(context.sink.event, eval_stage), "")
    evaluator = Evaluator(
        ScoredRunner(runner, judges),
        EvalPlan(tasks=tasks, run_seed=config.run.seed, stage=eval_stage, max_context=runner.max_context),
        every=every,
        share=share,
        store=context.store,
        on_result=lambda step, result: _log_result(context, eval_stage, step, result, warnings),
        left_out=lambda step, other: context.sink.event(
            eval_stage,
            f"none after step {step}: the one after step {other} goes on; a higher eval.every leaves none out",
        ),
        finished=finished,
    )
    async with evaluator:
        if done:
            evaluator.after(done)  # it may have been due when the process before stopped
        yield evaluator
        await evaluator.finish()


def check_beside(config: RunConfig, factory: EnvFactory) -> list[str]:
    """Refuse `[eval] every` without an online stage, with too few held-out tasks, or if updates would wait for it;
    return a sentence on the tasks and their interval, if the run evaluates during training."""
    if not config.eval.every:
        return []
    if not set(ONLINE_STAGES) & set(config.run.stages):
        expected = f"0 without a stage beside which it evaluates ({', '.join(ONLINE_STAGES)})"
        raise refusal("eval.every", expected, str(config.eval.every), "leave it out")
    if config.engine.update.live_kv == "drain":
        actual = f'{config.eval.every}, with engine.update.live_kv = "drain"'
        fix = 'set engine.update.live_kv to "keep" or "recompute", or leave eval.every out'
        raise refusal("eval.every", "0 where an update waits for every request, evaluation's too", actual, fix)
    tasks = len(held_out(config, factory, config.eval.every_tasks, "eval.every_tasks"))
    return [f"eval: {tasks} held-out tasks after every {config.eval.every} steps, beside training"]


def figures(result: Evaluation) -> dict[str, float]:
    """Return a result as metrics, without unknown values: `success` and `reward` with `_low`, `_high` and `_error`,
    `success/<tag>`, `reward/<role>`, tasks, lost rollouts, turns, shortfalls and the range of versions."""
    values: dict[str, float | None] = {**_spread("success", result.success), **_spread("reward", result.reward)}
    values |= {f"success/{tag}": estimate.value for tag, estimate in result.by_tag.items()}
    values |= {f"reward/{role}": estimate.value for role, estimate in result.by_role.items()}
    low, high = result.versions or (None, None)
    values |= {"turns": result.mean_turns, "tasks": len(result.tasks), "lost": len(result.lost)}
    values |= {"version_low": low, "version_high": high}
    values |= result.shortfalls
    return {name: float(value) for name, value in values.items() if value is not None}


def _spread(name: str, estimate: Estimate) -> dict[str, float | None]:
    low, high = estimate.interval or (None, None)
    return {name: estimate.value, f"{name}_low": low, f"{name}_high": high, f"{name}_error": estimate.standard_error}


def _log_result(context: Context, eval_stage: str, step: int, result: Evaluation, warnings: Warnings) -> None:
    """Record and report a result. A failed evaluation is reported in a sentence, and training continues."""
    try:
        check_lost(result, context.config.eval.max_lost, f"after step {step}")
    except EvaluationFailed as failed:
        context.sink.event(eval_stage, str(failed))
        return
    values = figures(result)
    context.store.metric(eval_stage, step, values)
    context.sink.log(eval_stage, step, values)
    context.sink.event(eval_stage, f"after step {step}: {_sentence(result)}")
    warnings.look(result.shortfalls)


def _sentence(result: Evaluation) -> str:
    estimate, text = (result.success, "{:.1%}") if result.success.tasks else (result.reward, "{:.4g}")
    name = "solved" if result.success.tasks else "mean reward"
    low, high = estimate.interval or (estimate.value, estimate.value)
    of = (
        "{} {} ({} to {})".format(name, *(text.format(x) for x in (estimate.value, low, high)))
        if estimate.tasks
        else "nothing scored"
    )
    low, high = result.versions or (0, 0)
    return f"{of} of {len(result.tasks)} tasks, weights of version {low}{'' if low == high else f' to {high}'}"
