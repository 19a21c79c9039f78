"""`Fleet`: several engines of one model that answer as one. Torch-free.

A request whose engine dies or stands still goes on at another one, after the tokens that were told. The engines' random
numbers depend on seed and position alone, so the turn has the tokens that it would have had (law 3).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from sparring.engine.adapters.client import completion_of
from sparring.engine.derived import prompt_logprobs
from sparring.engine.pieces import completed, told_completion
from sparring.errors import EngineError, RequestRefused, WeightsError
from sparring.generation import Completion, Delta, GenerateRequest, ScoreRequest, Scores
from sparring.protocols import Engine
from sparring.types import WeightRef

PROMPTS, CONVERSATIONS = 4096, 1 << 16
"""Numbers of prompts and of conversations whose engine is remembered."""

T = TypeVar("T")
_log = logging.getLogger("sparring.engine")


class FleetEngine(Engine, Protocol):
    """Engine of a fleet; an extension of `Engine`. Its deltas have versions."""

    @property
    def place(self) -> str:
        """Name for the user, such as its address."""
        ...

    async def ping(self) -> bool:
        """Return whether the process that answers is the one that was sent weights, and not a new one in its place.

        Raises:
            EngineError: none answers, or its engine is broken.
        """
        ...

    async def restore(self) -> None:
        """Send a new process the weights that the run began with, as version 0.

        Raises:
            WeightsError: they were refused.
            EngineError: no process answers.
        """
        ...

    async def drop(self, adapter: str) -> None:
        """Serve no new request with an adapter.

        Raises:
            EngineError: no adapter with this name is loaded.
        """
        ...


E = TypeVar("E", bound=FleetEngine)


@dataclass(eq=False, slots=True)
class _Turn:
    """Request in flight.

    Attributes:
        id: its id.
        wait: wait for its engine, which ends at once if the engine is lost.
    """

    id: str
    aborted: bool = False
    wait: asyncio.Timeout | None = None


@dataclass(eq=False, slots=True)
class _Member(Generic[E]):
    """Engine of a fleet.

    Attributes:
        lost: why no request is sent to it; None while it is routed.
        losses: number of times that it was lost.
        turns: requests that it answers.
    """

    engine: E
    lost: str | None = None
    losses: int = 0
    turns: set[_Turn] = field(default_factory=set)

    async def wait(self, turn: _Turn, ask: Callable[[], Awaitable[T]]) -> T:
        """Wait for an answer of the engine until it counts as lost.

        Raises:
            EngineError: the engine is lost, or its own error.
        """
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


class Fleet(Generic[E]):
    """Engines of one model that answer as one. Implements `Engine`.

    A conversation stays at the engine that has its KV cache, and a prompt at the engine that has read it, unless that
    engine is full. An engine that dies, stands still or fails an update is lost: it gets no request until it serves the
    fleet's weights again. For lost engines the fleet keeps the reference to the newest weights.

    Args:
        engines: engines of equal weights and numerics, closed with the fleet.
        room: number of requests at which an engine is full.
        silent_s: seconds without an answer to a ping after which an engine is lost.
        lost: called with an engine that is lost.
        report: called with a sentence when an engine is lost or comes back.

    Attributes:
        engines: the engines.
    """

    def __init__(
        self,
        engines: Sequence[E],
        *,
        room: int = 128,
        silent_s: float = 10.0,
        lost: Callable[[E], None] = lambda engine: None,
        report: Callable[[str], None] = _log.warning,
    ) -> None:
        self.engines, self._on_loss = engines, lost
        self._members = [_Member(engine) for engine in engines]
        self._room, self._silent_s, self._report = room, silent_s, report
        self._homes: OrderedDict[str, _Member[E]] = OrderedDict()
        self._prompts: OrderedDict[int, _Member[E]] = OrderedDict()
        self._served = engines[0].version
        self._newest: WeightRef | None = None
        self._updating = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._catching_up: dict[_Member[E], asyncio.Task[None]] = {}
        self._moved = 0
        self._closed = False

    @property
    def version(self) -> int:
        """Lowest version of the routed engines; of all engines if none is routed."""
        return min(member.engine.version for member in self._routed or self._members)

    @property
    def metrics(self) -> dict[str, float]:
        """Sums of the engines' metrics, and the highest of their maxima; engines_now, the number of routed engines; and
        moved, the number of requests that went on at another engine."""
        total = {"engines_now": float(len(self._routed)), "moved": float(self._moved)}
        for member in self._members:
            for name, value in member.engine.metrics.items():
                before = total.get(name, 0.0)
                total[name] = max(before, value) if name.startswith("max_") else before + value
        return total

    async def generate(self, request: GenerateRequest) -> Completion:
        return await completion_of(self.stream(request))

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        turn, told, rest = _Turn(request.id), list[Delta](), request
        while True:
            member, before = self._member_for(request, _newest(request, told)), tuple(told)
            losses = member.losses
            try:
                with self._at(member, turn):
                    async with aclosing(member.engine.stream(rest)) as pieces:  # type: ignore[type-var]
                        while not isinstance(piece := await member.wait(turn, partial(anext, pieces)), Completion):
                            told.append(piece)
                            yield piece
                yield completed(before, piece)
                return
            except RequestRefused:
                raise
            except EngineError as error:  # the engine may have been lost and come back since the request was sent
                with self._at(member, turn):  # where an abort finds it
                    if member.losses == losses and not await self._is_lost(member, error):
                        raise
                    await self._until_served(_newest(request, told))
            self._moved += 1
            ended = (told[-1].finish_reason if told else None) or ("abort" if turn.aborted else None)
            if ended is not None:
                whole = told_completion(told, ended)
                yield replace(whole, prompt_logprobs=await prompt_logprobs(self, request))
                return
            rest = request.after([token for delta in told for token in delta.tokens])

    async def abort(self, request: str) -> None:
        for member in self._members:
            turns = [turn for turn in member.turns if turn.id == request]
            for turn in turns:
                turn.aborted = True
            if turns:
                await self._tell(member, partial(member.engine.abort, request))

    async def fork(self, request: str, seeds: Mapping[str, int]) -> tuple[GenerateRequest, ...]:
        """Return requests that continue a running one, at its engine."""
        running = [member for member in self._members for turn in member.turns if turn.id == request]
        if self._closed or len(running) != 1:
            got = f"{len(running)}; send new requests"
            raise EngineError(f"fork of {request}: expected one running request of this id, got {got}")
        with self._at(running[0], call := _Turn("")):
            branches = await running[0].wait(call, partial(running[0].engine.fork, request, seeds))
        for name in seeds:
            _remember(self._homes, name, running[0], CONVERSATIONS)
        return branches

    async def score(self, request: ScoreRequest) -> Scores:
        while True:
            turn, member = _Turn(request.id), self._least(self._some_routed())
            losses = member.losses
            try:
                with self._at(member, turn):
                    return await member.wait(turn, partial(member.engine.score, request))
            except RequestRefused:
                raise
            except EngineError as error:  # the engine may have been lost and come back since the request was sent
                if member.losses == losses and not await self._is_lost(member, error):
                    raise
            self._moved += 1

    async def release(self, conversation: str) -> None:
        home = self._homes.pop(conversation, None)
        if home is not None and home.lost is None:
            await self._tell(home, partial(home.engine.release, conversation))

    async def pull(self, ref: WeightRef) -> None:
        """Serve other weights at all routed engines. Those that fail are lost, unless all fail. Lost engines catch up
        meanwhile.

        Raises:
            WeightsError: no engine serves the new weights.
            EngineError: as WeightsError; the served version of the engines is unknown.
        """
        async with self._updating:
            routed = self._some_routed()
            results = await asyncio.gather(*(self._pull(member, ref) for member in routed), return_exceptions=True)
            failed = {member: error for member, error in zip(routed, results, strict=True) if error is not None}
            for error in failed.values():
                if len(failed) == len(routed) or not isinstance(error, (WeightsError, EngineError)):
                    raise error
            self._served = max(member.engine.version for member in routed if member not in failed)
            self._newest = ref
            for member, error in failed.items():
                self._lose(member, str(error))

    async def _pull(self, member: _Member[E], ref: WeightRef) -> None:
        """Update one engine, which is watched meanwhile."""
        with self._at(member, turn := _Turn("")):
            await member.wait(turn, partial(member.engine.pull, ref))

    async def drop(self, adapter: str) -> None:
        """Serve no new request with an adapter.

        Raises:
            EngineError: an engine has not loaded the adapter.
        """
        for member in self._some_routed():
            await self._tell(member, partial(member.engine.drop, adapter))

    async def close(self) -> None:
        self._closed = True
        tasks = [task for task in (self._watching, *self._catching_up.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(member.engine.close() for member in self._members))

    # which engine

    @property
    def _routed(self) -> list[_Member[E]]:
        return [member for member in self._members if member.lost is None]

    def _some_routed(self) -> list[_Member[E]]:
        """Return the routed engines.

        Raises:
            EngineError: there is none.
        """
        if self._closed:
            raise EngineError("fleet: expected running engines, got closed ones; open another fleet")
        if routed := self._routed:
            return routed
        causes = "; ".join(f"{member.engine.place}: {member.lost}" for member in self._members)
        raise EngineError(f"fleet: expected an engine that answers, got none: {causes}")

    def _member_for(self, request: GenerateRequest, version: int | None) -> _Member[E]:
        """Choose the engine of a request, and remember it for its conversation and its prompt.

        Args:
            version: lowest version that it may serve; None for any.

        Raises:
            EngineError: there is none.
        """
        self._some_routed()
        routed, name, prompt = self._serving(version), request.conversation, hash(request.tokens)
        if not routed:
            expected = f"an engine of version {version}, which sampled the beginning of the turn"
            raise EngineError(f"request {request.id}: expected {expected}, got older ones")
        home = self._homes.get(name) if name is not None else None
        home = home or self._prompts.get(prompt)
        least = self._least(routed)
        if home not in routed or len(home.turns) >= self._room > len(least.turns):
            home = least
        if name is not None:
            _remember(self._homes, name, home, CONVERSATIONS)
        _remember(self._prompts, prompt, home, PROMPTS)
        return home

    def _serving(self, version: int | None) -> list[_Member[E]]:
        """Return the routed engines that serve a version or a newer one."""
        return [member for member in self._routed if version is None or member.engine.version >= version]

    async def _until_served(self, version: int | None) -> None:
        """Wait for the update under way if no routed engine serves a version yet."""
        if not self._serving(version):
            async with self._updating:
                pass

    @staticmethod
    def _least(members: Sequence[_Member[E]]) -> _Member[E]:
        return min(members, key=lambda member: len(member.turns))

    async def _tell(self, member: _Member[E], ask: Callable[[], Awaitable[None]]) -> None:
        """Ask an engine for what does not matter once it is lost."""
        try:
            with self._at(member, call := _Turn("")):
                await member.wait(call, ask)
        except EngineError as error:
            if not await self._is_lost(member, error):
                raise

    @contextmanager
    def _at(self, member: _Member[E], turn: _Turn) -> Iterator[None]:
        """Count a request at an engine, which is watched meanwhile."""
        member.turns.add(turn)
        self._keep_watch()
        try:
            yield
        finally:
            member.turns.remove(turn)

    # which engines answer

    def _keep_watch(self) -> None:
        if not self._closed and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Ping engines that have requests or are lost, while there are any."""
        while watched := [member for member in self._members if member.turns or member.lost is not None]:
            await asyncio.gather(*map(self._look_at, watched))
            await asyncio.sleep(self._silent_s / 2)

    async def _look_at(self, member: _Member[E]) -> None:
        """Leave an engine out that does not answer, and let a lost one catch up that does."""
        if member.lost is None:
            await self._is_lost(member, None)
        elif member not in self._catching_up or self._catching_up[member].done():
            try:
                same = await self._ping(member)
            except EngineError:
                return
            self._catching_up[member] = asyncio.create_task(self._catch_up(member, same))

    async def _is_lost(self, member: _Member[E], error: EngineError | None) -> bool:
        """Ping an engine, which may have raised an error; return whether it is lost. If not, the error is of the
        request alone."""
        if member.lost is None:
            cause = None
            try:
                if not await self._ping(member):
                    cause = "it was restarted"
            except EngineError as silence:
                cause = str(silence)
            if cause is not None:
                self._lose(member, cause if error is None else f"{error}; {cause}")
        return member.lost is not None

    async def _ping(self, member: _Member[E]) -> bool:
        """Ping an engine. Raises EngineError if it does not answer in time."""
        try:
            async with asyncio.timeout(self._silent_s):
                return await member.engine.ping()
        except TimeoutError:
            raise EngineError(f"no answer within {self._silent_s:g} s") from None

    def _lose(self, member: _Member[E], cause: str) -> None:
        """Send no more requests to an engine, and end the waits for it."""
        if member.lost is not None or self._closed:
            return
        member.lost, member.losses = cause, member.losses + 1
        self._keep_watch()
        self._report(f"{member.engine.place} is left out, {len(member.turns)} requests go on elsewhere: {cause}")
        self._on_loss(member.engine)
        for turn in member.turns:
            if turn.wait is not None:
                turn.wait.reschedule(asyncio.get_running_loop().time())

    def _route(self, member: _Member[E]) -> None:
        member.lost = None
        self._report(f"{member.engine.place} serves version {member.engine.version} and gets requests again")

    async def _catch_up(self, member: _Member[E], same: bool) -> None:
        """Bring a lost engine to the fleet's weights. `same`: its process was not restarted."""
        with suppress(WeightsError, EngineError):
            if not same:
                await member.engine.restore()
            while (ref := self._newest) is not None and (not same or member.engine.version != self._served):
                await member.engine.pull(ref)
                same = True
            if self._updating.locked():
                return  # it is looked at again
            self._route(member)


def _newest(request: GenerateRequest, told: Sequence[Delta]) -> int | None:
    """Return the version that sampled the last token of a turn, below which its rest must not fall: a replay serves
    versions in their order. None if there is no such version; versions of other adapters than the engine's own are not
    known to a fleet."""
    return told[-1].versions.values[-1] if told and told[-1].versions.values and request.adapter is None else None


def _remember(places: OrderedDict[Any, _Member[E]], key: object, member: _Member[E], most: int) -> None:
    """Remember the engine of a key, and forget the key that was used the longest ago if there are too many."""
    places[key] = member
    places.move_to_end(key)
    if len(places) > most:
        places.popitem(last=False)
