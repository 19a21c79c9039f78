"""Comparison of two runs: finds the first event, token or tensor that differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparring.errors import BadInput
from sparring.launch.checkpoint import recorded_run
from sparring.launch.resume import NO_DIFFERENCE, config_differences, in_words, is_among
from sparring.protocols import Store
from sparring.stages.context import ONLINE_STAGES, RunFiles, given_checkpoint
from sparring.store.compare import (
    Comparison,
    RecordDifference,
    RecordEnd,
    first_difference,
    first_group_difference,
    first_metric_difference,
)
from sparring.weights.compare import TensorDifference, first_tensor_difference, stored_tensors

OFFLINE = ("sft", "preference", "reward_model")
"""Stages that train on rows; their metrics are compared."""

NOT_COMPARED = (*NO_DIFFERENCE, "run.name", "run.directory", "run.after")
"""Settings that are not compared: what a resume may change, and a run's location."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRuns:
    """Result of a comparison: true if nothing differs, and the report in words."""

    equal: bool
    lines: list[str]


def compare_runs(left: Path, right: Path) -> ComparedRuns:
    """Compare two runs stage by stage, finished or not: recorded rollouts and steps, published weights, and written
    weights. Settings that differ are reported but do not count as a difference."""
    with recorded_run(left) as first, recorded_run(right) as second:
        runs = (first, second)
        differences = config_differences(first.config, second.config).items()
        settings = in_words({path: values for path, values in differences if not is_among(path, NOT_COMPARED)})
        lines = [f"settings that differ: {', '.join(settings)}"] if settings else []
        equal: list[str] = []
        for stage, comparison in _comparisons(*runs):
            if comparison is not None:
                lines += [f"the same: {', '.join(equal)}"] if equal else []
                return ComparedRuns(equal=False, lines=[*lines, *_in_words(runs, stage, comparison)])
            equal.append(stage)
    lines.append(f"the same: {', '.join(equal)}" if equal else "nothing is recorded in either")
    return ComparedRuns(equal=True, lines=lines)


def _comparisons(left: RunFiles, right: RunFiles) -> Iterator[tuple[str, Comparison]]:
    """Yield the comparisons of records and of weights, stage by stage, up to the first difference."""
    start, other = _start(left), _start(right)
    if start is not None and other is not None:
        yield "the weights at the start", _weights_difference("start", start, other)
    stages = (left.config.run.stages, right.config.run.stages)
    for stage in [*stages[0], *(stage for stage in stages[1] if stage not in stages[0])]:
        if any(stage not in named for named in stages):
            values = tuple("in the recipe" if stage in named else "not in the recipe" for named in stages)
            yield stage, RecordDifference(where="run.stages", what=stage, values=(values[0], values[1]))
        for comparison in _of_stage(left, right, stage):
            if comparison is not None:
                yield stage, comparison
        done = tuple(run.done(stage) is not None for run in (left, right))
        if done[0] != done[1]:
            yield stage, RecordEnd(record=done.index(False), after="its last recorded step")
        if not any(done):
            if left.store.metrics(stage) or next(iter(left.store.groups(stage=stage)), None) is not None:
                yield stage, None
            return
        place = stage if stage == "export" else f"{stage}/model"
        yield stage, _weights_difference(stage, left.folder / place, right.folder / place)


def _of_stage(left: RunFiles, right: RunFiles, stage: str) -> Iterator[Comparison]:
    stores = (left.store, right.store)
    if stage in ONLINE_STAGES:
        yield first_difference(*stores, stage, getattr(left.config, stage).groups_per_step)
        steps = {step for store in stores for step, _ in store.metrics(f"{stage}/eval")}
        yield from (first_group_difference(*stores, f"{stage}/eval/{step}") for step in sorted(steps))
    elif stage in OFFLINE:
        yield first_metric_difference(*stores, stage)
    elif stage == "collect":
        yield _traces_difference(*stores)
    elif stage == "eval":
        teachers = (f"teacher/{name}" for name in sorted(set(left.config.distill.teachers.values())))
        labels = (f"eval/{label}" for label in (*left.config.eval.checkpoints, *teachers, "no_tool"))
        yield from (first_group_difference(*stores, label) for label in ("eval", *labels))


def _traces_difference(left: Store, right: Store) -> Comparison:
    number = 0
    while True:
        first, second = (store.get(f"collect/{number}") for store in (left, right))
        if first is None and second is None:
            return None
        if first is None or second is None:
            return RecordEnd(record=0 if first is None else 1, after=f"trace {number - 1}" if number else "the start")
        if first != second:
            parts = [key for key in first.keys() | second.keys() if first.get(key) != second.get(key)]
            key = min(parts)
            values = (repr(first.get(key))[:160], repr(second.get(key))[:160])
            return RecordDifference(where=f"collect, trace {number}", what=key, values=values)
        number += 1


def _start(run: RunFiles) -> Path | None:
    """Return the folder of the checkpoint that a run started from; None if the run made its own model, or if the folder
    is gone."""
    with suppress(BadInput):
        return given_checkpoint(run.config)
    return None


def _weights_difference(stage: str, left: Path, right: Path) -> Comparison:
    """Return the first difference between two folders of weights; None if one is missing or both are the same
    folder."""
    if not (left.is_dir() and right.is_dir()) or left.resolve() == right.resolve():
        return None
    difference = first_tensor_difference(left, right)
    return None if difference is None else _of_tensor(f"{stage}, the weights in {left} and {right}", difference)


def _of_tensor(where: str, difference: TensorDifference) -> RecordDifference:
    return RecordDifference(where=where, what=f"{difference.tensor}, {difference.what}", values=difference.values)


def _in_words(runs: Sequence[RunFiles], stage: str, comparison: RecordDifference | RecordEnd) -> Iterator[str]:
    if isinstance(comparison, RecordEnd):
        ended = runs[comparison.record].folder
        yield f"{ended} ends in stage {stage} after {comparison.after}; the same until then"
        return
    yield _line(runs, comparison)
    if comparison.tensor is not None:
        step = int(comparison.where.rpartition(" ")[2])
        yield from _published_tensor(runs, stage, step, comparison.tensor)


def _line(runs: Sequence[RunFiles], difference: RecordDifference) -> str:
    values = "; ".join(f"{value} in {run.folder}" for run, value in zip(runs, difference.values, strict=True))
    return f"{difference.where}: {difference.what}: {values}"


def _published_tensor(runs: Sequence[RunFiles], stage: str, step: int, number: int) -> Iterator[str]:
    """Yield the name of a published tensor, and its first difference if both runs have the checkpoint."""
    files = [run.folder / stage / "checkpoints" / f"step-{step:06d}" / "model.safetensors" for run in runs]
    counterparts = [
        file for run in runs for file in sorted((run.folder / stage).glob("checkpoints/step-*/model.safetensors"))
    ]
    for file in (*files, *counterparts):
        names = list(stored_tensors(file))
        if number < len(names):
            yield f"the first tensor that differs: {names[number]}"
            break
    else:
        yield f"the first tensor that differs: number {number} in the order of names"
    if all(file.is_file() for file in files) and (difference := first_tensor_difference(*files)) is not None:
        yield _line(runs, _of_tensor(f"checkpoint of {stage} step {step}", difference))
