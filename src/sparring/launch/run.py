"""A whole run: its folder, its stages in order, and what the command line asks of finished ones."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from sparring.envs.splits import Same, identity
from sparring.errors import BadInput, naming_memory, refusal
from sparring.launch.begun import as_begun, claim, compare, raised
from sparring.launch.block import block
from sparring.launch.checkpoint import CONFIG, STORE
from sparring.launch.rehearsal import rehearse
from sparring.launch.sameness import BY_MESSAGES, sameness_of
from sparring.observe.progress import progress
from sparring.observe.sinks.load import check_sinks, load_sinks
from sparring.observe.sinks.sink import Fanout
from sparring.recipe.load import load
from sparring.recipe.run_config import RunConfig, resolve
from sparring.stages.context import CHOSEN, TOLD, Context
from sparring.stages.data.contamination import SHOWN, note_shown
from sparring.stages.runtime.baselines import remember_others
from sparring.stages.runtime.elapsed import elapsing
from sparring.stages.runtime.summary import write_summary

if TYPE_CHECKING:
    from sparring.envs.rubrics.judges import Judges, Replies
    from sparring.harness.program import Address
    from sparring.protocols import Cluster, EnvFactory, Harness, Store
    from sparring.record.leases import Leases

T = TypeVar("T")
UNDER_WAY = "memory/under_way"
"""Under this key of the store, while stages run, what was said of the run's memory."""


def run_recipe(config: RunConfig) -> Path:
    """Run every stage that the run's folder does not have yet, check first. The same as `sparring run`.

    Returns:
        The run's folder, with `summary.json` in it.

    Raises:
        BadInput: something is wrong that can be known before the work starts.
    """
    return block(_run(resolve(config)))


def run_with_earlier(config: RunConfig) -> Path:
    """Run the recipes of `[run] after`, and theirs, and then this one.

    Args:
        config: of the last run.

    Returns:
        Its folder.

    Raises:
        BadInput: as `run_recipe`, for any of them, or a recipe waits for itself.
    """
    for earlier in _earlier(config, ()):
        run_recipe(earlier)
    return run_recipe(config)


def _earlier(config: RunConfig, begun: tuple[str, ...]) -> list[RunConfig]:
    """Return the recipes that `config` waits for, and theirs before them: all are read before any is run."""
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
        recipes += [*_earlier(after, (*begun, recipe)), after]
    return recipes


async def _run(config: RunConfig) -> Path:
    there = (Path(config.run.directory) / config.run.name).exists()
    async with opened(config) as context:
        changes = raised(context.folder, config)
        if changes or any(context.done(stage) is None for stage in config.run.stages):
            from sparring.stages.preflight.run import check  # not before a folder in use or a wrong world is refused

            try:
                facts = await rehearse(context, check)
            except BadInput:
                if not there:
                    shutil.rmtree(context.folder, ignore_errors=True)  # while its lock is held
                raise
            for fact in facts:
                context.sink.event("check", fact)
        claim(context, changes)  # not before: a run that was refused may be corrected and started again
        remember_others(context)
        with _telling_memory(context):
            async with answered_outside(config, context.folder, context.sink.event):
                for stage in config.run.stages:
                    if context.done(stage) is None:
                        await _stage(context, stage)
        if context.store.get(SHOWN) is None:  # an evaluation has noted it
            note_shown(context, {})
        write_summary(context)
        return context.folder


@contextmanager
def _telling_memory(context: Context) -> Iterator[None]:
    """Keep the run's memory warning in the store while stages run: an error for want of memory repeats it, and so does
    the next process if this one was killed, which is likely the kernel's doing.

    Raises:
        InfraError: memory ran out.
    """
    warning = context.store.get(TOLD)
    if (before := context.store.get(UNDER_WAY)) is not None:
        context.sink.event("run", f"the process before this one was killed; before it began, it was told: {before}")
    context.store.put(UNDER_WAY, warning)
    try:
        with naming_memory(str(warning)):
            yield
    finally:
        context.store.put(UNDER_WAY, None)


async def _stage(context: Context, name: str) -> None:
    """Run one stage and record its result; its wall clock is kept even when it is stopped or killed."""
    from sparring.stages.models.adapters import show_adapter

    module = importlib.import_module(f"sparring.stages.{name}")
    try:
        async with elapsing(context.store, name):
            result = await module.run(context)
            show_adapter(context, name)
    finally:
        try:
            await context.judges.close()
        finally:
            await context.cluster.close()
    context.store.put(f"stage/{name}", result)


@asynccontextmanager
async def opened(config: RunConfig, begun: Path | None = None) -> AsyncIterator[Context]:
    """Open the parts of a run, its folder locked for this process, closed at the end.

    Args:
        begun: folder of the run whose tasks these are; None: the run's own.

    Raises:
        BadInput: another process runs in the folder, it holds a run with another config, or it cannot be made.
    """
    from sparring.envs.rubrics.judges import Judges
    from sparring.harness.by_environment import mounts_of
    from sparring.rollout.load import CappedBoxes
    from sparring.sandbox.bubblewrap import BubblewrapBoxes
    from sparring.store.sqlite import SqliteStore

    def open_model(name: str) -> Awaitable[Replies]:
        return _open_model(config, cluster, name)

    folder = Path(config.run.directory) / config.run.name
    config = as_begun(begun or folder, config)
    judges = Judges(open_model)
    same = sameness_of(begun or folder)
    factory, harness = _worlds(config, judges, same)
    _make(folder)
    store = SqliteStore(folder / STORE)
    judges.remember(store, partial(_who, config))
    try:
        compare(folder, config, store)
        if same is identity and (folder / CONFIG).is_file():
            store.put(BY_MESSAGES, True)
        config, cluster = _placed(config, store)
        recipe = msgspec.to_builtins(config)
        sinks = load_sinks(config.observe, folder, name=config.run.name, recipe=recipe)
        sink = Fanout([*sinks, progress(config.observe)])
        boxes = CappedBoxes(BubblewrapBoxes(config.sandbox, mounts_of(harness)), config.sandbox.starting)
        try:
            yield Context(
                config=config,
                folder=folder,
                store=store,
                sink=sink,
                cluster=cluster,
                boxes=boxes,
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


def _placed(config: RunConfig, store: Store) -> tuple[RunConfig, Cluster]:
    """Return a recipe with what is left to this machine, and the cluster that computes on it."""
    from sparring.cluster.inline import InlineCluster

    if not config.train.token_budget:
        from sparring.stages.preflight.token_budget import sized  # torch

        config, why = sized(config)
        store.put(CHOSEN, why)
    return config, InlineCluster(
        models=config.models,
        train=config.train,
        engine=config.engine,
        device=config.run.device,
        threads=config.run.threads,
    )


def _make(folder: Path) -> None:
    """Make the folder of a run, or find that it has its record.

    Raises:
        BadInput: it cannot be made, or its record is gone.
    """
    from sparring.stages.preflight.directory import check_directory

    check_directory(folder.parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal("run.directory", "a writable folder", str(error), "choose another") from error
    _check_recorded(folder)


def _worlds(config: RunConfig, judges: Judges, same: Same) -> tuple[EnvFactory, Harness]:
    from sparring.envs.domains import Domains
    from sparring.envs.registry import load_env
    from sparring.envs.roles import check_roles
    from sparring.harness.by_environment import HarnessByEnvironment
    from sparring.harness.load import load_harness
    from sparring.tasks.files import read_rows

    factories = {key: load_env(env, read_rows, judges, same) for key, env in config.environments.items()}
    programs = Path(config.rollout.programs)
    open_door = partial(_open_door, config.rollout.models)
    harnesses = {
        key: load_harness(
            config.harness_of(_name_of(key)),
            check_roles(each.make()),
            open_door,
            programs,
            _leases,
            config.rollout.shown_to_workers,
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
    """Open a session to programs; the gateway is imported by the first that needs it. `of_run`: names of models that
    the run's recipe adds to those of the program."""
    from sparring.gateway.server import open_door

    return open_door(session, models={**of_run, **models, **of_run}, leave_out=leave_out)


def _leases() -> Leases | None:
    """Return the leases of workers; None where no server for them is there."""
    from sparring.gateway.server import gateway_here

    return gateway_here().workers.leases


@asynccontextmanager
async def answered_outside(
    config: RunConfig,
    folder: Path,
    tell: Callable[[str, str], None],
    *,
    gateway_too: bool = True,
    keys_of: Path | None = None,
) -> AsyncIterator[None]:
    """Answer programs elsewhere for as long as the context lasts: workers and whoever rewards rollouts, where the
    recipe lets them, and `sparring gateway` where it names one, which answers them then.

    Args:
        folder: in which address and keys are written.
        tell: called with `run` or `gateway`, and the address.
        gateway_too: whether `sparring gateway` is answered.
        keys_of: the folder whose keys are taken, where it has some; None: those of `folder`.
    """
    workers = "workers" in config.harnesses
    gateway = config.rollout.gateway if gateway_too else ""
    async with AsyncExitStack() as stack:
        if workers or config.rollout.rewards_within_s is not None:
            from sparring.launch.outside import outside

            await stack.enter_async_context(outside(config.rollout, folder, tell, gateway, keys_of))
        if gateway:
            from sparring.gateway.proxied import proxied

            await stack.enter_async_context(proxied(folder, gateway, partial(tell, "gateway")))
        yield


def _name_of(key: str) -> str:
    """Return the name of the environment under a key of `RunConfig.environments`; of the only one, nothing."""
    return key.partition(".")[2]


def _by_domain(parts: Mapping[str, T]) -> dict[str, T]:
    """Return parts by the names of several environments in the place of their keys."""
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


def _who(config: RunConfig, name: str) -> str:
    """Describe a model of `[models]` by its settings and, if they are on this machine, its files. Changes on a server
    stay unseen."""
    from sparring.model.hub import model_folder

    spec = config.models[name]
    files = [] if spec.path is None else sorted(file for file in model_folder(spec).iterdir() if file.is_file())
    stats = [(file.name, (status := file.stat()).st_size, status.st_mtime_ns) for file in files]
    return repr((msgspec.to_builtins(spec), config.engine.kind, config.run.device, stats))


def _check_recorded(folder: Path) -> None:
    """Refuse a folder with the weights of a run whose record is gone: it would silently begin anew.

    Raises:
        BadInput: the record is gone.
        StoreError: it is damaged.
    """
    from sparring.store.cut import is_blank

    weights = next((path for kind in ("checkpoints/step-*", "model") for path in folder.glob(f"*/{kind}")), None)
    if weights is not None and is_blank(folder / STORE):
        do = "restore it from a copy, or choose another [run] name (--name)"
        raise refusal(str(folder / STORE), f"the record of the run that wrote {weights}", "an empty one", do)


def check_recipe(config: RunConfig, worker: Sequence[str] = ()) -> list[str]:
    """Refuse a recipe for everything that can be known to be wrong before a run, as `sparring check`. Trains and leaves
    nothing.

    Args:
        worker: command of a worker that plays what workers will; empty: one of Sparring's does.

    Raises:
        BadInput: what a run would be refused for.
    """
    import tempfile

    from sparring.stages.preflight.directory import check_directory

    async def checked() -> list[str]:
        check_directory(Path(config.run.directory))
        facts = _compared(resolve(config))
        check_sinks(config.observe)
        with tempfile.TemporaryDirectory() as folder:
            run = msgspec.structs.replace(config.run, directory=folder)
            quiet = msgspec.structs.replace(config.observe, sinks=(), progress="off")  # their libraries were looked for
            begun = Path(config.run.directory) / config.run.name
            async with opened(resolve(msgspec.structs.replace(config, run=run, observe=quiet)), begun) as context:
                from sparring.stages.preflight.run import check  # torch: not before what `opened` refuses

                return [*facts, *await rehearse(context, check, worker)]

    return block(checked())


def _compared(config: RunConfig) -> list[str]:
    """Return what is to be said of a recipe for the run that its folder has, if it has one.

    Raises:
        BadInput: the folder has a run with another recipe.
    """
    from sparring.store.sqlite import SqliteStore

    folder = Path(config.run.directory) / config.run.name
    if not (folder / STORE).exists():
        return compare(folder, config, None)
    with closing(SqliteStore(folder / STORE, read_only=True)) as store:
        return compare(folder, config, store)
