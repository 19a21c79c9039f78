"""`run`, `check`, `load_recipe` and `evaluate`: the verbs of the command line, called from Python."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparring.allocator import share_freed_memory
from sparring.errors import refusal
from sparring.launch.evaluate import evaluate_subjects, evaluated_as
from sparring.launch.run import check_recipe, run_with_earlier
from sparring.observe.results import Results
from sparring.recipe.load import from_data, load
from sparring.recipe.run_config import RunConfig


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """Read a recipe, a TOML file, and replace some of its keys.

        config = load_recipe("recipes/quickstart.toml", {"rl.steps": 10, "run.name": "short"})

    Args:
        overrides: values by dotted key, or `a.b=value` each as `--set` takes them; applied in order. A number in a key
            picks from a list: `env.args.datasets.0.weight`.

    Returns:
        The recipe as a struct. It is frozen; `msgspec.structs.replace(config, rl=...)` makes a changed copy.

    Raises:
        BadInput: the file cannot be read, is not TOML, or has an unknown key or an invalid value.
    """
    if not isinstance(path, (str, os.PathLike)):
        advice = "write the recipe into a TOML file, or build a RunConfig of sparring.recipe.run_config"
        raise refusal("sparring.load_recipe", "the path of a TOML file", type(path).__name__, advice)
    if isinstance(overrides, (str, bytes)):
        advice = "give a mapping {key: value} or a list of key=value texts"
        raise refusal("sparring.load_recipe: overrides", "several overrides", repr(overrides), advice)
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={_toml(key, value)}" for key, value in overrides.items()]
    return load(os.fspath(path), overrides)


def run(config: RunConfig) -> Path:
    """Run a recipe, or resume it if it was stopped. `config` comes from `load_recipe` or is built in Python. The same
    as `sparring run`; it also works in a notebook, whose event loop waits.

    Returns:
        The run's folder, with `summary.json`, `report.html` and the checkpoints in it.

    Raises:
        BadInput: a check before the work starts refuses the recipe or the machine.
    """
    from sparring.dashboard.report import write_report

    share_freed_memory()
    folder = run_with_earlier(_validate(config, "sparring.run"))
    write_report(folder)
    return folder


def check(config: RunConfig) -> list[str]:
    """Check a recipe for every error that can be found before a run. The same as `sparring check`; nothing is trained
    or written.

    Returns:
        The facts that the check found, one line each: memory, tasks, the expert's reward.

    Raises:
        BadInput: a run would be refused.
    """
    return check_recipe(_validate(config, "sparring.check"))


def evaluate(
    config: RunConfig,
    *checkpoints: str | os.PathLike[str],
    tasks: int | None = None,
    samples: int | None = None,
    ks: Sequence[int] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Results:
    """Evaluate checkpoints on a recipe's held-out tasks, and compare each with the first. The same as `sparring eval`.

        success = evaluate(config, "runs/quickstart").evaluation.success
        print(success.value, success.interval)

    Args:
        checkpoints: subjects, each a folder of Hugging Face weights, of an adapter or of a run, a saved step of a run
            (`runs/quickstart/rl/best`), the URL of an endpoint, or the `evaluation.json` of an earlier evaluation. A
            baseline comes first.
        tasks: number of tasks, instead of `[eval] tasks`.
        samples: number of rollouts of each task, instead of `[eval] samples`.
        ks: values of k for pass@k and pass^k, instead of `[eval] ks`.
        tokenizer: folder of an endpoint's tokenizer; None uses the policy's.

    Returns:
        One evaluation for each checkpoint, one comparison for each but the first. What is recorded in the run's folder
        is not sampled again.

    Raises:
        BadInput: a checkpoint, a setting or the recipe is refused.
        EvaluationFailed: infrastructure or judge broke too many rollouts.
    """
    wrong = [type(path).__name__ for path in checkpoints if not isinstance(path, (str, os.PathLike))]
    if wrong or not checkpoints:
        expected = "paths of checkpoints" if wrong else "at least one checkpoint"
        advice = "name a Hugging Face folder, the folder of a run, or an endpoint"
        raise refusal("sparring.evaluate", expected, wrong[0] if wrong else "none", advice)
    share_freed_memory()
    options = {"tasks": tasks, "samples": samples, "ks": None if ks is None else list(ks)}
    changed = {key: value for key, value in options.items() if value is not None}
    config = _validate(config, "sparring.evaluate", eval=changed)
    folder = None if tokenizer is None else Path(tokenizer)
    return evaluate_subjects(config, [evaluated_as(config, os.fspath(name), folder) for name in checkpoints])


def _validate(config: RunConfig, where: str, **changed: Mapping[str, Any]) -> RunConfig:
    """Return the recipe, with `changed` values by section and key, checked against its types: msgspec does not check
    them when a struct is built in Python. Errors name `where`, the calling function."""
    if not isinstance(config, RunConfig):
        advice = "load a file with sparring.load_recipe"
        if isinstance(config, Mapping):
            advice = "build it with sparring.recipe.load.from_data, or load a file with sparring.load_recipe"
        raise refusal(where, "a recipe (RunConfig)", type(config).__name__, advice)
    data = msgspec.to_builtins(config)
    return from_data({**data, **{section: {**data[section], **keys} for section, keys in changed.items()}}, where)


def _toml(key: object, value: Any) -> str:
    """Return a Python value as TOML on one line. Raises BadInput if TOML has no such value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, (str, os.PathLike)):
        return json.dumps(os.fspath(value), ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(k))} = {_toml(key, v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(key, item) for item in value)}]"
    advice = "leave the key out for its default" if value is None else "write it as one of these"
    where = f"sparring.load_recipe: {key}"
    raise refusal(where, "a text, a number, a truth value, a list or a mapping", type(value).__name__, advice)
