"""Runs a recipe: opens the run's folder, checks the recipe, and runs its stages in order."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from sparring.errors import BadInput, naming_memory, refusal
from sparring.launch.checkpoint import STORE
from sparring.launch.interrupts import block
from sparring.launch.rehearsal import rehearse
from sparring.launch.resume import as_begun, claim, compare, raised
from sparring.launch.run_server import answered_outside
from sparring.observe.progress import progress
from sparring.observe.sinks.load import check_sinks, load_sinks
from sparring.observe.sinks.sink import Fanout
from sparring.observe.wait_reports import waiting
from sparring.recipe.load import load
from sparring.recipe.run_config import RunConfig, resolve
from sparring.scratch import scratch
from sparring.stages.context import CHOSEN, MEMORY_WARNING_KEY, Context
from sparring.stages.data.contamination import SHOWN, note_shown
from sparring.stages.runtime.baselines import remember_others
from sparring.stages.runtime.resource_usage import elapsing
from sparring.stages.runtime.summary import write_summary

if TYPE_CHECKING:
    from sparring.envs.rubrics.judges import Judges, Replies
    from sparring.harness.program import Address
    from sparring.protocols import Cluster, EnvFactory, Harness, Store
    from sparring.record.leases import Leases

T = TypeVar("T")
UNDER_WAY = "memory/under_way"
"""Key of the store for the run's memory warning while stages run."""


def run_recipe(config: RunConfig) -> Path:
    """Run every stage that the run's folder does not have yet, after a check. The same as `sparring run`.

    Returns:
        The run's folder, with `summary.json` in it.

    Raises:
        BadInput: a check before the work starts refuses the recipe or the machine.
    """
    return block(_run(resolve(config)))


def run_with_earlier(config: RunConfig) -> Path:
    """Run the recipes of `[run] after`, and theirs before them, then `config`. Return the folder of `config`."""
    for earlier in _earlier_recipes(config, ()):
        run_recipe(earlier)
    return run_recipe(config)


def _earlier_recipes(config: RunConfig, begun: tuple[str, ...]) -> list[RunConfig]:
    """Return the recipes that must run before `config`, in an order in which each follows its own `[run] after`. All
    are read before any is run."""
    recipes = []
    for recipe in config.run.after:
        if recipe in begun:
            raise refusal(
                "run.after",
                "recipes that do not follow each other in a circle",
                " -> ".join((*begun, recipe)),
                "leave one out",
            )
        after = load(recipe)
        recipes += [*_earlier_recipes(after, (*begun, recipe)), after]
    return recipes


async def _run(config: RunConfig) -> Path:
    there = (Path(config.run.directory) / config.run.name).exists()
    async with opened(config) as context:
        if raised(context.folder, config) or any(context.done(stage) is None for stage in config.run.stages):
            from sparring.stages.preflight.directory import check_directory

            try:
                with waiting("the check of the recipe"):
                    from sparring.stages.preflight.run import check  # slow import: only after the refusals above

                    facts = [*check_directory(context.folder), *await rehearse(context, check)]
            except BadInput:
                if not there:
                    shutil.rmtree(context.folder, ignore_errors=True)  # while its lock is held
                raise
            for fact in facts:
                context.sink.event("check", fact)
        claim(context)  # last, so that a refused recipe can be corrected
        remember_others(context)
        with _keep_memory_warning(context):
            async with answered_outside(config, context.folder, context.sink.event):
                for stage in config.run.stages:
                    if context.done(stage) is None:
                        await _stage(context, stage)
        if context.store.get(SHOWN) is None:  # else an evaluation has recorded it
            note_shown(context, context.factory, {})
        write_summary(context)
        return context.folder


@contextmanager
def _keep_memory_warning(context: Context) -> Iterator[None]:
    """Keep the run's memory warning in the store while stages run. An out-of-memory error repeats the warning. So does
    the next process, if this process was killed, probably by the kernel for its memory."""
    warning = context.store.get(MEMORY_WARNING_KEY)
    if (before := context.store.get(UNDER_WAY)) is not None:
        context.sink.event("run", f"the process before this one was killed; before it began, it was told: {before}")
    context.store.put(UNDER_WAY, warning)
    try:
        with naming_memory(str(warning)):
            yield
    finally:
        context.store.put(UNDER_WAY, None)


async def _stage(context: Context, name: str) -> None:
    """Run one stage and record its result. Its wall-clock time is recorded even if the stage is stopped or killed."""
    from sparring.stages.models.adapters import show_adapter
    from sparring.stages.pipeline import STAGES

    async with context.cluster.stage(name):
        try:
            async with elapsing(context.store, name):
                result = await STAGES[name](context)
                show_adapter(context, name)
        finally:
            await context.judges.close()
    context.store.put(f"stage/{name}", result)


@asynccontextmanager
async def opened(config: RunConfig, begun: Path | None = None) -> AsyncIterator[Context]:
    """Open the parts of a run, lock its folder for this process, and close them at the end.

    Args:
        begun: folder of the run whose tasks are used; None uses the folder of the config.

    Raises:
        BadInput: another process uses the folder, its run has another config, or the folder cannot be made.
    """
    from sparring.envs.rubrics.judges import Judges
    from sparring.harness.by_environment import mounts_of
    from sparring.sandbox.make import make_boxes
    from sparring.store.sqlite import SqliteStore

    def open_model(name: str) -> Awaitable[Replies]:
        return _open_model(config, cluster, name)

    folder = Path(config.run.directory) / config.run.name
    _check_recorded(begun or folder)
    config = as_begun(begun or folder, config)
    judges = Judges(open_model)
    factory, harness = _worlds(config, judges)
    _make_folder(folder)
    store = SqliteStore(folder / STORE)
    judges.remember(store, partial(_describe_model, config))
    try:
        compare(folder, config, store)
        config = _for_this_machine(config, store)
        recipe = msgspec.to_builtins(config)
        sinks = load_sinks(config.observe, folder, name=config.run.name, recipe=recipe)
        sink = Fanout([*sinks, progress(config.observe)], store.event)
        cluster = cluster_of(config, tell=sink.event)
        boxes = make_boxes(config.sandbox, mounts_of(harness))
        try:
            yield Context(
                config=config,
                folder=folder,
                store=store,
                sink=sink,
                cluster=cluster,
                boxes=boxes,
                box_starts=asyncio.Semaphore(config.sandbox.starting),
                factory=factory,
                harness=harness,
                judges=judges,
            )
        finally:
            await judges.close()
            await cluster.close()
            await boxes.close()
            sink.close()
    finally:
        store.close()


def _for_this_machine(config: RunConfig, store: Store) -> RunConfig:
    """Return a recipe with the settings that it leaves to the machine."""
    if not config.train.token_budget:
        with waiting("the import of torch"):
            from sparring.stages.preflight.token_budget import sized

        config, why = sized(config)
        store.put(CHOSEN, why)
    return config


def cluster_of(config: RunConfig, **settings: Any) -> Cluster:
    """Return a cluster for the models of a recipe. `settings`: further arguments of `InlineCluster`."""
    from sparring.cluster.inline import InlineCluster
    from sparring.cluster.processes import ProcessCluster

    inline = InlineCluster(
        models=config.models,
        train=config.train,
        engine=config.engine,
        device=config.run.device,
        threads=config.run.threads,
        colocate=config.cluster.colocate,
        **settings,
    )
    if config.cluster.kind == "inline":
        return inline
    return ProcessCluster(config.cluster, Path(config.run.directory) / config.run.name, inline)


def _make_folder(folder: Path) -> None:
    """Make the folder of a run; raise BadInput if that fails."""
    from sparring.stages.preflight.directory import check_directory

    check_directory(folder.parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal("run.directory", "a writable folder", str(error), "choose another") from error


def _worlds(config: RunConfig, judges: Judges) -> tuple[EnvFactory, Harness]:
    from sparring.envs.domains import Domains
    from sparring.envs.registry import load_env
    from sparring.envs.roles import check_roles
    from sparring.harness.by_environment import HarnessByEnvironment
    from sparring.harness.load import load_harness
    from sparring.tasks.files import read_rows

    factories = {key: load_env(env, read_rows, judges) for key, env in config.environments.items()}
    programs = Path(config.rollout.programs)
    open_door = partial(_open_door, config.rollout.models)
    harnesses = {
        key: load_harness(
            config.harness_of(_name_of(key)),
            check_roles(each.make()),
            open_door,
            programs,
            _leases,
            config.rollout.gateway.shown_to_workers,
            calls_from_code=config.rollout.calls_from_code,
        )
        for key, each in factories.items()
    }
    if config.env is not None:
        return factories["env"], harnesses["env"]
    places = {name: domain.places for name, domain in config.envs.items() if domain.places is not None}
    return Domains(_by_domain(factories), places), HarnessByEnvironment(_by_domain(harnesses))


def _open_door(
    of_run: Mapping[str, str], session: Any, *, models: Mapping[str, Any] = {}, leave_out: Sequence[str] = ()
) -> AbstractAsyncContextManager[Address]:
    """Serve a session to agent programs. The gateway is imported at the first call. `of_run` has the recipe's names of
    models, which take precedence over the program's."""
    from sparring.gateway.server import open_door

    return open_door(session, models={**of_run, **models, **of_run}, leave_out=leave_out)


def _leases() -> Leases | None:
    """Return the leases of workers, or None if this process has no server for workers."""
    from sparring.gateway.server import gateway_here

    return gateway_here().workers.leases


def _name_of(key: str) -> str:
    """Return the name of the environment under a key of `RunConfig.environments`; "" if there is only one."""
    return key.partition(".")[2]


def _by_domain(parts: Mapping[str, T]) -> dict[str, T]:
    return {_name_of(key): part for key, part in parts.items()}


async def _open_model(config: RunConfig, cluster: Cluster, name: str) -> Replies:
    from sparring.engine.adapters.chat_endpoint import ChatEndpoint
    from sparring.engine.adapters.client import read_api_key
    from sparring.envs.rubrics.judges import EngineReplies
    from sparring.model.hub import base_folder, model_folder
    from sparring.render.load import load_renderer

    spec = config.models[name]
    served = spec.served
    if served is not None and served.kind == "chat":
        return ChatEndpoint(served.url, model=served.served_model, api_key=read_api_key(served.api_key_env))
    folder = model_folder(spec)
    renderer = load_renderer(base_folder(folder), spec.renderer, spec.thinking)
    return EngineReplies(cluster.engine(name, path=str(folder)), renderer, name)


def _describe_model(config: RunConfig, name: str) -> str:
    """Describe a model of `[models]` by its settings and the files on this machine. A change on a server is not
    noticed."""
    from sparring.model.hub import model_folder

    spec = config.models[name]
    files = [] if spec.path is None else sorted(file for file in model_folder(spec).iterdir() if file.is_file())
    stats = [(file.name, (status := file.stat()).st_size, status.st_mtime_ns) for file in files]
    kind = "native" if config.engine.exact else config.engine.kind  # a remote engine samples the same replies
    return repr((msgspec.to_builtins(spec), kind, config.run.device, stats))


def _check_recorded(folder: Path) -> None:
    """Refuse a folder with a run of another version, or with a run's weights but no store, because the run would start
    again from the beginning."""
    from sparring.store.connection import is_blank

    weights = next((path for kind in ("checkpoints/step-*", "model") for path in folder.glob(f"*/{kind}")), None)
    if is_blank(folder / STORE) and weights is not None:
        advice = "restore it from a copy, or choose another [run] name (--name)"
        raise refusal(str(folder / STORE), f"the record of the run that wrote {weights}", "an empty one", advice)


def check_recipe(config: RunConfig, worker: Sequence[str] = ()) -> list[str]:
    """Refuse a recipe for every error that can be found before a run. The same as `sparring check`; nothing is trained
    or written.

    Args:
        worker: command of the user's worker, which plays rollouts for the check; empty uses a worker of Sparring.
    """
    from sparring.stages.preflight.directory import check_directory

    async def checked() -> list[str]:
        facts = check_directory(Path(config.run.directory)) + _compare_with_folder(resolve(config))
        check_sinks(config.observe)
        with scratch() as folder, waiting("the check of the recipe"):
            run = msgspec.structs.replace(config.run, directory=str(folder))
            quiet = msgspec.structs.replace(config.observe, sinks=(), progress="off")  # `check_sinks` has checked them
            begun = Path(config.run.directory) / config.run.name
            async with opened(resolve(msgspec.structs.replace(config, run=run, observe=quiet)), begun) as context:
                from sparring.stages.preflight.run import check  # torch: not before what `opened` refuses

                return [*facts, *await rehearse(context, check, worker)]

    return block(checked())


def _compare_with_folder(config: RunConfig) -> list[str]:
    """Return sentences about a recipe and the run in its folder, if there is one."""
    from sparring.store.sqlite import SqliteStore

    folder = Path(config.run.directory) / config.run.name
    if not (folder / STORE).exists():
        return compare(folder, config, None)
    with closing(SqliteStore(folder / STORE, read_only=True)) as store:
        return compare(folder, config, store)
