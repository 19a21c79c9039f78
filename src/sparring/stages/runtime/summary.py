"""`summary.json`: figures of a run, for people, the report and other runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sparring.observe.atomic_write import write_whole
from sparring.observe.evaluation import Comparison, Evaluation, compare, narrowed, retained_share
from sparring.observe.statistics import Estimate
from sparring.protocols import EnvFactory, Store
from sparring.stages.context import ONLINE_STAGES, Context, RunFiles
from sparring.stages.runtime.baselines import last_evaluated, stored_baselines
from sparring.stages.runtime.resource_usage import peak_rss, wall_s
from sparring.stages.runtime.step_extension import raises_key

EVALUATED = ("init", "sft", "preference", "rl", "distill")
"""Stages with weights to evaluate."""


def write_summary(context: Context) -> dict[str, Any]:
    """Write `<run>/summary.json` from the stages' results, and return it. Rates are numbers from 0 to 1."""
    results = context.done("eval") or {}
    rl = context.done("distill") or context.done("rl") or {}
    account = rl.get("account", {})
    supervised = context.done("preference") or context.done("sft") or {}
    last = last_evaluated(results) or {}
    rates = {name: _overall(results.get(name)) for name in EVALUATED}
    held_out = {stage: (context.done(stage) or {}).get("held_out") for stage in ("preference", "reward_model")}
    summary = {
        "name": context.config.run.name,
        **{
            f"{name}_success{end}": rate[key]
            for name, rate in rates.items()
            for end, key in (("", "success"), ("_low", "low"), ("_high", "high"))
        },
        "no_tool_success": _overall(results.get("no_tool"))["success"],
        "eval_tasks": max(rate["tasks"] for rate in rates.values()),
        "held_out": {stage: figures for stage, figures in held_out.items() if figures is not None},
        "turns_successful": last.get("mean_turns_successful"),
        "change": _change(results),
        "by_dataset": _by_dataset(context.factory, results),
        "teachers": _teachers(results),
        "against": _against(context, last),
        "logprob_max_abs_diff": rl.get("logprob_max_abs_diff"),
        "correction": context.config.algo.correction_rule.in_words(),
        "tokens_sampled": account.get("sampled"),
        "tokens_trained": account.get("trained", supervised.get("tokens_trained")),
        "tokens": account,
        "lag_max": rl.get("lag_max"),
        "best": _of_stages(context, "best"),
        "ended_early": _of_stages(context, "ended_early"),
        "raised": {stage: raises for stage in ONLINE_STAGES if (raises := _raises(context.store, stage))},
        "overlap_share": rl["overlap_s"] / rl["step_s"] if rl.get("step_s") else None,
        "wall_s": {stage: wall_s(context.store, stage) for stage in context.config.run.stages},
        "peak_rss_bytes": peak_rss(context.store),
    }
    write_whole(context.folder / "summary.json", msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return summary


def _of_stages(files: RunFiles, key: str) -> dict[str, Any]:
    results = {stage: files.done(stage) or {} for stage in files.config.run.stages}
    return {stage: result[key] for stage, result in results.items() if key in result}


def _raises(store: Store, stage: str) -> list[dict[str, int]]:
    raises = store.get(raises_key(stage)) or ()
    return [{key: each[key] for key in ("before", "steps")} for each in raises]


def _overall(result: Mapping[str, Any] | None) -> dict[str, Any]:
    return _rate(result["success"]) if result else {"success": None, "low": None, "high": None, "tasks": 0}


def _rate(rate: Mapping[str, Any]) -> dict[str, Any]:
    low, high = rate["interval"] or (None, None)
    return {"success": rate["value"], "low": low, "high": high, "tasks": rate["tasks"]}


def _teachers(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the success of each evaluated teacher on its tasks, and the student's share of that success on the same
    tasks."""
    by_teacher = {}
    for label, result in results.items():
        if label.startswith("teacher/"):
            teacher, student = (msgspec.convert(one, Evaluation) for one in (result, results["distill"]))
            share = _interval("kept", retained_share(teacher, student))
            by_teacher[label.removeprefix("teacher/")] = {**_rate(result["success"]), **share}
    return by_teacher


def _change(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """Compare the last evaluation of a stage with the first, over the tasks that both scored; None for a single
    evaluation."""
    stages = [name for name in EVALUATED if results.get(name)]
    if len(stages) < 2:
        return None
    before, after = (msgspec.convert(results[name], Evaluation) for name in (stages[0], stages[-1]))
    compared = compare(before, after)
    return {"before": stages[0], "after": stages[-1], **_difference(compared)}


def _difference(compared: Comparison) -> dict[str, Any]:
    """Return the change of a comparison's figure, with its interval and the number of tasks that both scored."""
    change = compared.changes[compared.figure]
    return {"figure": compared.figure, **_interval("difference", change), "tasks": change.tasks}


def _interval(name: str, estimate: Estimate) -> dict[str, Any]:
    low, high = estimate.interval or (None, None)
    return {name: estimate.value, f"{name}_low": low, f"{name}_high": high}


def _against(files: RunFiles, last: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the last evaluation with the results of `[eval] against`, over the tasks that both scored.

    Returns:
        By name: success of the other run (reward, if the environment reports no success), our difference task by task,
        the other run's success by dataset, and the tokens that its last stage trained.
    """
    if not last:
        return {}
    by_name, own = {}, msgspec.convert(last, Evaluation)
    for name, other in stored_baselines(files).items():
        compared = compare(other.evaluation, own)
        baseline = narrowed(other.evaluation, own)
        by_name[name] = {
            **_difference(compared),
            "value": getattr(baseline, compared.figure).value,
            "left_out": len(compared.left_out),
            "by_dataset": {tag: rate.value for tag, rate in baseline.by_tag.items()},
            "tokens_trained": other.tokens_trained,
        }
    return by_name


def _by_dataset(factory: EnvFactory, results: Mapping[str, Any]) -> dict[str, Any]:
    by_stage = {name: (results.get(name) or {}).get("by_tag", {}) for name in EVALUATED}
    coverage = getattr(factory, "coverage", {})
    return {
        tag: {
            "coverage": coverage.get(tag),
            **{name: tags[tag]["value"] if tag in tags else None for name, tags in by_stage.items()},
            "intervals": {name: tags[tag]["interval"] if tag in tags else None for name, tags in by_stage.items()},
            "tasks": max(tags[tag]["tasks"] for tags in by_stage.values() if tag in tags),
        }
        for tag in sorted(set().union(*by_stage.values()))
    }
