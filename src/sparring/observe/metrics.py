"""Metrics: values with the reduction over everything that reports them during one step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sparring.observe.metric_table import over_steps
from sparring.validation import number

Reduce = Literal["mean", "sum", "max", "min", "last", "ratio"]


@dataclass(slots=True)
class _Cell:
    """Running value of one metric: `top / bottom` for mean and ratio, `top` for the others."""

    reduce: Reduce
    top: float
    bottom: float


class Metrics:
    """Collector of values by name until `take`.

    A mean is weighted (`weight`), and a ratio is the sum of numerators over the sum of denominators, so both stay exact
    when collectors of any size are merged.
    """

    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}

    def add(self, name: str, value: object, reduce: Reduce = "mean", *, weight: float = 1.0) -> None:
        """Report a value: anything that `number` converts, NaN and infinities included, which are signs of an error.
        For a ratio, `value` is the numerator and `weight` the denominator.

        Raises:
            ValueError: the value is no number, or the name was reported with another reduction.
        """
        top = number(f"metric {name}", value)
        self._merge(name, reduce, top * weight if reduce == "mean" else top, float(weight))

    def merge(self, other: Metrics) -> None:
        """Add the values of another collector, after the values of this collector."""
        for name, cell in other._cells.items():
            self._merge(name, cell.reduce, cell.top, cell.bottom)

    def values(self) -> dict[str, float]:
        """Return the reduced values by name. A mean or ratio of nothing is NaN."""
        return {name: _value(cell) for name, cell in sorted(self._cells.items())}

    def take(self) -> dict[str, float]:
        """Return `values` and reset them."""
        values = self.values()
        self._cells.clear()
        return values

    def _merge(self, name: str, reduce: Reduce, top: float, bottom: float) -> None:
        cell = self._cells.get(name)
        if cell is None:
            self._cells[name] = _Cell(reduce, top, bottom)
        elif cell.reduce != reduce:
            raise ValueError(f"metric {name} reduces by {cell.reduce}, reported as {reduce}")
        elif reduce in ("mean", "sum", "ratio"):
            cell.top += top
            cell.bottom += bottom
        elif reduce == "last":
            cell.top = top
        else:
            chosen = max if reduce == "max" else min
            # comparisons with NaN are false, so it must be kept explicitly
            cell.top = top if top != top else cell.top if cell.top != cell.top else chosen(cell.top, top)


def merged(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of an update's optimiser steps, each by its declared `over_steps`, over the steps that report
    it. For several steps, `optimiser_steps` is their number."""
    metrics = Metrics()
    for step in steps:
        for name, value in step.items():
            metrics.add(name, value, over_steps(name))
    return {**metrics.values(), **({"optimiser_steps": float(len(steps))} if len(steps) > 1 else {})}


def _value(cell: _Cell) -> float:
    if cell.reduce in ("mean", "ratio"):
        return cell.top / cell.bottom if cell.bottom else math.nan
    return cell.top
