"""Gradients of micro-batches that are computed side by side, added up while their backward passes find them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident

import torch

from sparring.train.optimiser import Optimiser


class LaneSums:
    """Backward passes, one for each lane, whose gradients an optimiser adds up.

    A gradient is added when it is found, and then dropped: no lane holds a set of gradients as large as the model. To a
    parameter the lanes add in their order, however their threads run: one that comes before its turn waits.

    Args:
        optimiser: gets the gradients.
        one_thread: whether passes of several lanes never run at once. Else each runs on the thread that asked for it,
            as torch does on a CPU.
    """

    def __init__(self, optimiser: Optimiser, *, one_thread: bool) -> None:
        self._optimiser, self._one_thread = optimiser, one_thread
        self._names = optimiser.names
        self._lock = Lock()
        self._lane_of: dict[int, int] = {}
        self._ended: set[int] = set()
        self._turn: dict[str, int] = {}
        self._early: dict[str, dict[int, torch.Tensor]] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Listen for gradients of the optimiser's parameters; `backward` is for calls within. After an error the
        optimiser has none: which were added before is left to chance."""
        parameters = zip(self._names, self._optimiser.parameters, strict=True)
        handles = [parameter.register_hook(partial(self._found, name)) for name, parameter in parameters]
        try:
            yield
        except BaseException:
            self._optimiser.discard()
            raise
        finally:
            for handle in handles:
                handle.remove()

    def begin(self) -> None:
        """Begin with lane 0 again, after all lanes have ended or some have failed."""
        self._lane_of.clear()
        self._ended.clear()
        self._turn = dict.fromkeys(self._names, 0)
        self._early = defaultdict(dict)

    def backward(self, lane: int, loss: torch.Tensor) -> None:
        """Run the backward pass of a lane; its gradients are added up, all of them once the lanes before have ended."""
        self._lane_of[self._thread()] = lane
        # not backward(): two of these run at once, and who adds to a parameter first must not be left to chance
        torch.autograd.grad(loss, self._optimiser.parameters, allow_unused=True)

    def end(self, lane: int) -> None:
        """Note that a lane has no more gradients: those of later ones have their turn."""
        with self._lock:
            self._ended.add(lane)
            for name in self._names:
                self._settle(name)

    def _thread(self) -> int:
        return 0 if self._one_thread else get_ident()

    def _found(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Take a gradient; autograd gets one in its place that takes no memory."""
        lane = self._lane_of.get(self._thread())
        if lane is None or gradient is None:
            return gradient
        with self._lock:
            self._early[name][lane] = gradient
            self._settle(name)
        return gradient.new_zeros(()).expand_as(gradient)

    def _settle(self, name: str) -> None:
        """Add what is there of a parameter, lane after lane."""
        early = self._early[name]
        while (lane := self._turn[name]) in early or lane in self._ended:
            if lane in early:
                self._optimiser.add_one(name, early.pop(lane))
            self._turn[name] += 1
