"""Weight update as a transaction: swap, verify, and swap back on failure (law 9)."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from sparring.engine.reply import Reply
from sparring.engine.runner import Runner
from sparring.engine.weight_names import ServedWeights
from sparring.errors import BadInput, EngineError, SparringError, WeightsError, boundary
from sparring.model.causal import CausalModel
from sparring.model.lora import Adapter
from sparring.model.staging import StagedWeights
from sparring.types import WeightRef
from sparring.weights.fetch import fetch
from sparring.weights.inline import Probe

OLD_STAYS = "the engine keeps serving the old version"
"""Final words of messages about a failed update."""

STAYS_ASLEEP = "the engine stays asleep"
"""Final words of messages about weights with which an engine did not wake."""


class Update:
    """Update that a caller passes to the engine's thread. If the thread claims the update first, the update begins; if
    the caller claims it first, the update is withdrawn. An engine that is asleep takes only an update with `wakes`."""

    def __init__(self, ref: WeightRef, staged: StagedWeights | Adapter, *, wakes: bool) -> None:
        self.ref, self.staged, self.wakes, self.reply = ref, staged, wakes, Reply()
        self._once = Lock()

    @property
    def claimed(self) -> bool:
        """True if the update was claimed. An update that is claimed before its turn was withdrawn by the caller."""
        return self._once.locked()

    def claim(self) -> bool:
        """Claim the update; return False if it was claimed already. Thread-safe."""
        return self._once.acquire(blocking=False)


def where(ref: WeightRef) -> str:
    """Return the name of an update in messages."""
    return f"{'weights' if ref.adapter is None else f'adapter {ref.adapter}'} of {ref.model} version {ref.version}"


def check_model(ref: WeightRef, name: str) -> None:
    """Refuse an update of another model than `name`, with WeightsError."""
    if ref.model != name:
        raise WeightsError(
            f"{where(ref)}: expected model {name!r}, got {ref.model!r}; publish to the engine that serves it"
        )


def stage(model: CausalModel, ref: WeightRef) -> StagedWeights | Adapter:
    """Copy and pack the verified tensors of a model's or an adapter's reference for `model`. This takes long and writes
    nothing that a step reads, so it runs in parallel to the engine's thread. Raises WeightsError if the tensors differ
    from the published ones, or do not fit the model."""
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
    """Weights of an engine's base model, without adapters: their version, and the transaction that replaces them. For
    the engine's thread alone.

    Args:
        version: version of the weights that the runner's model holds.

    Attributes:
        broken: error for all requests after an update failed and the old weights could not be restored; otherwise None.
    """

    def __init__(self, runner: Runner, engine: str, version: int) -> None:
        self._runner, self._engine = runner, engine
        self.served = ServedWeights(version=version)
        self.broken: EngineError | None = None
        self._probe: Probe | None = None

    def commit(self, ref: WeightRef, staged: StagedWeights, *, has_adapters: bool) -> bool:
        """Swap the weights and verify them by the reference's probe; on failure restore the old weights, which are kept
        until then. Return False if exactly this version was served already. Raises WeightsError if adapters are loaded,
        which belong to the old weights; the version is not newer; the probe's log-probabilities differ; the swap
        failed; or the old weights could not be restored, in which case `broken` is set."""
        served = self.served
        same = (ref.version, ref.checksum) == (served.version, served.checksum)
        if same and self.broken is None:
            return False
        if ref.version <= served.version and not same:  # a reused number would make old KV look current
            version = f"{ref.version}; publish every change of the weights under a new version number"
            raise WeightsError(f"{where(ref)}: expected a version above the served {served.version}, got {version}")
        if has_adapters:
            raise WeightsError(f"{where(ref)}: expected an adapter, got base weights; drop the loaded adapters first")
        if self.broken is not None and ref.probe is None:
            why = "because a failed update left unknown weights"
            raise WeightsError(f"{where(ref)}: expected a probe, {why}, got none; publish with one")
        self._exchange(ref, staged)
        served.version, served.checksum = ref.version, ref.checksum
        self._probe, self.broken = ref.probe, None
        return True

    def wake(self, ref: WeightRef, staged: StagedWeights) -> None:
        """Load weights after a sleep, and verify them by the reference's probe. Raises WeightsError if the version is
        older than the version before the sleep; it has the same number, but other weights; or the probe's
        log-probabilities differ. After an error the engine has no weights."""
        served = self.served
        again = ref.version == served.version and served.checksum in (None, ref.checksum)
        if ref.version <= served.version and not again:
            version = f"{ref.version}; publish every change of the weights under a new version number"
            expected = f"the version {served.version} that was served, or one above it"
            raise WeightsError(f"{where(ref)}: expected {expected}, got {version}; {STAYS_ASLEEP}")
        try:
            self._swap(ref, staged)
        except SparringError as cause:
            staged.undo()
            raise WeightsError(f"{cause}; {STAYS_ASLEEP}") from cause
        served.version, served.checksum = ref.version, ref.checksum
        self._probe, self.broken = ref.probe, None

    def _swap(self, ref: WeightRef, staged: StagedWeights) -> None:
        """Replace the weights and verify the new ones. After an exception the caller has to undo `staged`."""
        with boundary(WeightsError, where(ref)):
            staged.commit(in_place=self._runner.keeps_tensors)
            verify(self._runner, where(ref), ref.probe)

    def _exchange(self, ref: WeightRef, staged: StagedWeights) -> None:
        try:
            self._swap(ref, staged)
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
    generation step. A step reads weights through its own pointers; with wrong pointers it would silently use other
    weights.

    Scoring the probe as a scheduled request would add nothing: it is the trainer's forward over pages, with the same
    products and no pointers.

    Args:
        probe: tokens and expected log-probabilities; None verifies nothing.
        adapter: number of the adapter, -1 for none.

    Raises:
        WeightsError: the log-probabilities differ, under exact numerics in any bit.
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
