"""Double-buffered weights: prepared on any thread, committed by swapping pointers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparring.model.causal import CausalModel


class StagedWeights:
    """Copy of `state` and of all that a model derives from it. Making one touches nothing that the model computes with,
    so any thread may; `commit` and `undo` are for the thread that computes.

    Args:
        model: whose weights these are to be.
        state: every parameter by name, of any dtype.

    Raises:
        WeightsError: names or shapes differ from the model's.
    """

    def __init__(self, model: CausalModel, state: Mapping[str, torch.Tensor]) -> None:
        model.check(state)
        with torch.no_grad():
            fresh = {
                parameter: torch.empty_like(parameter).copy_(state[name])
                for name, parameter in model.parameters().items()
            }
            derived = [(part, part.derived(fresh.__getitem__)) for part in model.parts]
        # what is derived on first use may come into being before the commit
        self._late = [part for part, changes in derived if not changes]
        self._new: list[tuple[object, str, Any]] = [(parameter, "data", tensor) for parameter, tensor in fresh.items()]
        self._new += [change for _, changes in derived for change in changes]
        self._old: list[tuple[object, str, Any]] = []

    def commit(self) -> None:
        """Let the model compute with these weights. After an exception here, call `undo`."""
        for owner, name, value in self._new:
            self._old.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        self._refresh()

    def undo(self) -> None:
        """Give the model back what it had, the same tensors: nothing was written in them."""
        while self._old:
            setattr(*self._old.pop())
        self._refresh()

    def _refresh(self) -> None:
        for part in self._late:
            part.refresh()
