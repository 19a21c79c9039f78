"""Comparison of a run's recipe with the recipe that the run began with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparring.algo.user_rules import record
from sparring.errors import refusal
from sparring.launch.checkpoint import CONFIG
from sparring.launch.layout import is_layout, layout_keys, reason
from sparring.model.hub import base_folder, template_text
from sparring.observe.atomic_write import write_whole
from sparring.protocols import Store
from sparring.recipe.load import load_recorded
from sparring.recipe.run_config import RunConfig, dump, resolve
from sparring.recipe.url_secrets import masked
from sparring.stages.context import ONLINE_STAGES, Context, given_checkpoint
from sparring.stages.models.uses import trained_models
from sparring.stages.runtime.step_extension import first_steps, raises_key

NO_DIFFERENCE = (
    *("observe", "run.memory", "run.redo", "run.damaged"),
    *("rollout.gateway.url", "rollout.gateway.listen", "rollout.gateway.lease_s"),
    *("engine.update.timeout_s", "engine.update.retries", "engine.update.retry_delay_s"),
)
"""Settings that may change: progress display, addresses, patience, and what a resume does."""
BEGUN = "config.begun.toml"
"""File of the run's folder with the recipe that the run began with, once its steps were raised."""
TEMPLATES = "templates"
"""Key of the store for the chat templates that the run began with, by model."""
AFTER = {"rl": ("distill", "eval", "export"), "distill": ("eval", "export")}
"""Stages that may follow a live stage and use its weights."""


def compare(folder: Path, config: RunConfig, store: Store | None) -> list[str]:
    """Compare a config with the config that the folder's run began with. They must be equal, except that a live stage
    may have more steps, and that the layout may differ where it changes no bits. `store` is None before the run has
    one.

    Returns:
        Sentences for the user about live stages that get more steps.

    Raises:
        BadInput: the folder holds a run with another config, or the stage cannot go on.
    """
    dump(config)
    config = as_begun(folder, config)
    begun = _recorded_recipe(folder)
    if begun is None:
        return []
    changes = raised(folder, config)
    now = msgspec.to_builtins(config)
    may_change = tuple(key for key in layout_keys(begun) if key in layout_keys(now))
    differing = [
        difference
        for difference in config_differences(begun, now, ignored=(*NO_DIFFERENCE, *may_change))
        if not any(difference.startswith(f"{stage}.steps (") for stage in changes)
    ]
    if store is not None and (kept := store.get(TEMPLATES)) is not None:
        differing += [
            f"the text of models.{name}.template" for name in kept if _templates(config).get(name) != kept[name]
        ]
    if differing:
        raise refusal(
            str(folder),
            "the config that this run was started with",
            f"a different one: {', '.join(differing[:4])}{reason(begun, now, differing)}",
            "choose another [run] name (--name), or remove the folder; of a run that has begun, only rl.steps and "
            "distill.steps may be raised",
        )
    return check_raised(store, config, changes) if changes and store is not None else []


def as_begun(folder: Path, config: RunConfig) -> RunConfig:
    """Return a recipe with the token budget that the folder's run began with, unless the recipe sets one. The budget
    decides which rows share a micro-batch, and so the last bits of a gradient, so it must not depend on the machine of
    a resume."""
    if config.train.token_budget or not (folder / CONFIG).exists():
        return config
    return _with_token_budget(config, load_recorded(folder / CONFIG).train.tokens_at_once)


def _with_token_budget(config: RunConfig, tokens: int) -> RunConfig:
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, token_budget=tokens))


def raised(folder: Path, config: RunConfig) -> dict[str, tuple[int, int]]:
    """Return the live stages that get more steps than the folder's run has: their steps before and now."""
    begun = _recorded_recipe(folder)
    if begun is None:
        return {}
    counts = {stage: (begun[stage]["steps"], getattr(config, stage).steps) for stage in ONLINE_STAGES}
    return {stage: (old, new) for stage, (old, new) in counts.items() if stage in config.run.stages and new > old}


def claim(context: Context, changes: Mapping[str, tuple[int, int]]) -> None:
    """Write the resolved config into a run's folder if the folder is new, if steps were raised, or if the layout
    changed. A change of the layout is reported as an event. A new folder gets the policy's tokenizer."""
    file = context.folder / CONFIG
    moved = _layout_changes(context)
    if changes:
        raise_steps(context, changes)
    if moved:
        context.sink.event("run", f"goes on with another layout: {', '.join(moved)}")
    if not file.exists():
        keep_tokenizer(context.folder, context.config)
        record(context.folder, context.config.algo)
        if templates := _templates(context.config):
            context.store.put(TEMPLATES, templates)
    if changes or moved or not file.exists():
        write_whole(file, dump(context.config).encode())


def keep_tokenizer(folder: Path, config: RunConfig) -> None:
    """Copy the tokenizer of a policy that a recipe names by its path into a run's folder, so that the ids of its
    rollouts can be read as text wherever the folder is."""
    kept, start = folder / "tokenizer.json", given_checkpoint(config)
    if start is not None and not kept.exists() and (file := base_folder(start) / kept.name).is_file():
        write_whole(kept, file.read_bytes())


def _layout_changes(context: Context) -> list[str]:
    """Return the settings of the layout that differ from the recipe in a run's folder, as `config_differences`."""
    begun = _recorded_recipe(context.folder)
    if begun is None:
        return []
    differing = config_differences(begun, msgspec.to_builtins(context.config))
    return [difference for difference in differing if is_layout(difference)]


def _templates(config: RunConfig) -> dict[str, str]:
    return {name: template_text(spec.template) for name, spec in config.models.items() if spec.template is not None}


def _recorded_recipe(folder: Path) -> dict[str, Any] | None:
    """Return the recipe in a run's folder as plain data; None before the run has one."""
    file = folder / CONFIG
    if not file.exists():
        return None
    recorded = resolve(load_recorded(file))
    begun: dict[str, Any] = msgspec.to_builtins(_with_token_budget(recorded, recorded.train.tokens_at_once))
    return begun


def check_raised(store: Store, config: RunConfig, changes: Mapping[str, tuple[int, int]]) -> list[str]:
    """Refuse more steps for a stage if it ended early, if a later stage has trained on its weights, or if its learning
    rate has decayed to 0."""
    facts = []
    for stage, (before, now) in changes.items():
        where, length = f"{stage}.steps", first_steps(store, stage, before)
        if (early := (store.get(f"stage/{stage}") or {}).get("ended_early")) is not None:
            expected = f"{before}, because the stage ended after step {early['step']}: {early['reason']}"
            do = f"keep {before}, or start a new run from these weights: models.policy.path"
            raise refusal(where, expected, str(now), do)
        for later in AFTER[stage]:
            if later in ONLINE_STAGES and (store.get(f"stage/{later}") is not None or store.checkpoints(later)):
                expected = f"{before}, because stage {later} has trained on what it wrote"
                raise refusal(where, expected, str(now), "start a new run from these weights: models.policy.path")
        sections = {f"the {use}": one.train for use, one in trained_models(config, stage).items()}
        ends = {name: train for name, train in sections.items() if train and train.schedule != "constant"}
        for name, train in ends.items():
            if train.min_ratio == 0:
                expected = f"{before}, or a schedule of {name} that ends above 0 (train.min_ratio)"
                got = f"{now} with schedule {train.schedule}, whose learning rate is 0 after step {length}"
                raise refusal(where, expected, got, "start a new run from these weights: models.policy.path")
        rates = [
            f"schedule {train.schedule} of {name} keeps its length of {length} steps, and "
            f"{train.learning_rate * train.min_ratio:.3g} from there on"
            for name, train in ends.items()
        ]
        facts.append("; ".join([f"{where}: {before} -> {now}", *(rates or ["the learning rate stays as it is"])]))
    return facts


def raise_steps(context: Context, changes: Mapping[str, tuple[int, int]]) -> None:
    """Prepare a run for more steps: record the change (steps before and now, by stage), and mark the results of later
    stages as superseded. Must be called before the folder gets its new recipe."""
    store, folder = context.store, context.folder
    for stage, (before, now) in changes.items():
        record = list(store.get(raises_key(stage)) or ())
        results = {name: store.get(f"stage/{name}") for name in (stage, "eval", "export")}
        if not record or record[-1]["steps"] != now:
            store.put(raises_key(stage), [*record, {"before": before, "steps": now, "results": results}])
        for name in (stage, *AFTER[stage]):
            store.put(f"stage/{name}", None)
        for label in (stage, "no_tool", *_teachers(context.config)):
            store.put(f"eval/{label}", None)
            store.truncate(f"eval/{label}", 0, first_group=0)
        context.sink.event("run", f"{stage}.steps: {before} -> {now}; the recipe before is {BEGUN}")
    if not (folder / BEGUN).exists():
        write_whole(folder / BEGUN, (folder / CONFIG).read_bytes())


def _teachers(config: RunConfig) -> list[str]:
    return [f"teacher/{name}" for name in sorted(set(config.distill.teachers.values()))]


def config_differences(old: Any, new: Any, path: str = "", *, ignored: Collection[str] = NO_DIFFERENCE) -> list[str]:
    """Return the keys in which two configs, as plain data, differ: `path (old -> new)`.

    Args:
        path: dotted path of the compared part; empty for the whole config.
        ignored: settings, or tables of settings, that are not compared.
    """
    if path in ignored:
        return []
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = sorted(old.keys() | new.keys())
        return [
            difference
            for key in keys
            for difference in config_differences(
                old.get(key), new.get(key), f"{path}.{key}".lstrip("."), ignored=ignored
            )
        ]
    return [] if old == new else [masked(f"{path} ({old!r} -> {new!r})")]
