"""Recorded turns of a run, sampled again side by side while one version of the weights after the other is served (law
8)."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

from sparring.generation import Completion, Delta, GenerateRequest, Recorded, Sampling
from sparring.protocols import Engine, Renderer
from sparring.rollout.replay import Difference, compare, prompt_of
from sparring.types import Rollout, Segment, Trajectory

AT_ONCE = 1024
"""Requests that are with the engine at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTurn:
    """Turn that a model of ours sampled, as it is recorded. `order` is its place among those that are compared."""

    trajectory: Trajectory
    segment: Segment
    order: int = 0

    @property
    def recorded(self) -> Recorded:
        """Versions under which its tokens were sampled."""
        assert self.segment.versions is not None
        return Recorded(versions=self.segment.versions, kv_versions=self.segment.kv_versions or self.segment.versions)

    @property
    def is_exact(self) -> bool:
        """False where two versions read its prompt, and the record does not say which of them read what: so it was
        before a prompt that an update met was read again from its beginning."""
        versions = self.recorded.versions.expand()
        kv = self.recorded.kv_versions.expand()
        begun = [at for at in range(len(kv)) if at == 0 or kv[at] != kv[at - 1]]
        return all(versions[at] == kv[at] for at in begun)


def turns_of(rollouts: Iterable[Rollout], model: str) -> Iterator[RecordedTurn]:
    """Yield the turns of rollouts that `model` sampled, and at least one token in each."""
    for rollout in rollouts:
        for trajectory in rollout.trajectories:
            for segment in trajectory.segments:
                if segment.model == model and segment.sampling is not None and segment.tokens:
                    yield RecordedTurn(trajectory=trajectory, segment=segment)


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
        unclear: turns that cannot be sampled again, because two versions read their prompt.
        crowded: turns whose keys and values had to be computed again where they were not before, because the cache is
            too small for all that is held.
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
        turns = iter(self._by_version.pop(version, ()))
        across: list[RecordedTurn] = []

        async def work() -> None:
            for turn in turns:
                if len(turn.recorded.versions.values) > 1:
                    across.append(turn)
                else:
                    self._compare(turn, await self._engine.generate(self._request(turn)))

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        for turn in across:
            held = _Held(turn)
            held.stream = asyncio.get_running_loop().create_task(self._stream(held))
            held.stream.add_done_callback(held.end)
            self._held.append(held)
        await asyncio.gather(*(held.sampled(version) for held in self._held))
        self._held = [held for held in self._held if not held.over]

    def stop(self) -> None:
        """Drop the turns that are held. Safe to call twice."""
        for held in self._held:
            if held.stream is not None:
                held.stream.cancel()

    async def _stream(self, held: _Held) -> None:
        """Read a turn that several versions sample, and note how far it is."""
        stream = cast(AsyncGenerator[Delta | Completion], self._engine.stream(self._request(held.turn)))
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                if isinstance(piece, Completion):
                    self._compare(held.turn, piece)
                else:
                    held.advance(len(piece.tokens))

    def _request(self, turn: RecordedTurn) -> GenerateRequest:
        """Return the request of a turn. One that was cut short samples as many tokens as it had."""
        trajectory, segment = turn.trajectory, turn.segment
        sampling = segment.sampling or Sampling()
        if segment.finish_reason == "abort":
            sampling = replace(sampling, max_tokens=len(segment.tokens))
        return self._renderer.bind(
            GenerateRequest(
                id=f"replay/{trajectory.id}/{segment.index}",
                tokens=prompt_of(trajectory, segment),
                sampling=sampling,
                recorded=turn.recorded,
            )
        )

    def _compare(self, turn: RecordedTurn, again: Completion) -> None:
        self.turns, self.tokens = self.turns + 1, self.tokens + len(turn.segment.tokens)
        self.across += len(turn.recorded.versions.values) > 1
        if again.kv_versions != turn.recorded.kv_versions and again.versions == turn.recorded.versions:
            self.crowded += 1
            return
        difference = compare(turn.trajectory.id, turn.segment, again)
        if difference is not None and turn.order < self._first_different:
            self.difference, self._first_different = difference, turn.order


class _Held:
    """Turn that several versions sample.

    Attributes:
        stream: reads it.
        over: True once it is whole, or its request has failed.
    """

    def __init__(self, turn: RecordedTurn) -> None:
        self.turn = turn
        self.stream: asyncio.Task[None] | None = None
        self.over = False
        self._count = 0
        self._moved = asyncio.Event()
        runs = turn.recorded.versions
        self._ends = list(zip(runs.values, accumulate(runs.lengths), strict=True))

    def advance(self, count: int) -> None:
        """Note that so many tokens more are sampled."""
        self._count += count
        self._moved.set()

    def end(self, stream: asyncio.Task[None]) -> None:
        """Note that its stream is over."""
        self.over = True
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
        if self.stream is not None and self.stream.done():
            self.stream.result()
