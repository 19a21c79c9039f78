"""Recipes with the fewest steps, for the short form of benchmarks and for the commands of pages."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROWS = {
    **{"sft": "rows_per_step", "reward_model": "rows_per_step", "preference": "rows_per_step"},
    **{"rl": "groups_per_step", "distill": "groups_per_step"},
}
"""Stages that train, and their key of the size of a step."""
MOST = {"steps": 1, "groups_per_step": 2, "rows_per_step": 4, "minibatches": 2, "passes": 1}
"""Largest values of keys of a stage."""
TAUGHT = {"steps": 40, "rows_per_step": 16}
"""The same of `sft` where a recipe begins with random weights, which have to learn to end a reply."""
DEMONSTRATIONS, TASKS = 64, 4
REPLY_TOKENS = 48
"""Longest turn of a real model."""


def fewest_steps(recipe: Path) -> list[str]:
    """Return the settings under which each stage of a recipe trains one step on a few rollouts, in the form of
    `--set`."""
    return [f"{key}={json.dumps(value)}" for key, value in _changes(tomllib.loads(recipe.read_text()))]


def shorten(recipe: Path) -> None:
    """Rewrite a recipe so that it has these settings; a file that is none stays as it is."""
    import tomli_w

    document = tomllib.loads(recipe.read_text())
    for key, value in _changes(document) if "run" in document else ():
        *above, name = key.split(".")
        place: Any = document
        for part in above:
            place = place[int(part)] if part.isdecimal() else place.setdefault(part, {})
        place[name] = value
    recipe.write_text(tomli_w.dumps(document))


def _changes(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys of a recipe with their values in the short form."""
    env = document.get("env", {})
    tasks = TASKS if "eval" in document or env.get("held_out", 0) > TASKS else 1
    yield from (("run.threads", 1), ("eval.tasks", tasks), ("eval.no_tool_tasks", 0), ("observe.progress", "plain"))
    turn_tokens = document.get("rollout", {}).get("sampling", {}).get("max_turn_tokens", 0)
    if "init" not in document["models"]["policy"] and turn_tokens > REPLY_TOKENS:
        yield "rollout.sampling.max_turn_tokens", REPLY_TOKENS
    for name in (stage for stage in ROWS if stage in document or stage in document["run"].get("stages", ())):
        stage, most = document.get(name, {}), MOST
        if name == "sft" and "init" in document["models"]["policy"]:
            most = MOST | TAUGHT
        for key, value in most.items():
            if key in stage or key in ("steps", ROWS[name]):
                yield f"{name}.{key}", min(value, stage.get(key, value))
        if "warmup_steps" in stage.get("train", {}):
            yield f"{name}.train.warmup_steps", 0
        if "critic" in stage:
            yield f"{name}.critic.warmup_steps", 0
        if name == "rl":
            yield from (("algo.zero_variance_filter", False), ("rollout.group_size", 2))
    if "collect" in document:
        yield "collect.tasks", 2 * TASKS
    sources = {"env": env}
    sources |= {f"env.args.datasets.{at}": data for at, data in enumerate(env.get("args", {}).get("datasets", ()))}
    for name, source in sources.items():
        if source.get("demonstrations", 0) > DEMONSTRATIONS:
            yield f"{name}.demonstrations", DEMONSTRATIONS
