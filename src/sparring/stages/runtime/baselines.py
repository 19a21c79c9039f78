"""Results of other runs that a run's own result is compared with, task by task."""

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
from sparring.stages.context import ORDER, Context
from sparring.store.sqlite import SqliteStore
from sparring.types import Task


class Other(msgspec.Struct, frozen=True, kw_only=True):
    """Result of another run, or of a file of `sparring eval`. `tokens_trained`: by the last stage that
    trained them, None where nobody knows."""

    evaluation: Evaluation
    tokens_trained: int | None = None


def check_against(context: Context, tasks: Sequence[Task]) -> list[str]:
    """Check that every result of `[eval] against` is there and of the same tasks.

    Returns:
        One sentence for each result: how many tasks it has in common with this run.

    Raises:
        BadInput: a result is missing, has another task by the same name, or has no task in common.
    """
    digests, kept = {task.id: digest(task) for task in tasks}, others(context)
    facts = []
    for name, path in context.config.eval.against.items():
        where = f"eval.against.{name}"
        other = kept[name] if name in kept else _read(where, path)
        facts.append(_check(where, path, other.evaluation, digests))
    return facts


def remember_others(context: Context) -> None:
    """Keep the results of `[eval] against` in this run, when it begins: what becomes of the others' folders does not
    change it.

    Raises:
        BadInput: a result is missing.
    """
    for name, path in context.config.eval.against.items():
        if context.store.get(_key(name)) is None:
            context.store.put(_key(name), msgspec.to_builtins(_read(f"eval.against.{name}", path)))


def others(context: Context) -> dict[str, Other]:
    """Return the results of `[eval] against` that this run keeps, by name."""
    stored = {name: context.store.get(_key(name)) for name in context.config.eval.against}
    return {name: msgspec.convert(value, Other) for name, value in stored.items() if value is not None}


def last_evaluated(results: Mapping[str, Any]) -> Any | None:
    """Return the result of the weights that were trained last, out of those of an eval stage; None of no results."""
    return next((results[stage] for stage in reversed(ORDER) if stage in results), None)


def _key(name: str) -> str:
    return f"against/{name}"


def _check(where: str, path: str, other: Evaluation, digests: Mapping[str, str]) -> str:
    other_tasks = other.tasks
    common = digests.keys() & other_tasks.keys()
    expected, do = (
        "a result of the same held-out tasks",
        "evaluate both with one [env], one run.seed and one eval.tasks",
    )
    if not common:
        raise refusal(where, expected, f"none of {len(digests)} among the {len(other_tasks)} of {path}", do)
    for name in sorted(common):
        if digests[name] != other_tasks[name].digest:
            raise refusal(where, expected, f"another task called {name} in {path}", do)
    return f"{where}: {len(common)} of {len(digests)} held-out tasks are in {path}"


def _read(where: str, path: str) -> Other:
    """Read a file of `sparring eval`, or the result of the last weights that a run evaluated.

    Raises:
        BadInput: it is neither.
    """
    place = Path(path)
    if place.suffix == ".json":
        return Other(evaluation=read_result(place).evaluation)
    result = _evaluated(place)
    if result is None:
        expected = "the folder of a run whose stage eval is done, or an evaluation.json"
        got = "a run that has evaluated nothing" if place.is_dir() else "no folder"
        raise refusal(where, expected, f"{got}: {path}", "run it first")
    return Other(evaluation=msgspec.convert(result, Evaluation), tokens_trained=_tokens_trained(place))


def _evaluated(folder: Path) -> Any | None:
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
    ):  # no summary, or none of ours: the figure is one more, not the comparison
        return None
