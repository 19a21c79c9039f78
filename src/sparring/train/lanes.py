"""Lanes: the parts of a micro-batch in one process, which two threads compute at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from sparring.train.lane_sums import LaneSums
from sparring.train.measure import PlainMeasures
from sparring.train.optimiser import Optimiser
from sparring.train.parts import LANES, Compute
from sparring.types import Sample


class Lanes:
    """Computation of all parts in this process. Implements `Parts`.

    Args:
        threads: CPU threads of the caller; one lane uses half of them.
        on_cpu: whether the model is on a CPU. On a GPU a micro-batch has only one part.
    """

    def __init__(self, optimiser: Optimiser, *, threads: int, on_cpu: bool) -> None:
        self.lanes = LANES if on_cpu else 1
        self._threads = threads
        self._sums = LaneSums(optimiser, one_thread=not on_cpu)
        # torch keeps its number of threads per calling thread, so each worker sets its own
        self._second = ThreadPoolExecutor(
            1, "trainer-lane", initializer=torch.set_num_threads, initargs=(max(1, threads // 2),)
        )

    def run(self, micro_batches: Sequence[Sequence[Sequence[Sample]]], compute: Compute) -> Iterator[PlainMeasures]:
        with self._sums.collecting():
            for parts in micro_batches:
                self._sums.begin()
                yield from self._together(parts, compute)

    def close(self) -> None:
        self._second.shutdown()

    def _together(self, parts: Sequence[Sequence[Sample]], compute: Compute) -> list[PlainMeasures]:
        """Compute one or two lanes in parallel."""
        if len(parts) == 1 or self._threads == 1:
            results = [self._lane(lane, rows, compute) for lane, rows in enumerate(parts)]
        else:
            second = self._second.submit(self._lane, 1, parts[1], compute)
            torch.set_num_threads(self._threads - self._threads // 2)
            try:
                results = [self._lane(0, parts[0], compute)]
            finally:
                torch.set_num_threads(self._threads)
                wait([second])
            results.append(second.result())
        return [measures for measures in results if measures is not None]

    def _lane(self, lane: int, rows: Sequence[Sample], compute: Compute) -> PlainMeasures | None:
        part = compute(rows)
        if part is not None:
            self._sums.backward(lane, part.loss)
        self._sums.end(lane)
        return None if part is None else part.measures()
