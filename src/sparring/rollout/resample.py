"""Replay of recorded turns: samples them again without world or harness, and compares every bit (law 8)."""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Literal, cast

from sparring.generation import Completion, Delta, GenerateRequest, Recorded, Runs, Sampling
from sparring.protocols import Engine, Renderer
from sparring.types import Rollout, Segment, Trajectory

AT_ONCE = 1024
"""Maximum number of requests that the engine has at once."""

What = Literal["token", "logprob", "kept", "length"]


@dataclass(frozen=True, slots=True)
class Difference:
    """First difference of a replay from the record. `expected` is the recorded value; a log-probability is written with
    all its bits."""

    trajectory: str
    segment: int
    position: int
    what: What
    expected: str
    got: str

    def __str__(self) -> str:
        place = f"{self.trajectory}, segment {self.segment}, position {self.position}"
        return f"{place}: {self.what} {self.expected} -> {self.got}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTurn:
    """Recorded turn that a model of the run sampled."""

    trajectory: Trajectory
    segment: Segment

    @property
    def recorded(self) -> Recorded:
        """Versions of the weights that sampled the tokens and computed their keys and values."""
        assert self.segment.versions is not None
        return Recorded(versions=self.segment.versions, kv_versions=self.segment.kv_versions or self.segment.versions)

    @property
    def versions(self) -> set[int]:
        """Versions of the weights that sampled the tokens, as a set."""
        return set(self.recorded.versions.values)

    def under(self, version: int) -> RecordedTurn:
        """Return the turn as if `version` had sampled it, because a fresh engine serves any weights as version 0."""
        versions = Runs.of(version, len(self.segment.tokens))
        return replace(self, segment=replace(self.segment, versions=versions, kv_versions=None))

    def request(self) -> GenerateRequest:
        """Return the request that samples the turn again. An aborted turn is sampled up to its recorded length."""
        segment = self.segment
        sampling = segment.sampling or Sampling()
        if segment.finish_reason == "abort":
            sampling = replace(sampling, max_tokens=len(segment.tokens))
        return GenerateRequest(
            id=f"replay/{self.trajectory.id}/{segment.index}",
            tokens=prompt_of(self.trajectory, segment),
            sampling=sampling,
            recorded=self.recorded,
        )

    def compare(self, again: Completion) -> Difference | None:
        """Return the first difference between the turn and a completion, or None if all bits are equal."""
        segment = self.segment
        difference = partial(Difference, self.trajectory.id, segment.index)
        recorded = zip(segment.tokens, segment.logprobs or (), strict=True)
        for position, ((token, logprob), (token_again, logprob_again)) in enumerate(
            zip(recorded, zip(again.tokens, again.logprobs, strict=True), strict=False)
        ):
            if token != token_again:
                return difference(position, "token", str(token), str(token_again))
            if struct.pack("<d", logprob) != struct.pack("<d", logprob_again):
                return difference(position, "logprob", logprob.hex(), logprob_again.hex())
            ids, ids_again = (sets.ids(position) if sets else () for sets in (segment.kept, again.kept))
            if ids != ids_again:
                mismatched = sorted(set(ids) ^ set(ids_again))[:8]
                return difference(position, "kept", f"{len(ids)} ids", f"{len(ids_again)}, not the same: {mismatched}")
        lengths = len(segment.tokens), len(again.tokens)
        return None if lengths[0] == lengths[1] else difference(min(lengths), "length", *map(str, lengths))


def prompt_of(trajectory: Trajectory, segment: Segment) -> tuple[int, ...]:
    """Return the prompt of a segment: the ids from the root to its parent."""
    path: list[Segment] = []
    at = segment.parent
    while at is not None:
        path.append(trajectory.segments[at])
        at = trajectory.segments[at].parent
    return tuple(token for part in reversed(path) for token in part.tokens)


def turns_of(rollouts: Iterable[Rollout], model: str) -> Iterator[RecordedTurn]:
    """Yield the turns of rollouts that `model` sampled, without empty ones."""
    for rollout in rollouts:
        for trajectory in rollout.trajectories:
            for segment in trajectory.segments:
                if segment.model == model and segment.sampling is not None and segment.tokens:
                    yield RecordedTurn(trajectory=trajectory, segment=segment)


async def resample(turns: Iterable[RecordedTurn], engine: Engine, renderer: Renderer) -> Resampling:
    """Sample again all turns of the version that the engine serves."""
    resampling = Resampling(engine, renderer)
    resampling.add(turns)
    try:
        await resampling.under(engine.version)
    finally:
        resampling.stop()
    return resampling


class Resampling:
    """Replay of turns, each token under the version that sampled it, with a comparison of every bit.

        resampling = Resampling(engine, renderer)
        resampling.add(turns)               turns that begin with version 0 or a later one
        await resampling.under(0)
        await engine.pull(...)              version 1
        await resampling.under(1)
        resampling.stop()

    The engine holds a turn of several versions until the next version is served. Such turns are started after all other
    turns of their version, because they also ran together in the recorded run.

    Args:
        engine: engine with exact numerics. It must serve each version of the turns in order.
        renderer: renderer of the model, for stop strings and constraints.

    Attributes:
        across: number of replayed turns of several versions.
        crowded: number of turns that could not be compared, because the cache was too small and the engine computed
            keys and values again at other places than before.
    """

    def __init__(self, engine: Engine, renderer: Renderer) -> None:
        self._engine, self._renderer = engine, renderer
        self._by_version: defaultdict[int, list[tuple[int, RecordedTurn]]] = defaultdict(list)
        self._waiting: list[_WaitingTurn] = []
        self._added = 0
        self._differences: dict[int, Difference] = {}  # by the order of the turns
        self.turns = self.tokens = self.across = self.crowded = 0

    @property
    def num_left(self) -> int:
        """Number of turns whose first version was not served yet."""
        return sum(map(len, self._by_version.values()))

    @property
    def difference(self) -> Difference | None:
        """Difference of the first turn that differs, in order of addition; None if all bits are equal."""
        return self._differences[min(self._differences)] if self._differences else None

    @property
    def identical(self) -> bool:
        """True if there was a turn and every turn is equal in all bits."""
        return self.difference is None and not self.crowded and not self.num_left and self.turns > 0

    def add(self, turns: Iterable[RecordedTurn]) -> None:
        """Add turns whose first version is served now or later."""
        for turn in turns:
            self._added += 1
            self._by_version[turn.recorded.versions.values[0]].append((self._added, turn))

    async def under(self, version: int) -> None:
        """Sample all tokens of `version`, which the engine serves now."""
        turns = self._by_version.pop(version, [])
        alone = iter([(order, turn) for order, turn in turns if len(turn.versions) == 1])

        async def work() -> None:
            for order, turn in alone:
                self._compare(order, turn, await self._engine.generate(self._renderer.bind(turn.request())))

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        for order, turn in turns:
            if len(turn.versions) > 1:
                waiting = _WaitingTurn(turn)
                waiting.task = asyncio.get_running_loop().create_task(self._sample(order, waiting))
                self._waiting.append(waiting)
        await asyncio.gather(*(waiting.reach(version) for waiting in self._waiting))
        self._waiting = [waiting for waiting in self._waiting if not waiting.task.done()]

    def stop(self) -> None:
        """Cancel the turns that the engine holds. Safe to call twice."""
        for waiting in self._waiting:
            waiting.task.cancel()

    async def _sample(self, order: int, waiting: _WaitingTurn) -> None:
        """Sample a turn of several versions, and count its tokens as they arrive."""
        request = self._renderer.bind(waiting.turn.request())
        stream = cast(AsyncGenerator[Delta | Completion], self._engine.stream(request))
        try:
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Completion):
                        self._compare(order, waiting.turn, piece)
                    else:
                        waiting.tokens += len(piece.tokens)
                        waiting.grew.set()
        finally:
            waiting.grew.set()

    def _compare(self, order: int, turn: RecordedTurn, again: Completion) -> None:
        self.turns, self.tokens = self.turns + 1, self.tokens + len(turn.segment.tokens)
        self.across += len(turn.versions) > 1
        if again.kv_versions != turn.recorded.kv_versions and again.versions == turn.recorded.versions:
            self.crowded += 1
        elif (difference := turn.compare(again)) is not None:
            self._differences[order] = difference


class _WaitingTurn:
    """Turn of several versions that the engine holds, with the task that samples it."""

    task: asyncio.Task[None]

    def __init__(self, turn: RecordedTurn) -> None:
        self.turn = turn
        self.tokens, self.grew = 0, asyncio.Event()

    async def reach(self, version: int) -> None:
        """Wait until all tokens of versions up to `version` are sampled."""
        runs = self.turn.recorded.versions
        ends = zip(runs.values, accumulate(runs.lengths), strict=True)
        expected = max((end for sampled_by, end in ends if sampled_by <= version), default=0)
        while self.tokens < expected and not self.task.done():
            self.grew.clear()
            await self.grew.wait()
        if self.task.done():
            self.task.result()
