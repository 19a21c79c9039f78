"""Replay: recorded turns are sampled again, without world or harness, and compared bit by bit (law 8)."""

from __future__ import annotations

import asyncio
import math
import struct
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, cast

from sparring.generation import Completion, Delta, GenerateRequest, Recorded, Runs, Sampling
from sparring.protocols import Engine, Renderer
from sparring.types import Rollout, Segment, Trajectory

AT_ONCE = 1024
"""Number of requests that are with the engine at once."""

What = Literal["token", "logprob", "kept", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """First place where a replay left the record. `expected` is the record's; a log-probability stands with its
    bits."""

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
    """Recorded turn that a model of ours sampled. `order` is its place among those that are compared."""

    trajectory: Trajectory
    segment: Segment
    order: int = 0

    @property
    def recorded(self) -> Recorded:
        """Versions under which its tokens were sampled."""
        assert self.segment.versions is not None
        return Recorded(versions=self.segment.versions, kv_versions=self.segment.kv_versions or self.segment.versions)

    @property
    def versions(self) -> set[int]:
        """Versions that sampled it."""
        return set(self.recorded.versions.values)

    @property
    def is_across(self) -> bool:
        """True if several versions sampled it."""
        return len(self.versions) > 1

    @property
    def is_exact(self) -> bool:
        """False if two versions read its prompt, and the record does not say which of them read what: so it was before
        a prompt that an update met was read again from its beginning."""
        versions = self.recorded.versions.expand()
        kv = self.recorded.kv_versions.expand()
        begun = [at for at in range(len(kv)) if at == 0 or kv[at] != kv[at - 1]]
        return all(versions[at] == kv[at] for at in begun)

    def under(self, version: int) -> RecordedTurn:
        """Return the turn as if `version` had sampled it: a fresh engine serves any weights as version 0."""
        versions = Runs.of(version, len(self.segment.tokens))
        return replace(self, segment=replace(self.segment, versions=versions, kv_versions=None))

    def request(self) -> GenerateRequest:
        """Return the request that samples the turn again. One that was cut short samples as many tokens as it had."""
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
        """Return the first difference between the turn and a completion; None if all bits agree."""
        segment = self.segment

        def difference(position: int, what: What, expected: str, got: str) -> Difference:
            return Difference(
                trajectory=self.trajectory.id,
                segment=segment.index,
                position=position,
                what=what,
                expected=expected,
                got=got,
            )

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
    """Return the ids that a segment was sampled after: all from the root to its parent."""
    path: list[Segment] = []
    at = segment.parent
    while at is not None:
        path.append(trajectory.segments[at])
        at = trajectory.segments[at].parent
    return tuple(token for part in reversed(path) for token in part.tokens)


def turns_of(rollouts: Iterable[Rollout], model: str) -> Iterator[RecordedTurn]:
    """Yield the turns of rollouts that `model` sampled, and at least one token in each."""
    for rollout in rollouts:
        for trajectory in rollout.trajectories:
            for segment in trajectory.segments:
                if segment.model == model and segment.sampling is not None and segment.tokens:
                    yield RecordedTurn(trajectory=trajectory, segment=segment)


async def resample(turns: Iterable[RecordedTurn], engine: Engine, renderer: Renderer) -> Resampling:
    """Sample those turns again that the engine's weights sampled. The engine and the renderer are those of
    `Resampling`.

    Raises:
        EngineError: the engine failed.
    """
    resampling = Resampling(engine, renderer)
    resampling.add(turns)
    try:
        await resampling.under(engine.version)
    finally:
        resampling.stop()
    return resampling


class Resampling:
    """Samples turns again, each token under the version that sampled it, and compares every bit.

        resampling = Resampling(engine, renderer)
        resampling.add(turns)               all that version 0 or a later one sampled
        await resampling.under(0)
        await engine.pull(...)              version 1
        await resampling.under(1)
        resampling.stop()

    Turns that several versions sampled are held by the engine until the next one is served. They begin after all others
    of their version are done, because they held a place together in the run that is recorded, too.

    Args:
        engine: serves the model; in exact numerics. Each version that sampled a turn is served in turn.
        renderer: of the model: reads the stop strings and constraints that turns were sampled with.

    Attributes:
        turns: number of turns that were sampled again.
        tokens: number of their tokens.
        across: number of turns that several versions sampled.
        unclear: number of turns that cannot be sampled again, because two versions read their prompt.
        crowded: number of turns whose keys and values had to be computed again where they were not before, because the
            cache is too small for all that is held.
        difference: of the first turn that differs, in the order in which they were added; None as long as all bits
            agree.
    """

    def __init__(self, engine: Engine, renderer: Renderer) -> None:
        self._engine, self._renderer = engine, renderer
        self._by_version: defaultdict[int, list[RecordedTurn]] = defaultdict(list)
        self._held: list[_Held] = []
        self.turns = self.tokens = self.across = self.unclear = self.crowded = 0
        self.difference: Difference | None = None
        self._first_different = math.inf
        self._added = 0

    @property
    def num_left(self) -> int:
        """Number of turns whose version was not served yet."""
        return sum(map(len, self._by_version.values()))

    @property
    def identical(self) -> bool:
        """True if every turn came back to the bit, and there was one."""
        return self.difference is None and not self.crowded and not self.num_left and self.turns > 0

    def add(self, turns: Iterable[RecordedTurn]) -> None:
        """Take turns, whose first versions have not been served yet or are served now."""
        for turn in turns:
            if turn.is_exact:
                self._added += 1
                self._by_version[turn.recorded.versions.values[0]].append(replace(turn, order=self._added))
            else:
                self.unclear += 1

    async def under(self, version: int) -> None:
        """Sample all that `version` sampled; it is what the engine serves now.

        Raises:
            EngineError: the engine failed.
        """
        turns = self._by_version.pop(version, [])
        alone = iter([turn for turn in turns if not turn.is_across])

        async def work() -> None:
            for turn in alone:
                self._compare(turn, await self._engine.generate(self._renderer.bind(turn.request())))

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        self._held += [_Held(turn, self._stream(turn)) for turn in turns if turn.is_across]
        await asyncio.gather(*(held.sampled(version) for held in self._held))
        self._held = [held for held in self._held if not held.over]

    def stop(self) -> None:
        """Drop the turns that are held. Safe to call twice."""
        for held in self._held:
            held.task.cancel()

    async def _stream(self, turn: RecordedTurn) -> AsyncGenerator[int]:
        """Sample a turn that several versions sample: yield the number of tokens of each piece."""
        request = self._renderer.bind(turn.request())
        stream = cast(AsyncGenerator[Delta | Completion], self._engine.stream(request))
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                if isinstance(piece, Completion):
                    self._compare(turn, piece)
                else:
                    yield len(piece.tokens)

    def _compare(self, turn: RecordedTurn, again: Completion) -> None:
        self.turns, self.tokens = self.turns + 1, self.tokens + len(turn.segment.tokens)
        self.across += turn.is_across
        if again.kv_versions != turn.recorded.kv_versions and again.versions == turn.recorded.versions:
            self.crowded += 1
            return
        difference = turn.compare(again)
        if difference is not None and turn.order < self._first_different:
            self.difference, self._first_different = difference, turn.order


class _Held:
    """Turn that several versions sample, with the task that reads it."""

    def __init__(self, turn: RecordedTurn, pieces: AsyncGenerator[int]) -> None:
        runs = turn.recorded.versions
        self._ends = list(zip(runs.values, accumulate(runs.lengths), strict=True))
        self._count, self._moved = 0, asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._read(pieces))

    @property
    def over(self) -> bool:
        """True once it is whole, or its request has failed."""
        return self.task.done()

    async def _read(self, pieces: AsyncGenerator[int]) -> None:
        try:
            async with aclosing(pieces) as counts:
                async for count in counts:
                    self._count += count
                    self._moved.set()
        finally:
            self._moved.set()

    async def sampled(self, version: int) -> None:
        """Wait until all tokens of versions up to `version` are sampled.

        Raises:
            EngineError: the engine failed.
        """
        wanted = max((end for of, end in self._ends if of <= version), default=0)
        while self._count < wanted and not self.over:
            self._moved.clear()
            await self._moved.wait()
        if self.over:
            self.task.result()
