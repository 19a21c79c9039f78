"""Loader `[rollout] harness` -> `Harness`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sparring.errors import BadInput, HarnessError, boundary, refusal
from sparring.harness.chat import ChatHarness
from sparring.harness.clients import CLIENTS, clients_of, with_clients
from sparring.harness.preset import KEY, preset_names
from sparring.harness.program import OpenDoor, load_program
from sparring.harness.workers import NAME as WORKERS
from sparring.harness.workers import WorkerHarness
from sparring.protocols import Episode, Harness
from sparring.record.leases import Leases
from sparring.user_files.named import named

BUILT_IN: dict[str, type[Harness]] = {"chat": ChatHarness}
EXPECTED = (
    "a coroutine function `async def name(episode)`, which may have further parameters of the names "
    f"{', '.join(CLIENTS)}, or a class with `async def run(self, episode)`"
)


class CallableHarness:
    """Harness that runs `function(episode)`, which opens the world if it needs one. Everything sampled by
    `episode.session(role)` is recorded. Implements `protocols.Harness`."""

    def __init__(self, function: Callable[[Episode], Awaitable[None]], name: str | None = None) -> None:
        self._function = function
        self.name = name or getattr(function, "__qualname__", type(function).__name__)

    async def run(self, episode: Episode) -> None:
        """Hold the conversation to its end.

        Raises:
            HarnessError: the function raised an untyped error.
        """
        with boundary(HarnessError, f"harness {self.name}"):
            await self._function(episode)


def load_harness(
    name: str,
    roles: Sequence[str],
    open_door: OpenDoor | None = None,
    programs: Path = Path(".harnesses"),
    leases: Callable[[], Leases | None] = lambda: None,
    data_fields: Sequence[str] = (),
    *,
    calls_from_code: bool = False,
) -> Harness:
    """Return the harness of a recipe, one object for all rollouts of a run.

    Args:
        name: `[rollout] harness`: `chat`, `workers`, the name of a preset, `path/to/preset.toml`, `package.module:name`
            or `path/to/file.py:name`.
        open_door: opens a session to a client outside this process; None without a gateway.
        programs: folder in which agent programs are searched before PATH.
        leases: returns the run's leases for workers, or None without a server.
        data_fields: fields of a task's data that its worker may see.
        calls_from_code: whether the model of an agent program or a worker writes code that calls the world's tools.

    Raises:
        BadInput: the harness does not exist or has the wrong type, its program is not installed, or it cannot play
            these roles.
    """
    is_program = name in preset_names() or name.endswith(".toml")
    if (name == WORKERS or is_program) and len(roles) > 1:
        do = f"name one that uses episode.session(role) for each: {KEY} = 'file.py:function'"
        raise refusal(KEY, f"a harness for the roles {', '.join(roles)}", f"{name!r}, which speaks for one role", do)
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if name == WORKERS and open_door is not None:
        return WorkerHarness(open_door, leases, data_fields, calls_from_code=calls_from_code)
    if is_program and open_door is not None:
        return load_program(name, programs, open_door, calls_from_code=calls_from_code)
    if ":" not in name:
        names = ", ".join(sorted((*BUILT_IN, WORKERS, *preset_names())))
        expected = f"one of {names}, or package.module:name, path/to/file.py:name or path/to/preset.toml"
        raise refusal(KEY, expected, repr(name), "correct it")
    return CallableHarness(_run_of(named(name, KEY), name, open_door), name)


def _run_of(value: Any, name: str, open_door: OpenDoor | None) -> Callable[[Episode], Awaitable[None]]:
    """Return the function that runs an episode: the user's, with its clients filled in, or `run` of an instance of the
    user's class.

    Raises:
        BadInput: the value is neither a coroutine function nor a class whose `run` is one.
    """
    if isinstance(value, type) and inspect.iscoroutinefunction(getattr(value, "run", None)):
        with boundary(BadInput, KEY, f"a class {name} that is made without arguments", "correct it"):
            value = value().run
    if not inspect.iscoroutinefunction(value):
        raise refusal(KEY, EXPECTED, f"{type(value).__name__} {name}", "name one")
    clients = clients_of(value, name)
    if not clients:
        run: Callable[[Episode], Awaitable[None]] = value
        return run
    if open_door is None:
        raise refusal(KEY, "a run with a gateway", f"{name}, which wants {', '.join(clients)}", "run it by a recipe")
    return partial(with_clients, value, clients, open_door)
