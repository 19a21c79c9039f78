"""Double-buffered weights: prepared on any thread, committed by an exchange of pointers or of contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from sparring.model.causal import CausalModel

PART = 1 << 24
"""Numbers that are exchanged at once: few launches on a GPU, and 64 MB of memory at most."""


class StagedWeights:
    """Copy of `state`, every parameter by name in any dtype, and of everything that a model derives from it. Building
    it does not touch the tensors that the model computes with, so any thread may build it; `commit` and `undo` belong
    to the thread that computes."""

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
        self._undo: list[Callable[[], None]] = []

    def commit(self, *, in_place: bool = False) -> None:
        """Make the model use these weights. After an exception here, call `undo`.

        Args:
            in_place: whether the model keeps its tensors, which CUDA graphs read, and exchanges their contents with
                this copy's; otherwise pointers are exchanged, which takes no time. Neither needs more memory.
        """
        exchanged = set()
        for owner, name, value in self._new:
            old = getattr(owner, name)
            if not in_place:
                setattr(owner, name, value)
                self._undo.append(partial(setattr, owner, name, old))
            elif isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in exchanged:
                exchanged.add(value.untyped_storage().data_ptr())  # a view of it has changed with it
                _exchange(old, value)
                self._undo.append(partial(_exchange, old, value))
        self._refresh()

    def undo(self) -> None:
        """Restore the weights that the model had before, to the bit."""
        while self._undo:
            self._undo.pop()()
        self._refresh()

    def _refresh(self) -> None:
        for part in self._late:
            part.refresh()


def _exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the contents of two tensors of one shape, a part at a time."""
    one, other = torch.atleast_1d(one), torch.atleast_1d(other)
    rows = max(1, PART // max(1, one[:1].numel()))
    for mine, its in zip(one.split(rows), other.split(rows), strict=True):
        kept = mine.clone()
        mine.copy_(its)
        its.copy_(kept)


def held(model: CausalModel) -> list[torch.Tensor]:
    """Return the tensors that an update replaces: parameters, stored buffers and packed copies of them."""
    return [*model.parameters().values(), *(copy for part in model.parts for copy in part.copies())]
