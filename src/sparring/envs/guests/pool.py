"""Guests of one environment: as many as its worlds need."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sparring.envs.guests.host import declared
from sparring.envs.guests.process import Guest, GuestKeeper
from sparring.errors import BadInput, boundary, refusal
from sparring.types import DEFAULT_ROLES

ADAPTERS = Path(__file__).parent / "adapters"


class GuestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env.guest]`: a world of other people, in an interpreter of its own."""

    url: str = ""
    """Address of a running OpenEnv server, `ws://HOST:PORT`, instead of `command` and `python`."""

    command: str = ""
    """Adapter that ships with Sparring, such as `gymnasium`, or `path/to/file.py` (docs/guests.md)."""

    python: str = ""
    """Interpreter of the guest: the path of a Python with the world's packages."""

    processes: int = 0
    """Number of guests over which worlds are spread that may share a process (`REENTRANT`); 0: one for each CPU. Every
    other world has a guest of its own."""

    variables: dict[str, str] = {}
    """Environment variables of the guest beside PATH, HOME, TMPDIR, TZ and those of the language. It gets no other
    variable of the run."""

    def __post_init__(self) -> None:
        if bool(self.url) == bool(self.command) or bool(self.command) != bool(self.python):
            raise ValueError("give command and python, or url")
        if self.processes < 0:
            raise ValueError(f"processes must be 0 or more, got {self.processes}")


class Guests:
    """Guests of one environment, started when a world needs one.

    Attributes:
        name: name of the guest, for errors and tasks.
        constants: constants that the adapter declares, such as `REENTRANT`.
        functions: names of the adapter's functions and classes.

    Raises:
        BadInput: there is no such adapter or interpreter.
    """

    def __init__(self, config: GuestConfig) -> None:
        path = Path(config.command)
        if path.suffix != ".py":
            path = ADAPTERS / f"{config.command}.py"
        if not path.is_file():
            known = ", ".join(sorted(each.stem for each in ADAPTERS.glob("[a-z]*.py")))
            raise refusal(
                "env.guest.command", f"one of {known}, or path/to/file.py", repr(config.command), "correct it"
            )
        with boundary(BadInput, "env.guest.command", f"a Python file {path}", "correct it"):
            self.constants, self.functions = declared(str(path))
        self.name = f"guest {path.stem}"
        self._config = config
        self._keeper = GuestKeeper(_python(config.python), path.resolve(), config.variables)
        weakref.finalize(self, self._keeper.end)
        self._is_shared = bool(self.constants.get("REENTRANT", False))
        self._shared: dict[asyncio.AbstractEventLoop, list[Guest | None]] = {}
        self._starts: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}  # a lock belongs to one event loop

    def roles_with(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the roles of the adapter's worlds: its function `roles`, or one."""
        return tuple(self.ask("roles", settings)) if "roles" in self.functions else DEFAULT_ROLES

    def ask(self, function: str, arguments: Mapping[str, Any]) -> Any:
        """Return the answer of one of the adapter's functions, blocking. Raises EnvError if it fails."""
        return self._keeper.ask(function, arguments)

    async def take(self, number: int) -> Guest:
        """Return the guest of a world, by the world's number. Raises GuestFailed if it does not start."""
        if not self._is_shared:
            return await self._new()
        loop = asyncio.get_running_loop()
        guests = self._shared.setdefault(loop, [None] * (self._config.processes or os.cpu_count() or 1))
        place = number % len(guests)
        async with self._starts.setdefault(loop, asyncio.Lock()):
            guest = guests[place]
            if guest is None or guest.failure:
                guest = guests[place] = await self._new()
        return guest

    async def _new(self) -> Guest:
        guest = Guest(self._keeper, is_shared=self._is_shared)
        await guest.start()
        return guest


def _python(name: str) -> Path:
    """Return an interpreter. Raises BadInput if it does not exist."""
    path = Path(name)
    if os.sep not in name or not os.access(path, os.X_OK):
        do = "name the path of a Python with the world's packages (docs/guests.md)"
        raise refusal("env.guest.python", "the path of an interpreter", repr(name), do)
    return path.absolute()
