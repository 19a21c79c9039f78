"""A weight update as a transaction: copy, verify, or put the old weights back (law 9)."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

import torch

from sparring.engine.reply import Reply
from sparring.engine.runner import Runner
from sparring.errors import SparringError, WeightsError, boundary
from sparring.model.causal import CausalModel
from sparring.types import WeightRef

FAST_TOLERANCE = 5e-2
"""Largest difference of a probe's log-probabilities under fast numerics, where trainer and engine round differently."""


class Update:
    """An update on its way from its caller to the engine's thread: whoever claims it first decides, the thread to begin it or
    the caller to withdraw it."""

    def __init__(self, ref: WeightRef, state: Mapping[str, torch.Tensor]) -> None:
        self.ref, self.state, self.reply = ref, state, Reply()
        self._once = Lock()

    @property
    def claimed(self) -> bool:
        """Whether anybody did; before its turn that is its caller, who is gone."""
        return self._once.locked()

    def claim(self) -> bool:
        """From any thread: whether nobody did before."""
        return self._once.acquire(blocking=False)


def where(ref: WeightRef) -> str:
    """How messages call an update."""
    return f"{'weights' if ref.adapter is None else f'adapter {ref.adapter}'} of {ref.model} version {ref.version}"


def commit(model: CausalModel, runner: Runner, ref: WeightRef, state: Mapping[str, torch.Tensor]) -> None:
    """Load `state` and verify it by the reference's probe; on any failure the old weights serve on.

    Raises:
        WeightsError: the weights do not fit the model, or give other log-probabilities than the publisher's.
    """
    old = {name: tensor.clone() for name, tensor in model.state().items()}
    try:
        with boundary(WeightsError, where(ref)):
            model.load_state(state)
            verify(model, runner, ref)
    except SparringError as cause:
        model.load_state(old)
        if isinstance(cause, WeightsError):
            raise
        raise WeightsError(str(cause)) from cause


def verify(model: CausalModel, runner: Runner, ref: WeightRef, adapter: int = -1) -> None:
    """Compare the reference's probe with what the weights give that are loaded, under the adapter of this number.

    Raises:
        WeightsError: they differ.
    """
    if ref.probe is None:
        return
    tokens, expected = ref.probe
    found = runner.probe(tokens, adapter)
    tolerance = FAST_TOLERANCE if model.path_name == "fast" else 0.0
    # a comparison with NaN is false, so NaN is refused
    if not all(abs(a - b) <= tolerance for a, b in zip(found, expected, strict=True)):
        worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        raise WeightsError(
            f"{where(ref)}: expected the publisher's log-probabilities on its probe, got a "
            f"difference of {worst:.3g}; the old version serves on"
        )
