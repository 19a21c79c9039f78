"""Evaluations of a run for its page, with intervals, and compared with the first one of the same tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparring.errors import BadInput
from sparring.observe.evaluation import Evaluation, compare
from sparring.observe.results import RESULT, read_result
from sparring.observe.statistics import Estimate
from sparring.protocols import Store

OF_A_RUN = ("init", "sft", "preference", "rl", "distill", "no_tool")
"""Names of evaluations that a run's eval stage may record."""

FOLDERS = "evaluations"
"""Subfolder of a run with one folder per `sparring eval`."""


def evaluations(run_dir: Path, store: Store, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each evaluation: of the run's eval stage, of teachers, of compared runs, and of `sparring eval`.
    `run_dir` may also be the folder of one `sparring eval`. `config` is plain data."""
    recorded = list(_recorded_evaluations(run_dir, store, config))
    return [_row(name, evaluation, recorded[:place]) for place, (name, evaluation) in enumerate(recorded)]


def _recorded_evaluations(run_dir: Path, store: Store, config: Mapping[str, Any]) -> Iterator[tuple[str, Evaluation]]:
    teachers = sorted(set(config.get("distill", {}).get("teachers", {}).values()))
    names = {
        **{f"eval/{stage}": f"after {stage}" for stage in OF_A_RUN},
        "eval/no_tool": "after rl, tool host switched off",
        **{f"eval/teacher/{teacher}": f"teacher {teacher}, on what it teaches" for teacher in teachers},
        **{f"against/{run}": f"{run} ({path})" for run, path in config.get("eval", {}).get("against", {}).items()},
    }
    for key, name in names.items():
        if (recorded := store.get(key)) is not None:
            yield name, msgspec.convert(recorded.get("evaluation", recorded), Evaluation)
    for file in (run_dir / RESULT, *sorted((run_dir / FOLDERS).glob(f"*/{RESULT}"))):
        if file.is_file():
            evaluated = read_result(file)
            yield f"{evaluated.name} on {evaluated.environment}", evaluated.evaluation


def _row(name: str, evaluation: Evaluation, before: Sequence[tuple[str, Evaluation]]) -> dict[str, Any]:
    passes = [(f"pass@{k}", e) for k, e in evaluation.pass_at.items()] + [
        (f"pass^{k}", e) for k, e in evaluation.pass_hat.items()
    ]
    return {
        "name": name,
        "success": _figure(evaluation.success),
        "reward": _figure(evaluation.reward),
        "passes": [{"name": label, "figure": _figure(estimate)} for label, estimate in passes if label[5:] != "1"],
        "tasks": len(evaluation.tasks),
        "samples": evaluation.samples,
        "lost": len(evaluation.lost),
        "rollouts": evaluation.rollouts,
        "change": _change(evaluation, before),
    }


def _change(evaluation: Evaluation, before: Sequence[tuple[str, Evaluation]]) -> dict[str, Any] | None:
    for name, first in before:
        try:
            compared = compare(first, evaluation)
        except BadInput:
            continue
        return {"against": name, "of": compared.figure, "figure": _figure(compared.changes[compared.figure])}
    return None


def _figure(estimate: Estimate) -> list[float | None] | None:
    """Return the value, both ends of its interval, and its standard error."""
    if estimate.value is None:
        return None
    return [estimate.value, *(estimate.interval or (None, None)), estimate.standard_error]
