"""Weight update as a transaction: exchange, verify, or exchange back (law 9)."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from sparring.engine.reply import Reply
from sparring.engine.runner import Runner
from sparring.errors import BadInput, EngineError, SparringError, WeightsError, boundary
from sparring.model.causal import CausalModel
from sparring.model.lora import Adapter
from sparring.model.staging import StagedWeights
from sparring.types import WeightRef
from sparring.weights.fetch import fetch
from sparring.weights.inline import Probe

OLD_STAYS = "the engine keeps serving the old version"
"""End of the messages about a failed update."""


class Update:
    """Update on its way from its caller to the engine's thread. The side that claims it first decides: the thread to
    begin it, or the caller to withdraw it."""

    def __init__(self, ref: WeightRef, staged: StagedWeights | Adapter) -> None:
        self.ref, self.staged, self.reply = ref, staged, Reply()
        self._once = Lock()

    @property
    def claimed(self) -> bool:
        """True if the update was claimed. Claimed before its turn, it was withdrawn by the caller."""
        return self._once.locked()

    def claim(self) -> bool:
        """Thread-safe. Claim it; returns False where it was claimed before."""
        return self._once.acquire(blocking=False)


def where(ref: WeightRef) -> str:
    """Name an update in messages."""
    return f"{'weights' if ref.adapter is None else f'adapter {ref.adapter}'} of {ref.model} version {ref.version}"


def stage(model: CausalModel, ref: WeightRef) -> StagedWeights | Adapter:
    """Copy and pack the verified tensors of a reference, a model's or an adapter's, for `model`. Takes long and writes
    nothing that a step reads: it runs beside the engine's thread.

    Raises:
        WeightsError: the tensors are not the ones that were published, or do not fit the model.
    """
    try:
        with boundary(WeightsError, where(ref)):
            state = fetch(ref)
            return (
                StagedWeights(model, state)
                if ref.adapter is None
                else model.adapters.fit(Adapter(state, model.dtype, model.device))
            )
    except BadInput as cause:
        raise WeightsError(f"{where(ref)}: {cause}") from cause


class BaseWeights:
    """Weights of an engine's base model, below any adapter: their version, and the transaction that exchanges them. For
    the engine's thread alone.

    Args:
        runner: computes with them.
        engine: the engine's name, for messages.
        version: of the weights that the runner's model holds.

    Attributes:
        version: of the served weights.
        broken: error for all requests after an update failed and the old weights could not be restored; else None.
    """

    def __init__(self, runner: Runner, engine: str, version: int) -> None:
        self._runner, self._engine = runner, engine
        self.version = version
        self.broken: EngineError | None = None
        self._checksum: str | None = None
        self._probe: Probe | None = None

    def commit(self, ref: WeightRef, staged: StagedWeights, *, has_adapters: bool) -> bool:
        """Exchange the weights and verify them by the reference's probe. On failure the old ones, which stay untouched,
        come back.

        Args:
            staged: its prepared copy.
            has_adapters: whether adapters are served, which belong to the old weights.

        Returns:
            Whether they changed; False where this very version was served already.

        Raises:
            WeightsError: adapters are loaded, the version is not newer, the weights give other log-probabilities than
                the publisher's, the exchange failed, or the old weights could not be restored: then `broken` is set.
        """
        same = (ref.version, ref.checksum) == (self.version, self._checksum)
        if same and self.broken is None:
            return False
        if ref.version <= self.version and not same:  # its KV would pass for that of the weights served now
            got = f"{ref.version}; publish every change of the weights under a new version number"
            raise WeightsError(f"{where(ref)}: expected a version above the served {self.version}, got {got}")
        if has_adapters:
            raise WeightsError(f"{where(ref)}: expected an adapter, got base weights; drop the loaded adapters first")
        if self.broken is not None and ref.probe is None:
            why = "because a failed update left unknown weights"
            raise WeightsError(f"{where(ref)}: expected a probe, {why}, got none; publish with one")
        self._exchange(ref, staged)
        self.version, self._checksum, self._probe, self.broken = ref.version, ref.checksum, ref.probe, None
        return True

    def _exchange(self, ref: WeightRef, staged: StagedWeights) -> None:
        try:
            with boundary(WeightsError, where(ref)):
                staged.commit()
                verify(self._runner, where(ref), ref.probe)
        except SparringError as cause:
            try:
                with boundary(WeightsError, f"{where(ref)}: roll-back"):
                    staged.undo()
                    verify(self._runner, "the old weights", self._probe)
            except SparringError as other:
                problem = f"{cause}; restoring the old weights failed too: {other}"
                self.broken = EngineError(
                    f"engine {self._engine} refuses all requests until an update succeeds: {problem}"
                )
                raise WeightsError(problem) from cause
            raise WeightsError(f"{cause}; {OLD_STAYS}") from cause


def verify(runner: Runner, what: str, probe: Probe | None, adapter: int = -1) -> None:
    """Compare a probe with the runner's log-probabilities under an adapter, by the trainer's forward and by a
    generation step: a step reads the weights through pointers of its own, and would silently use other weights if those
    were not the model's.

    Scoring the probe as a scheduled request would add nothing: it is the trainer's forward over pages, which shares
    every product with the one used here and has no pointers.

    Args:
        runner: computes the probe.
        what: name of the weights, for messages.
        probe: tokens and expected log-probabilities; None verifies nothing.
        adapter: number of the adapter, -1 for none.

    Raises:
        WeightsError: they differ, under exact numerics in any bit.
    """
    if probe is None:
        return
    tokens, expected = probe
    logprobs, sampled, reference = runner.probe(tokens, adapter)
    _compare(f"{what}: expected the publisher's log-probabilities on its probe", logprobs, expected, runner.tolerance)
    _compare(
        f"{what}: expected a generation step to reproduce the model's log-probability",
        sampled,
        reference,
        runner.tolerance,
    )


def _compare(expected: str, values: Sequence[float], wanted: Sequence[float], tolerance: float) -> None:
    differences = [abs(a - b) for a, b in zip(values, wanted, strict=True)]
    # a comparison with NaN is false, so NaN is refused
    if not all(difference <= tolerance for difference in differences):
        raise WeightsError(f"{expected}, got a difference of {max(differences):.3g}")
