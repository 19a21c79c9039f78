"""Double-buffered weights: prepared on any thread, committed by swapping pointers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparring.model.causal import CausalModel


class StagedWeights:
    """Copy of `state` and of everything that a model derives from it. Building it does not touch the tensors that the
    model computes with, so any thread may build it; `commit` and `undo` belong to the thread that computes.

    Args:
        model: model that will use these weights.
        state: every parameter by name, in any dtype.

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
        # parts that derive at first use may do so before the commit
        self._late = [part for part, changes in derived if not changes]
        self._new: list[tuple[object, str, Any]] = [(parameter, "data", tensor) for parameter, tensor in fresh.items()]
        self._new += [change for _, changes in derived for change in changes]
        self._old: list[tuple[object, str, Any]] = []

    def commit(self) -> None:
        """Make the model use these weights. After an exception here, call `undo`."""
        for owner, name, value in self._new:
            self._old.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        self._refresh()

    def undo(self) -> None:
        """Restore the tensors that the model had before; their values were never overwritten."""
        while self._old:
            setattr(*self._old.pop())
        self._refresh()

    def _refresh(self) -> None:
        for part in self._late:
            part.refresh()


def held(model: CausalModel) -> list[torch.Tensor]:
    """Return the tensors that an update replaces: parameters, stored buffers and packed copies of them."""
    return [*model.parameters().values(), *(copy for part in model.parts for copy in part.copies())]
