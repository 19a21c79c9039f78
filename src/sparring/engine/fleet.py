"""`Fleet`: several engines of one model that answer as one. Torch-free.

If the engine of a request dies or hangs, another engine continues the request after the tokens that were already sent.
Random numbers depend only on seed and position, so the turn has the same tokens as without the loss (law 3).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from sparring.engine.adapters.client import completion_of
from sparring.engine.members import E, FleetMember, FleetTurn, Keeper, Unkept
from sparring.engine.prompt_logprobs import prompt_logprobs
from sparring.engine.turn_pieces import completed, completion_alone, told_completion
from sparring.errors import EngineError, RequestRefused, WeightsError
from sparring.generation import Completion, Delta, GenerateRequest, ScoreRequest, Scores
from sparring.log import Report, log_event
from sparring.types import WeightRef

PROMPTS, CONVERSATIONS = 4096, 1 << 16
"""Numbers of prompts and of conversations whose engine is remembered."""

CATCH_UPS = 3
"""Number of failed attempts in a row to bring an engine that answers to the fleet's weights, before the keeper replaces
it."""

T = TypeVar("T")


class Fleet(Generic[E]):
    """Engines of one model that answer as one. Implements `Engine`.

    A conversation stays at the engine that has its KV cache, and a prompt at the engine that has read it, unless that
    engine is full. An engine that dies, hangs or fails an update is lost: it gets no request until it serves the
    fleet's weights again. For lost engines the fleet keeps the reference to the newest weights. A lost engine that
    answers gets these weights. The keeper replaces an engine that does not answer, or fails to load the weights
    `CATCH_UPS` times in a row. If no engine is left, requests and updates wait for the keeper; without a keeper they
    fail.

    Args:
        engines: engines of equal weights and numerics, closed with the fleet.
        absent: engines that do not answer yet. They join when they answer.
        room: number of requests at which an engine counts as full.
        silent_s: seconds without an answer to a ping after which an engine is lost.
        report: called when an engine is lost or comes back.

    Attributes:
        engines: all engines, absent ones too; an engine's number in events and metrics is its index here.
    """

    def __init__(
        self,
        engines: Sequence[E],
        *,
        absent: Sequence[E] = (),
        room: int = 128,
        silent_s: float = 10.0,
        keeper: Keeper[E] | None = None,
        report: Report = log_event,
    ) -> None:
        self.engines, self._keeper, self._waits = (*engines, *absent), keeper or Unkept(), keeper is not None
        self._back = asyncio.Event()
        late = "it has not answered yet"
        self._members = [FleetMember(e, n, late if e in absent else None) for n, e in enumerate(self.engines)]
        self._room, self._silent_s, self._report = room, silent_s, report
        self._homes: OrderedDict[str, FleetMember[E]] = OrderedDict()
        self._prompts: OrderedDict[int, FleetMember[E]] = OrderedDict()
        self._served = engines[0].version
        self._newest: WeightRef | None = None
        self._updating = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._catching_up: dict[FleetMember[E], asyncio.Task[None]] = {}
        self._moved = 0
        self._asleep = False
        self.closed = False

    @property
    def version(self) -> int:
        """Lowest version of the routed engines, those that get requests; of all engines if none is routed."""
        return min(member.engine.version for member in self._routed or self._members)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of all engines together: sums, and for maxima the highest; engines_now, the number of routed engines;
        and moved, the number of requests that continued at another engine. For each of several engines, under its
        number: completions, tokens (generated) and requests_now."""
        total = {"engines_now": float(len(self._routed)), "moved": float(self._moved)}
        for member in self._members:
            own = member.engine.metrics
            for name, value in own.items():
                before = total.get(name, 0.0)
                total[name] = max(before, value) if name.startswith("max_") else before + value
            if len(self._members) > 1:
                total[f"{member.number}/completions"] = own.get("completions", 0.0)
                total[f"{member.number}/tokens"] = own.get("generated_tokens", 0.0)
                total[f"{member.number}/requests_now"] = float(sum(bool(turn.id) for turn in member.turns))
        return total

    async def generate(self, request: GenerateRequest) -> Completion:
        return await completion_of(self._pieces(request, streams=False))

    def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Sample one turn in pieces. If the engine is lost and another engine cannot continue its turns (`continues`),
        the turn begins again; if a piece of the turn was already read, the request fails."""
        return self._pieces(request, streams=True)

    async def _pieces(self, request: GenerateRequest, *, streams: bool) -> AsyncIterator[Delta | Completion]:
        turn, told, rest = FleetTurn(request.id), list[Delta](), request
        while True:
            await self._someone()
            member, before = self._member_for(request, _newest(request, told)), tuple(told)
            engine, losses = member.engine, member.losses
            asked = engine.stream(rest) if streams or engine.continues else completion_alone(engine, rest)
            try:
                with self._at(member, turn):
                    async with aclosing(asked) as pieces:  # type: ignore[type-var]
                        while not isinstance(piece := await member.wait(turn, partial(anext, pieces)), Completion):
                            told.append(piece)
                            yield piece
                self._count_reply(member)
                yield completed(before, piece)
                return
            except RequestRefused:
                raise
            except EngineError as error:  # the engine may have been lost and come back since the request was sent
                with self._at(member, turn):  # where an abort finds it
                    if member.losses == losses and not await self._is_lost(member, error):
                        raise
                    if told and not engine.continues:
                        number = f"{len(told)} pieces that were read before {error}"
                        expected = f"request {request.id}: expected a turn that may begin again"
                        raise EngineError(f"{expected}, got {number}") from error
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

    async def score(self, request: ScoreRequest) -> Scores:
        while True:
            await self._someone()
            turn, member = FleetTurn(request.id), self._least(self._some_routed())
            losses = member.losses
            try:
                with self._at(member, turn):
                    scores = await member.wait(turn, partial(member.engine.score, request))
                self._count_reply(member)
                return scores
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
        """Serve new weights at all routed engines. Engines that fail are lost, unless all fail. Lost engines get the
        weights later. Raises WeightsError if no engine serves the new weights, or the engines are asleep. Raises
        EngineError if no engine serves the new weights, and the served version is unknown."""
        await self._someone()
        async with self._updating:
            if self._asleep:
                what = f"weights of {ref.model} version {ref.version}"
                raise WeightsError(f"{what}: expected engines that are awake, got ones that are asleep; wake them")
            await self._take(ref, self._some_routed())

    async def sleep(self) -> None:
        """Let all routed engines sleep. An engine that is lost meanwhile needs no sleep; an engine that comes back gets
        no requests until the others wake."""
        async with self._updating:
            routed = self._routed if self._waits else self._some_routed()
            self._asleep = True
            try:
                await asyncio.gather(*(self._tell(member, member.engine.sleep) for member in routed))
            except EngineError:
                self._asleep = False
                raise

    async def wake(self, ref: WeightRef) -> None:
        """Wake all engines with these weights. Engines that fail are lost, unless all fail: then sleeping engines stay
        asleep. If all engines were lost during their sleep, wait for new engines of the keeper."""
        async with self._updating:
            if self._routed or not self._waits:
                await self._take(ref, self._some_routed())
            self._newest, self._served, self._asleep = ref, ref.version, False  # it is of the whole model
        await self._someone()

    async def _take(self, ref: WeightRef, routed: Sequence[FleetMember[E]]) -> None:
        """Let engines serve weights, whether they are asleep or not. Engines that fail are lost; if all engines fail,
        raise one of their errors."""
        results = await asyncio.gather(*(self._wake(member, ref) for member in routed), return_exceptions=True)
        failed = {member: error for member, error in zip(routed, results, strict=True) if error is not None}
        for error in failed.values():
            if len(failed) == len(routed) or not isinstance(error, (WeightsError, EngineError)):
                raise error
        self._served = max(member.engine.version for member in routed if member not in failed)
        self._newest = ref
        for member, error in failed.items():
            self._lose(member, str(error))  # it may answer, and catches up as it is

    async def _wake(self, member: FleetMember[E], ref: WeightRef) -> None:
        with self._at(member, turn := FleetTurn("")):
            await member.wait(turn, partial(member.engine.wake, ref))

    async def drop(self, adapter: str) -> None:
        """Serve no new request with an adapter, at any routed engine."""
        for member in self._some_routed():
            await self._tell(member, partial(member.engine.drop, adapter))

    async def close(self) -> None:
        self.closed = True
        self._back.set()
        tasks = [task for task in (self._watching, *self._catching_up.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(member.engine.close() for member in self._members))

    # which engine

    @property
    def _routed(self) -> list[FleetMember[E]]:
        return [member for member in self._members if member.lost is None]

    async def _someone(self) -> None:
        """If no engine is routed, wait for new engines of the keeper."""
        while self._waits and not self._routed and not self.closed:
            self._keep_watch()
            self._back.clear()
            await self._back.wait()

    def _some_routed(self) -> list[FleetMember[E]]:
        """Return the routed engines. Raises EngineError if no engine is routed, or the fleet is closed."""
        if self.closed:
            raise EngineError("fleet: expected running engines, got closed ones; open another fleet")
        if routed := self._routed:
            return routed
        causes = "; ".join(f"{member.engine.place}: {member.lost}" for member in self._members)
        raise EngineError(f"fleet: expected an engine that answers, got none: {causes}")

    def _member_for(self, request: GenerateRequest, version: int | None) -> FleetMember[E]:
        """Choose the engine of a request among routed engines that serve `version` (None: any) or a newer version.
        Remember the engine for the request's conversation and prompt. Raises EngineError if no engine fits."""
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

    def _serving(self, version: int | None) -> list[FleetMember[E]]:
        return [member for member in self._routed if version is None or member.engine.version >= version]

    async def _until_served(self, version: int | None) -> None:
        """If no routed engine serves a version yet, wait for the end of the running update."""
        if not self._serving(version):
            async with self._updating:
                pass

    @staticmethod
    def _least(members: Sequence[FleetMember[E]]) -> FleetMember[E]:
        return min(members, key=lambda member: len(member.turns))

    async def _tell(self, member: FleetMember[E], ask: Callable[[], Awaitable[None]]) -> None:
        """Call an engine. An error is raised only if the engine is not lost."""
        try:
            with self._at(member, call := FleetTurn("")):
                await member.wait(call, ask)
        except EngineError as error:
            if not await self._is_lost(member, error):
                raise

    @contextmanager
    def _at(self, member: FleetMember[E], turn: FleetTurn) -> Iterator[None]:
        """Count a request at an engine within the context; the engine is watched meanwhile."""
        member.turns.add(turn)
        self._keep_watch()
        try:
            yield
        finally:
            member.turns.remove(turn)

    # which engines answer

    def _keep_watch(self) -> None:
        if not self.closed and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Ping engines that have requests or are lost, as long as there are such engines."""
        while watched := [member for member in self._members if member.turns or member.lost is not None]:
            await asyncio.gather(*map(self._look_at, watched))
            await asyncio.sleep(self._silent_s / 2)

    async def _look_at(self, member: FleetMember[E]) -> None:
        """Ping an engine. If it does not answer, count it as lost; if it is lost and answers, bring it to the fleet's
        weights."""
        if member.lost is None:
            await self._is_lost(member, None)
        elif member not in self._catching_up or self._catching_up[member].done():
            try:
                same = await self._ping(member)
                if self._asleep and same:  # a restarted one has no weights yet
                    await self._in_time(member.engine.sleep())
            except EngineError:
                self._keeper.lost(member.engine)
                return
            if not self._asleep:
                self._catching_up[member] = asyncio.create_task(self._catch_up(member, same))

    async def _is_lost(self, member: FleetMember[E], error: EngineError | None) -> bool:
        """Ping an engine whose request may have raised `error`, and return whether the engine is lost. If it is not
        lost, the error is of the request alone."""
        if member.lost is None:
            cause, silent = "", False
            try:
                if not await self._ping(member):
                    cause = "it was restarted"
            except EngineError as silence:
                cause, silent = str(silence), True
            if cause and member.lost is None and not self.closed:
                self._lose(member, cause if error is None else f"{error}; {cause}")
                if silent:
                    self._keeper.lost(member.engine)
        return member.lost is not None

    async def _ping(self, member: FleetMember[E]) -> bool:
        return await self._in_time(member.engine.ping())

    async def _in_time(self, answer: Awaitable[T]) -> T:
        """Wait for an engine's answer. Raises EngineError if there is no answer within `silent_s`."""
        try:
            async with asyncio.timeout(self._silent_s):
                return await answer
        except TimeoutError:
            raise EngineError(f"no answer within {self._silent_s:g} s") from None

    def _lose(self, member: FleetMember[E], cause: str) -> None:
        """Count an engine as lost: it gets no more requests, and waits for its answers end."""
        if member.lost is not None or self.closed:
            return
        member.lost, member.losses, member.has_replied = cause, member.losses + 1, False
        self._keep_watch()
        moved = sum(bool(turn.id) for turn in member.turns)
        for turn in member.turns:
            if turn.wait is not None:
                turn.wait.reschedule(asyncio.get_running_loop().time())
        self._tell_of(
            member, f"is left out, {moved} requests go on elsewhere", "engine lost", reason=cause, moved=moved
        )

    def _route(self, member: FleetMember[E]) -> None:
        member.lost, member.failures = None, 0
        self._back.set()
        self._tell_of(member, f"serves version {member.engine.version} and gets requests again", "engine back")

    def _tell_of(self, member: FleetMember[E], text: str, kind: str, reason: str = "", **facts: int) -> None:
        about = {"kind": kind, "engine": member.number, "node": member.engine.node, "at_step": self._served}
        who = f"{member.engine.place} {text} (engine {member.number} on {member.engine.node})"
        self._report(f"{who}: {reason}" if reason else who, {**about, "reason": reason, **facts})

    def _count_reply(self, member: FleetMember[E]) -> None:
        if not member.has_replied:
            member.has_replied = True
            self._keeper.replied(member.engine)

    async def _catch_up(self, member: FleetMember[E], same: bool) -> None:
        """Bring a lost engine to the fleet's weights. `same`: the engine's process was not restarted."""
        try:
            if not same:
                await member.engine.restore()
            while (ref := self._newest) is not None and (not same or member.engine.version != self._served):
                await member.engine.wake(ref)
                same = True
        except (WeightsError, EngineError) as error:
            member.lost, member.failures = str(error), member.failures + 1
            if member.failures % CATCH_UPS == 0:
                self._tell_of(member, "answers, but does not catch up", "engine does not catch up", str(error))
                self._keeper.lost(member.engine)
            return
        if not (self._updating.locked() or self._asleep):  # else it is looked at again
            self._route(member)


def _newest(request: GenerateRequest, told: Sequence[Delta]) -> int | None:
    """Return the version that sampled the last token of a turn. The rest of the turn must not be of an older version,
    because a replay serves versions in their order. None if no token was sampled, or the request names an adapter: a
    fleet does not know the versions of adapters."""
    return told[-1].versions.values[-1] if told and told[-1].versions.values and request.adapter is None else None


def _remember(places: OrderedDict[Any, FleetMember[E]], key: object, member: FleetMember[E], most: int) -> None:
    """Remember the engine of a key; with more than `most` keys, forget the key used longest ago."""
    places[key] = member
    places.move_to_end(key)
    if len(places) > most:
        places.popitem(last=False)
