"""A weight update as a transaction: exchange, verify, or exchange back (law 9)."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from sparring.engine.reply import Reply
from sparring.engine.runner import Runner
from sparring.errors import BadInput, SparringError, WeightsError, boundary
from sparring.model.causal import CausalModel
from sparring.model.lora import Adapter
from sparring.model.staging import Staged
from sparring.types import WeightRef
from sparring.weights.fetch import fetch
from sparring.weights.inline import Probe


class Update:
    """An update on its way from its caller to the engine's thread: whoever claims it first decides, the thread to begin
    it or the caller to withdraw it."""

    def __init__(self, ref: WeightRef, staged: Staged | Adapter) -> None:
        self.ref, self.staged, self.reply = ref, staged, Reply()
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


class NotRolledBack(WeightsError):
    """An update failed, and so did putting the old weights back: what the model would compute with is unknown."""


def stage(model: CausalModel, ref: WeightRef) -> Staged | Adapter:
    """Copy and pack the verified tensors of a reference, a model's or an adapter's, for `model`. Takes long and writes
    nothing that a step reads: it runs beside the engine's thread.

    Raises:
        WeightsError: the tensors are not the ones that were published, or do not fit the model.
    """
    try:
        with boundary(WeightsError, where(ref)):
            state = fetch(ref)
            return (
                Staged(model, state)
                if ref.adapter is None
                else model.adapters.fit(Adapter(state, model.dtype, model.device))
            )
    except BadInput as cause:
        raise WeightsError(f"{where(ref)}: {cause}") from cause


def commit(runner: Runner, ref: WeightRef, staged: Staged, old: Probe | None) -> None:
    """Exchange the weights and verify them by the probe. On any failure the old ones, which nobody wrote in, come back.

    Args:
        runner: who computes with them.
        ref: what is staged.
        staged: its copy.
        old: what the weights served now gave when they were verified, if they were.

    Raises:
        WeightsError: the weights give other log-probabilities than the publisher's, or the exchange failed.
        NotRolledBack: and then the old ones do not give what they gave any more.
    """
    try:
        with boundary(WeightsError, where(ref)):
            staged.commit()
            verify(runner, where(ref), ref.probe)
    except SparringError as cause:
        try:
            with boundary(WeightsError, f"{where(ref)}: roll-back"):
                staged.undo()
                verify(runner, "the old weights", old)
        except SparringError as other:
            raise NotRolledBack(f"{cause}; putting the old weights back failed too: {other}") from cause
        raise WeightsError(f"{cause}; the old version serves on") from cause


def verify(runner: Runner, what: str, probe: Probe | None, adapter: int = -1) -> None:
    """Compare a probe with what the runner gives now, under the adapter of this number, by the trainer's forward and by
    a step of generation: that one reads the weights through pointers of its own, and would serve others in silence if
    those were not the model's.

    Scoring the probe as a scheduled request would add nothing: it is the trainer's forward over pages, which shares
    every product with the one used here and has no pointers.

    Raises:
        WeightsError: they differ, by anything under exact numerics.
    """
    if probe is None:
        return
    tokens, expected = probe
    found, sampled, same = runner.probe(tokens, adapter)
    _compare(f"{what}: expected the publisher's log-probabilities on its probe", found, expected, runner.tolerance)
    _compare(
        f"{what}: expected a step of generation to give the model's log-probability", sampled, same, runner.tolerance
    )


def _compare(expected: str, found: Sequence[float], wanted: Sequence[float], tolerance: float) -> None:
    differences = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
    # a comparison with NaN is false, so NaN is refused
    if not all(difference <= tolerance for difference in differences):
        raise WeightsError(f"{expected}, got a difference of {max(differences):.3g}")
