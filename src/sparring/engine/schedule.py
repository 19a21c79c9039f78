"""Replay of requests: each token waits for the weight version that sampled it in the recorded run. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from sparring.engine.sequence import Sequence
from sparring.generation import GenerateRequest, Recorded, Runs


class Schedule:
    """Weight versions that sampled a request's tokens in the recorded run, token by token."""

    __slots__ = ("_bounds", "_kv_bounds", "_kv_values", "_stops", "_values")

    def __init__(self, recorded: Recorded) -> None:
        self._bounds, self._values = _bounds(recorded.versions)
        self._kv_bounds, self._kv_values = _bounds(recorded.kv_versions)
        self._stops = sorted({*self._bounds, *self._kv_bounds})

    def waits(self, num_sampled: int, version: int) -> bool:
        """Return True if the next token needs newer weights than `version`. Older versions are not served again: tokens
        of an older version are sampled by the served weights, whose version the completion records."""
        return _value_at(self._bounds, self._values, num_sampled) > version

    def steps(self, num_sampled: int) -> int | None:
        """Return the number of tokens before the next change of versions; None if there is no further change."""
        return next((stop - num_sampled for stop in self._stops if stop > num_sampled), None)

    def reads_again(self, num_sampled: int, oldest: int) -> bool:
        """Return True if, in the recorded run, the request's keys and values were recomputed before the next token.
        `oldest` is the oldest version of its present keys and values."""
        return _value_at(self._kv_bounds, self._kv_values, num_sampled) > oldest


class Replays:
    """Schedules of the requests that are replayed. `all_wait` is True if every request waits for newer weights. Without
    such requests a step costs nothing more."""

    def __init__(self) -> None:
        self._schedules: dict[Sequence, Schedule] = {}
        self.all_wait = False

    def add(self, sequence: Sequence) -> None:
        """Record a new request."""
        self.all_wait = False
        if isinstance(sequence.request, GenerateRequest) and sequence.request.recorded is not None:
            self._schedules[sequence] = Schedule(sequence.request.recorded)

    def remove(self, sequence: Sequence) -> None:
        """Drop a request that is over."""
        self._schedules.pop(sequence, None)
        self.all_wait = False

    def ready(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return the requests whose next token can be sampled now."""
        if not self._schedules:
            return sequences
        return [sequence for sequence in sequences if not self._waits(sequence)]

    def outdated(self, running: list[Sequence]) -> list[Sequence]:
        """Return the running requests whose keys and values were recomputed before the next token in the recorded
        run."""
        return [
            sequence
            for sequence in (running if self._schedules else ())
            if (schedule := self._schedules.get(sequence)) is not None
            and sequence.oldest is not None
            and schedule.reads_again(len(sequence.logprobs), sequence.oldest)
        ]

    def steps(self, sequences: Iterable[Sequence], most: int) -> int:
        """Return the number of steps, at most `most`, before the recorded versions change in one of these requests."""
        for sequence in sequences if self._schedules else ():
            if (schedule := self._schedules.get(sequence)) is not None:
                most = min(most, schedule.steps(len(sequence.logprobs)) or most)
        return most

    def planned(self, sequences: Iterable[Sequence]) -> None:
        """Set `all_wait` after a plan: whether all of these requests wait for newer weights."""
        self.all_wait = bool(self._schedules) and all(self._waits(sequence) for sequence in sequences)

    def _waits(self, sequence: Sequence) -> bool:
        schedule = self._schedules.get(sequence)
        return schedule is not None and schedule.waits(len(sequence.logprobs), sequence.served.version)


def _bounds(runs: Runs) -> tuple[list[int], tuple[int, ...]]:
    """Return the ends of all runs but the last, and the values of all."""
    return list(accumulate(runs.lengths))[:-1], runs.values


def _value_at(bounds: list[int], values: tuple[int, ...], at: int) -> int:
    """Return the value of the run that contains token `at`; after the last run, the last value."""
    return values[sum(bound <= at for bound in bounds)]
