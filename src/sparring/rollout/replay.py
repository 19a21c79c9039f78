"""Replay: one recorded rollout is sampled again, alone, turn by turn, and compared bit by bit (law 8)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

from sparring.generation import Completion, GenerateRequest
from sparring.protocols import Engine, Renderer
from sparring.types import Rollout, Segment, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first place where a replay left the record. `expected` is the record's; a log-probability stands with its
    bits."""

    trajectory: str
    segment: int
    position: int
    what: Literal["token", "logprob", "kept", "length"]
    expected: str
    got: str

    def __str__(self) -> str:
        place = f"{self.trajectory}, segment {self.segment}, position {self.position}"
        return f"{place}: {self.what} {self.expected} -> {self.got}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """Result of a replay.

    `skipped_turns` counts the turns that cannot be replayed: the engine serves other weights than they were sampled on.
    """

    rollout: str
    version: int
    turns: int
    tokens: int
    skipped_turns: int
    difference: Difference | None

    @property
    def identical(self) -> bool:
        """True where every turn was replayed and came back to the bit."""
        return self.difference is None and self.skipped_turns == 0 and self.turns > 0


async def replay(rollout: Rollout, engine: Engine, renderer: Renderer) -> ReplayReport:
    """Sample a rollout's turns again from their recorded prompts and seeds, and stop at the first difference.

    The world takes no part: the prompts are the recorded tokens, its answers included. No KV is kept between turns.

    Args:
        rollout: as `Store.load` gives it.
        engine: serving the weights that sampled it (`Segment.versions`).
        renderer: of the model: reads the stop strings and constraints that turns were sampled with.

    Raises:
        EngineError: the engine failed.
    """
    turns = tokens = skipped = 0
    for trajectory in rollout.trajectories:
        for segment in trajectory.segments:
            if segment.sampling is None or segment.versions is None or segment.logprobs is None:
                continue
            if set(segment.versions.values) != {engine.version}:
                skipped += 1
                continue
            request = GenerateRequest(
                id=f"replay/{trajectory.id}/{segment.index}",
                tokens=prompt_of(trajectory, segment),
                sampling=segment.sampling,
            )
            difference = compare(trajectory.id, segment, await engine.generate(renderer.bind(request)))
            turns, tokens = turns + 1, tokens + len(segment.tokens)
            if difference is not None:
                return ReplayReport(
                    rollout=rollout.id,
                    version=engine.version,
                    turns=turns,
                    tokens=tokens,
                    skipped_turns=skipped,
                    difference=difference,
                )
    return ReplayReport(
        rollout=rollout.id, version=engine.version, turns=turns, tokens=tokens, skipped_turns=skipped, difference=None
    )


def prompt_of(trajectory: Trajectory, segment: Segment) -> tuple[int, ...]:
    """Return the ids that a segment was sampled after: all from the root to its parent."""
    path: list[Segment] = []
    at = segment.parent
    while at is not None:
        path.append(trajectory.segments[at])
        at = trajectory.segments[at].parent
    return tuple(token for part in reversed(path) for token in part.tokens)


def compare(trajectory: str, segment: Segment, again: Completion) -> Difference | None:
    """Return the first difference between a recorded segment and a completion; None where all bits agree."""

    def difference(
        position: int, what: Literal["token", "logprob", "kept", "length"], expected: str, got: str
    ) -> Difference:
        return Difference(
            trajectory=trajectory, segment=segment.index, position=position, what=what, expected=expected, got=got
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
    if len(segment.tokens) != len(again.tokens):
        shorter = min(len(segment.tokens), len(again.tokens))
        return difference(shorter, "length", str(len(segment.tokens)), str(len(again.tokens)))
    return None
