"""Resume of a run under a recipe that may differ from the one it began with: what may change, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparring.algo.user_rules import record
from sparring.errors import refusal
from sparring.launch.checkpoint import CONFIG
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
"""Settings that may change: progress display, addresses, waiting times, and what a resume does."""

EXACT_ENGINES = ("native", "remote")
"""Engines that compute with the trainer's own module, and so sample the same tokens."""

ADDRESSES = ("engine.urls", "engine.api_key_env", "engine.silent_s", "engine.shared_folder")
"""Settings of the engine's servers: addresses and key, waiting time, and folder for weights."""

LAYOUT = (
    "run.threads",  # law 3: neither the bits of a forward pass nor those of a gradient depend on it
    "cluster",  # the places of the same engines
    *("engine.kind", *ADDRESSES),  # only among EXACT_ENGINES
    "engine.batch",  # law 3: a request does not depend on its neighbours
    # Pages that were dropped, moved or shared are those that the served version computes (law 4).
    *("engine.kv.across_turns", "engine.kv.idle_bytes", "engine.kv.offload_bytes", "engine.kv.share_prefixes"),
)
"""Settings, or tables of settings, of where a run is computed. A resume may change these, because they change no
sampled token and no weight.

Not among them: `run.device`, because another device has other kernels; `engine.kv.tokens` and `engine.kv.bytes`, which
limit the length of a conversation; `engine.update.live_kv`, which decides the versions that a running request reads;
`engine.vllm` and `engine.served_model`, because their engines do not promise equal bits.
"""

BEGUN = "config.begun.toml"
"""File of the run's folder with the recipe that the run began with, once its steps were raised."""
TEMPLATES = "templates"
"""Key of the store for the chat templates that the run began with, by model."""
AFTER = {"rl": ("distill", "eval", "export"), "distill": ("eval", "export")}
"""Stages that may follow a live stage and use its weights."""


def compare(folder: Path, config: RunConfig, store: Store | None) -> list[str]:
    """Compare a config with the config that the folder's run began with. They must be equal, except that a live stage
    may have more steps, and that the layout may differ where it changes no bits. `store` is None before the run has a
    store.

    Returns:
        Sentences for the user about live stages that get more steps.

    Raises:
        BadInput: the folder holds a run with another config, or the stage cannot go on.
    """
    dump(config)
    begun = _begun(folder)
    if begun is None:
        return []
    changes = raised(folder, config)
    allowed = {*NO_DIFFERENCE, *(f"{stage}.steps" for stage in changes), *(_movable(begun) & _movable(config))}
    differences = config_differences(begun, as_begun(folder, config))
    refused = {path: values for path, values in differences.items() if not is_among(path, allowed)}
    differing = in_words(refused)
    if store is not None and (kept := store.get(TEMPLATES)) is not None:
        templates = _templates(config)
        differing += [f"the text of models.{name}.template" for name in kept if templates.get(name) != kept[name]]
    if differing:
        tied = _depends_on_layout(begun) or _depends_on_layout(config)
        why = tied if any(is_among(path, LAYOUT) for path in refused) else ""
        raise refusal(
            str(folder),
            "the config that this run was started with",
            f"a different one: {', '.join(differing[:4])}{f' ({why})' if why else ''}",
            "choose another [run] name (--name), or remove the folder; of a run that has begun, only rl.steps and "
            "distill.steps may be raised",
        )
    return check_raised(store, config, changes) if changes and store is not None else []


def as_begun(folder: Path, config: RunConfig) -> RunConfig:
    """Return a recipe with the token budget that the folder's run began with, unless the recipe sets one. The budget
    decides which rows share a micro-batch, and so the last bits of a gradient, so it must not depend on the machine of
    a resume."""
    begun = None if config.train.token_budget else _begun(folder)
    return config if begun is None else _with_token_budget(config, begun.train.token_budget)


def raised(folder: Path, config: RunConfig) -> dict[str, tuple[int, int]]:
    """Return the live stages that get more steps than the folder's run has: their steps before and now."""
    begun = _begun(folder)
    if begun is None:
        return {}
    counts = {stage: (getattr(begun, stage).steps, getattr(config, stage).steps) for stage in ONLINE_STAGES}
    return {stage: (old, new) for stage, (old, new) in counts.items() if stage in config.run.stages and new > old}


def claim(context: Context) -> None:
    """Write the resolved config into a run's folder if the folder is new, if steps were raised, or if the layout
    changed. A change of the layout is reported as an event. A new folder gets the policy's tokenizer."""
    folder, config, begun = context.folder, context.config, _begun(context.folder)
    if begun is None:
        keep_tokenizer(folder, config)
        record(folder, config.algo)
        if templates := _templates(config):
            context.store.put(TEMPLATES, templates)
    else:
        changes, differences = raised(folder, config), config_differences(begun, config)
        moved = in_words({path: values for path, values in differences.items() if is_among(path, LAYOUT)})
        if changes:
            _raise_steps(context, changes)
        if moved:
            context.sink.event("run", f"goes on with another layout: {', '.join(moved)}")
        if not changes and not moved:
            return
    write_whole(folder / CONFIG, dump(config).encode())


def keep_tokenizer(folder: Path, config: RunConfig) -> None:
    """Copy the tokenizer of a policy that a recipe names by its path into a run's folder, so that the ids of its
    rollouts can be read as text wherever the folder is."""
    kept, start = folder / "tokenizer.json", given_checkpoint(config)
    if start is not None and not kept.exists() and (file := base_folder(start) / kept.name).is_file():
        write_whole(kept, file.read_bytes())


def check_raised(store: Store, config: RunConfig, changes: Mapping[str, tuple[int, int]]) -> list[str]:
    """Refuse more steps for a stage if it ended early, if a later stage has trained on its weights, or if its learning
    rate has decayed to 0."""
    facts = []
    fresh = "start a new run from these weights: models.policy.path"
    for stage, (before, now) in changes.items():
        where, length = f"{stage}.steps", first_steps(store, stage, before)
        if (early := (store.get(f"stage/{stage}") or {}).get("ended_early")) is not None:
            expected = f"{before}, because the stage ended after step {early['step']}: {early['reason']}"
            raise refusal(where, expected, str(now), f"keep {before}, or {fresh}")
        for later in AFTER[stage]:
            if later in ONLINE_STAGES and (store.get(f"stage/{later}") is not None or store.checkpoints(later)):
                raise refusal(where, f"{before}, because stage {later} has trained on what it wrote", str(now), fresh)
        sections = {f"the {use}": one.train for use, one in trained_models(config, stage).items()}
        ends = {name: train for name, train in sections.items() if train and train.schedule != "constant"}
        for name, train in ends.items():
            if train.min_ratio == 0:
                expected = f"{before}, or a schedule of {name} that ends above 0 (train.min_ratio)"
                schedule = f"{now} with schedule {train.schedule}, whose learning rate is 0 after step {length}"
                raise refusal(where, expected, schedule, fresh)
        rates = [
            f"schedule {train.schedule} of {name} keeps its length of {length} steps, and "
            f"{train.learning_rate * train.min_ratio:.3g} from there on"
            for name, train in ends.items()
        ]
        facts.append("; ".join([f"{where}: {before} -> {now}", *(rates or ["the learning rate stays as it is"])]))
    return facts


def config_differences(old: Any, new: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two recipes differ: their values in both, by dotted path. `path`: path of the
    compared parts in the recipe."""
    if isinstance(old, RunConfig) and isinstance(new, RunConfig):
        old, new = msgspec.to_builtins(old), msgspec.to_builtins(new)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found: dict[str, tuple[Any, Any]] = {}
        for key in sorted(old.keys() | new.keys()):
            found |= config_differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
        return found
    return {} if old == new else {path: (old, new)}


def in_words(differences: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return differences as text for the user: `path (old -> new)` each."""
    return [masked(f"{path} ({old!r} -> {new!r})") for path, (old, new) in differences.items()]


def is_among(path: str, settings: Iterable[str]) -> bool:
    """Return whether a dotted path is in `settings`, or below a table in `settings`."""
    return any(path == setting or path.startswith(f"{setting}.") for setting in settings)


def _begun(folder: Path) -> RunConfig | None:
    """Return the recipe in a run's folder, with the token budget that it was trained with; None before the run has a
    recipe."""
    if not (folder / CONFIG).exists():
        return None
    begun = resolve(load_recorded(folder / CONFIG))
    return _with_token_budget(begun, begun.train.tokens_at_once)


def _with_token_budget(config: RunConfig, tokens: int) -> RunConfig:
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, token_budget=tokens))


def _movable(config: RunConfig) -> set[str]:
    """Return the settings of the layout that may change: all, or none if they decide bits. With vLLM, only `ADDRESSES`
    may, because its servers sample alike wherever they are."""
    if config.engine.kind == "vllm":
        return set(ADDRESSES)
    return set() if _depends_on_layout(config) else set(LAYOUT)


def _depends_on_layout(config: RunConfig) -> str:
    """Return why another layout would change a run's bits; "" if the layout does not matter."""
    kind = config.engine.kind
    if kind not in EXACT_ENGINES:
        return f'engine.kind is "{kind}", whose tokens are not those of the trainer\'s own module'
    fast = sorted(name for name, model in config.models.items() if model.numerics == "fast")
    return f'models.{fast[0]}.numerics is "fast", whose bits depend on the layout' if fast else ""


def _templates(config: RunConfig) -> dict[str, str]:
    return {name: template_text(spec.template) for name, spec in config.models.items() if spec.template is not None}


def _raise_steps(context: Context, changes: Mapping[str, tuple[int, int]]) -> None:
    """Record the raises of steps, and mark the results of later stages as superseded, before the folder gets its new
    recipe."""
    store, folder = context.store, context.folder
    teachers = {f"teacher/{name}" for name in context.config.distill.teachers.values()}
    for stage, (before, now) in changes.items():
        raises = list(store.get(raises_key(stage)) or ())
        results = {name: store.get(f"stage/{name}") for name in (stage, "eval", "export")}
        if not raises or raises[-1]["steps"] != now:
            store.put(raises_key(stage), [*raises, {"before": before, "steps": now, "results": results}])
        for name in (stage, *AFTER[stage]):
            store.put(f"stage/{name}", None)
        for label in (stage, "no_tool", *sorted(teachers)):
            store.put(f"eval/{label}", None)
            store.truncate(f"eval/{label}", 0, first_group=0)
        context.sink.event("run", f"{stage}.steps: {before} -> {now}; the recipe before is {BEGUN}")
    if not (folder / BEGUN).exists():
        write_whole(folder / BEGUN, (folder / CONFIG).read_bytes())
