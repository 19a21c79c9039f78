"""Schedule of a request that is sampled again: which weights sample each of its tokens. Torch-free."""

from __future__ import annotations

from itertools import accumulate

from sparring.generation import Recorded, Runs


class Schedule:
    """Weight versions under which a request was sampled before, token by token.

    Args:
        recorded: of the completion that is sampled again.
    """

    __slots__ = ("_bounds", "_kv_bounds", "_kv_values", "_stops", "_values")

    def __init__(self, recorded: Recorded) -> None:
        self._bounds, self._values = _bounds(recorded.versions)
        self._kv_bounds, self._kv_values = _bounds(recorded.kv_versions)
        self._stops = sorted({*self._bounds, *self._kv_bounds})

    def waits(self, num_sampled: int, version: int) -> bool:
        """Return True where the next token is of newer weights than `version`. A version that has passed is not served
        again: the token is then of the weights that are served, as the completion says."""
        return _value_at(self._bounds, self._values, num_sampled) > version

    def steps(self, num_sampled: int) -> int | None:
        """Return how many tokens are left before the versions change; None where they change no more."""
        return next((stop - num_sampled for stop in self._stops if stop > num_sampled), None)

    def reads_again(self, num_sampled: int, oldest: int) -> bool:
        """Return True where the keys and values, the oldest of which are of version `oldest`, were computed again
        before the next token."""
        return _value_at(self._kv_bounds, self._kv_values, num_sampled) > oldest


def _bounds(runs: Runs) -> tuple[list[int], tuple[int, ...]]:
    """Return where each run but the last ends, and the values of all."""
    return list(accumulate(runs.lengths))[:-1], runs.values


def _value_at(bounds: list[int], values: tuple[int, ...], at: int) -> int:
    """Return the value of a token; behind the last run, that of the last."""
    return values[sum(bound <= at for bound in bounds)]
