"""Members of a fleet: what it needs of an engine, and of whatever starts its engines again. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from sparring.errors import EngineError
from sparring.protocols import Engine

T = TypeVar("T")


class FleetEngine(Engine, Protocol):
    """Engine of a fleet; an extension of `Engine`. `node` is the name of its machine, "" before it has answered."""

    node: str

    @property
    def place(self) -> str:
        """Name for the user, such as its address."""
        ...

    @property
    def continues(self) -> bool:
        """Whether another engine goes on with a turn in its middle: deltas have versions, and the request for the rest
        has the tokens that this engine would have sampled."""
        ...

    async def ping(self) -> bool:
        """Return whether the process that answers is the one that was sent weights, and not a new one in its place.
        Raises EngineError if none answers, or its engine is broken."""
        ...

    async def restore(self) -> None:
        """Send a new process the weights that the run began with, as version 0.

        Raises:
            WeightsError: they were refused.
            EngineError: no process answers, or it computes otherwise.
        """
        ...

    async def drop(self, adapter: str) -> None:
        """Serve no new request with an adapter. Raises EngineError if no adapter with this name is loaded."""
        ...


E = TypeVar("E", bound=FleetEngine)
Kept = TypeVar("Kept", contravariant=True)


class Keeper(Protocol[Kept]):
    """Starter of a fleet's engines, which starts them again. Its methods return at once."""

    def lost(self, engine: Kept) -> None:
        """Replace an engine that does not answer, or cannot be brought to the fleet's weights. Called again as long as
        that is so."""

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
        id: its id; "" for another call, such as an update.
        wait: wait for its engine, which ends at once if the engine is lost.
    """

    id: str
    aborted: bool = False
    wait: asyncio.Timeout | None = None


@dataclass(eq=False, slots=True)
class FleetMember(Generic[E]):
    """Engine of a fleet.

    Attributes:
        lost: why no request is sent to it; None while it is routed.
        failures: number of times in a row that it was reached, and could not be brought to the fleet's weights.
        has_replied: whether it has answered a request since it joined the fleet or came back.
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
