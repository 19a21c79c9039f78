"""Sum of the gradients of parallel micro-batches (lanes), added up during their backward passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident

import torch

from sparring.train.optimiser import Optimiser


class LaneSums:
    """Backward passes of several lanes whose gradients are added to one optimiser.

    Each gradient is added as soon as autograd computes it and then dropped, so no lane holds a full set of gradients.
    For each parameter the lanes' gradients are added in the order of the lanes, whatever the timing of their threads:
    an early gradient waits.

    Args:
        one_thread: True if the lanes' backward passes never run at the same time. False if they may; each then has to
            run on its caller's thread, as torch does on a CPU.
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
        """Collect gradients of the optimiser's parameters within the context; `backward` may only be called inside it.

        After an error the optimiser's gradients are discarded, because which of them were already added depends on
        timing.
        """
        parameters = zip(self._names, self._optimiser.parameters, strict=True)
        handles = [parameter.register_hook(partial(self._on_gradient, name)) for name, parameter in parameters]
        try:
            yield
        except BaseException:
            self._optimiser.discard()
            raise
        finally:
            for handle in handles:
                handle.remove()

    def begin(self) -> None:
        """Start again with lane 0, for the next micro-batch."""
        self._lane_of.clear()
        self._ended.clear()
        self._turn = dict.fromkeys(self._names, 0)
        self._early = defaultdict(dict)

    def backward(self, lane: int, loss: torch.Tensor) -> None:
        """Run the backward pass of a lane. Its gradients are added once the earlier lanes have added theirs."""
        self._lane_of[self._thread()] = lane
        # not backward(): two of these run at once, and the order of addition must not depend on timing
        torch.autograd.grad(loss, self._optimiser.parameters, allow_unused=True)

    def end(self, lane: int) -> None:
        """Mark a lane as finished, so that gradients of later lanes can be added."""
        with self._lock:
            self._ended.add(lane)
            for name in self._names:
                self._add_waiting(name)

    def _thread(self) -> int:
        return 0 if self._one_thread else get_ident()

    def _on_gradient(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Take a gradient from autograd, and leave autograd a placeholder that needs no memory."""
        lane = self._lane_of.get(self._thread())
        if lane is None or gradient is None:
            return gradient
        with self._lock:
            self._early[name][lane] = gradient
            self._add_waiting(name)
        return gradient.new_zeros(()).expand_as(gradient)

    def _add_waiting(self, name: str) -> None:
        """Add the waiting gradients of a parameter that are next in the order of lanes."""
        early = self._early[name]
        while (lane := self._turn[name]) in early or lane in self._ended:
            if lane in early:
                self._optimiser.add_one(name, early.pop(lane))
            self._turn[name] += 1
