"""Results of other runs (`[eval] against`) that a run's own result is compared with, task by task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparring.errors import refusal
from sparring.observe.evaluation import Evaluation
from sparring.observe.results import read_result
from sparring.rollout.seeds import digest
from sparring.stages.context import ORDER, RunFiles
from sparring.store.sqlite import SqliteStore
from sparring.types import Task


class BaselineResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of another run, or of a file of `sparring eval`.

    Attributes:
        tokens_trained: tokens trained by the last stage of the other run; None: unknown.
    """

    evaluation: Evaluation
    tokens_trained: int | None = None


def check_against(files: RunFiles, tasks: Sequence[Task]) -> list[str]:
    """Refuse a result of `[eval] against` that is missing, has another task under the id of a task of this run, or
    shares no task with this run; return a sentence for each result with the number of tasks in common."""
    digests, kept = {task.id: digest(task) for task in tasks}, stored_baselines(files)
    facts = []
    for name, path in files.config.eval.against.items():
        where = f"eval.against.{name}"
        other = kept[name] if name in kept else _read(where, path)
        facts.append(_check_same_tasks(where, path, other.evaluation, digests))
    return facts


def remember_others(files: RunFiles) -> None:
    """Store the results of `[eval] against` when the run begins: the other runs may change later."""
    for name, path in files.config.eval.against.items():
        if files.store.get(_key(name)) is None:
            files.store.put(_key(name), msgspec.to_builtins(_read(f"eval.against.{name}", path)))


def stored_baselines(files: RunFiles) -> dict[str, BaselineResult]:
    """Return the stored results of `[eval] against`, by name."""
    stored = {name: files.store.get(_key(name)) for name in files.config.eval.against}
    return {name: msgspec.convert(value, BaselineResult) for name, value in stored.items() if value is not None}


def last_evaluated(results: Mapping[str, Any]) -> Any | None:
    """Return the result of the last trained weights from the results of an eval stage; None for no results."""
    return next((results[stage] for stage in reversed(ORDER) if stage in results), None)


def _key(name: str) -> str:
    return f"against/{name}"


def _check_same_tasks(where: str, path: str, other: Evaluation, digests: Mapping[str, str]) -> str:
    other_tasks = other.tasks
    common = digests.keys() & other_tasks.keys()
    expected, fix = (
        "a result of the same held-out tasks",
        "evaluate both with one [env], one run.seed and one eval.tasks",
    )
    if not common:
        raise refusal(where, expected, f"none of {len(digests)} among the {len(other_tasks)} of {path}", fix)
    for name in sorted(common):
        if digests[name] != other_tasks[name].digest:
            raise refusal(where, expected, f"another task called {name} in {path}", fix)
    return f"{where}: {len(common)} of {len(digests)} held-out tasks are in {path}"


def _read(where: str, path: str) -> BaselineResult:
    """Read a file of `sparring eval`, or the result of the last weights that a run evaluated."""
    place = Path(path)
    if place.suffix == ".json":
        return BaselineResult(evaluation=read_result(place).evaluation)
    result = _last_result(place)
    if result is None:
        expected = "the folder of a run whose stage eval is done, or an evaluation.json"
        actual = "a run that has evaluated nothing" if place.is_dir() else "no folder"
        raise refusal(where, expected, f"{actual}: {path}", "run it first")
    return BaselineResult(evaluation=msgspec.convert(result, Evaluation), tokens_trained=_tokens_trained(place))


def _last_result(folder: Path) -> Any | None:
    if not (folder / "store.sqlite").is_file():
        return None
    store = SqliteStore(folder / "store.sqlite", read_only=True)
    try:
        return last_evaluated(store.get("stage/eval") or {})
    finally:
        store.close()


def _tokens_trained(folder: Path) -> int | None:
    try:
        tokens: int | None = json.loads((folder / "summary.json").read_text(encoding="utf-8")).get("tokens_trained")
        return tokens
    except (
        OSError,
        ValueError,
        AttributeError,
    ):  # no readable summary: the comparison does without this figure
        return None
