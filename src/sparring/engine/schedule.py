"""Recorded weight versions of a request that is replayed, token by token. Torch-free."""

from __future__ import annotations

from itertools import accumulate

from sparring.generation import Recorded, Runs


class Schedule:
    """Weight versions under which a request was sampled before, token by token.

    Args:
        recorded: versions of the recorded completion.
    """

    __slots__ = ("_bounds", "_kv_bounds", "_kv_values", "_stops", "_values")

    def __init__(self, recorded: Recorded) -> None:
        self._bounds, self._values = _bounds(recorded.versions)
        self._kv_bounds, self._kv_values = _bounds(recorded.kv_versions)
        self._stops = sorted({*self._bounds, *self._kv_bounds})

    def waits(self, num_sampled: int, version: int) -> bool:
        """Return True if the next token needs newer weights than `version`. A version that has passed is not served
        again: its tokens are then sampled by the served weights, and the completion records these."""
        return _value_at(self._bounds, self._values, num_sampled) > version

    def steps(self, num_sampled: int) -> int | None:
        """Return the number of tokens before the next change of versions; None if there is no further change."""
        return next((stop - num_sampled for stop in self._stops if stop > num_sampled), None)

    def reads_again(self, num_sampled: int, oldest: int) -> bool:
        """Return True if keys and values were recomputed before the next token; `oldest` is their oldest version
        now."""
        return _value_at(self._kv_bounds, self._kv_values, num_sampled) > oldest


def _bounds(runs: Runs) -> tuple[list[int], tuple[int, ...]]:
    """Return the ends of all runs but the last, and the values of all."""
    return list(accumulate(runs.lengths))[:-1], runs.values


def _value_at(bounds: list[int], values: tuple[int, ...], at: int) -> int:
    """Return the value of a token; after the last run, the last value."""
    return values[sum(bound <= at for bound in bounds)]
