"""Members of a fleet, and its interfaces to an engine and to a keeper, which restarts engines. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from sparring.errors import EngineError
from sparring.protocols import Engine

T = TypeVar("T")


class FleetEngine(Engine, Protocol):
    """Engine of a fleet; an extension of `Engine`. `node` is the name of the engine's machine, "" before its first
    answer."""

    node: str

    @property
    def place(self) -> str:
        """Name of the engine in messages, such as its address."""
        ...

    @property
    def continues(self) -> bool:
        """Whether another engine can continue a turn of this engine with the same tokens. Deltas then have versions."""
        ...

    async def ping(self) -> bool:
        """Return whether the process that answers is the one that got the weights, and not a restarted one. Raises
        EngineError if no process answers, or its engine is broken."""
        ...

    async def restore(self) -> None:
        """Send the run's first weights to a new process, as version 0. Raises WeightsError if the process refused the
        weights. Raises EngineError if no process answers, or its numerics differ from the run's."""
        ...

    async def drop(self, adapter: str) -> None:
        """Serve no new request with an adapter. Raises EngineError if no adapter with this name is loaded."""
        ...


E = TypeVar("E", bound=FleetEngine)
Kept = TypeVar("Kept", contravariant=True)


class Keeper(Protocol[Kept]):
    """Owner of a fleet's engine processes, which restarts them. Its methods return at once."""

    def lost(self, engine: Kept) -> None:
        """Replace an engine that does not answer, or fails to load the fleet's weights. The fleet calls this again
        until the engine is back."""

    def replied(self, engine: Kept) -> None:
        """Note that an engine has answered a request, for the first time since it joined the fleet or came back."""


class Unkept:
    """Keeper of servers that somebody else starts. Implements `Keeper`."""

    def lost(self, engine: object) -> None:
        pass

    def replied(self, engine: object) -> None:
        pass


@dataclass(eq=False, slots=True)
class FleetTurn:
    """Request in flight.

    Attributes:
        id: id of the request; "" for another call, such as an update.
        wait: timeout of the wait for the engine, which is ended at once if the engine is lost.
    """

    id: str
    aborted: bool = False
    wait: asyncio.Timeout | None = None


@dataclass(eq=False, slots=True)
class FleetMember(Generic[E]):
    """Engine of a fleet.

    Attributes:
        lost: reason why the engine gets no requests; None while it gets requests (is routed).
        failures: number of times in a row that the engine answered, but failed to load the fleet's weights.
        has_replied: whether the engine has answered a request since it joined the fleet or came back.
    """

    engine: E
    number: int
    lost: str | None = None
    losses: int = 0
    failures: int = 0
    has_replied: bool = False
    turns: set[FleetTurn] = field(default_factory=set)

    async def wait(self, turn: FleetTurn, ask: Callable[[], Awaitable[T]]) -> T:
        """Wait for an answer of the engine. Raises EngineError as soon as the engine counts as lost."""
        if self.lost is None:
            try:
                async with asyncio.timeout(None) as turn.wait:
                    return await ask()
            except TimeoutError:
                if self.lost is None:
                    raise
            finally:
                turn.wait = None
        raise EngineError(f"{self.engine.place}: {self.lost}")
