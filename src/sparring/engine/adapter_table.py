"""Adapters that an engine serves in addition to its base model: loaded, replaced and dropped between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sparring.engine.runner import Runner
from sparring.engine.update import OLD_STAYS, verify, where
from sparring.engine.weight_names import ServedWeights, Weights
from sparring.errors import RequestRefused, WeightsError, boundary
from sparring.model.causal import CausalModel
from sparring.model.lora import Adapter
from sparring.types import WeightRef


class AdapterTable:
    """Adapters by name. The adapter with the engine's own name serves the requests that name no adapter.

    Args:
        model: served model; its adapter for all rows, if any, becomes the engine's own adapter.
        forget: function that is called with the `ServedWeights.key` of weights that are no longer served.
    """

    def __init__(
        self, model: CausalModel, runner: Runner, name: str, base: ServedWeights, forget: Callable[[Weights], object]
    ) -> None:
        self._model, self._runner, self._name, self._base, self._forget = model, runner, name, base, forget
        self._served: dict[str, ServedWeights] = {}
        self._leaving: list[ServedWeights] = []
        self._loads = 0
        own, model.adapters.everywhere = model.adapters.everywhere, None
        if own is not None:
            self._put(name, own, base.version, None)

    def __len__(self) -> int:
        return len(self._served) + len(self._leaving)

    def find(self, name: str | None) -> ServedWeights:
        """Return the weights of a request with `adapter = name`. The name None selects the engine's own adapter, or the
        base model if the engine has none. Raises RequestRefused if no adapter with this name is loaded."""
        if name is None:
            return self._served.get(self._name, self._base)
        if name not in self._served:
            loaded = ", ".join(sorted(self._served)) or "none"
            raise RequestRefused(f"adapter {name}: expected a loaded adapter, got another name; loaded: {loaded}")
        return self._served[name]

    def commit(self, ref: WeightRef, adapter: Adapter) -> ServedWeights | None:
        """Load a staged adapter, or replace its older version, and verify it by the reference's probe. On failure the
        unchanged old version remains in service.

        Returns:
            The served adapter; None if exactly this version was served already.

        Raises:
            WeightsError: the adapter does not reproduce the probe's log-probabilities, or its version is not newer.
        """
        name = str(ref.adapter)
        served = self._served.get(name)
        if served is not None and (ref.version, ref.checksum) == (served.version, served.checksum):
            return None
        if served is not None and ref.version <= served.version:
            version = f"{ref.version}; publish every change of an adapter under a new version number"
            raise WeightsError(f"{where(ref)}: expected a version above the served {served.version}, got {version}")
        spare = self._free()
        self._model.adapters.put(spare, adapter)
        try:
            with boundary(WeightsError, where(ref)):
                verify(self._runner, where(ref), ref.probe, spare)
        except WeightsError as cause:
            raise WeightsError(f"{cause}; {OLD_STAYS}") from cause
        finally:
            self._model.adapters.take(spare)
        return self._put(name, adapter, ref.version, ref.checksum)

    def drop(self, name: str) -> None:
        """Serve no new request with an adapter; running requests finish with it."""
        self.find(name)
        self._leaving.append(self._served.pop(name))

    def sweep(self, used: Iterable[ServedWeights]) -> None:
        """Unload dropped adapters that no request in `used` needs."""
        if self._leaving:
            still = set(used)
            for served in self._leaving:
                if served not in still:
                    self._model.adapters.take(served.number)
                    self._forget(served.key)
            self._leaving = [served for served in self._leaving if served in still]

    def _put(self, name: str, adapter: Adapter, version: int, checksum: str | None) -> ServedWeights:
        self._loads += 1
        served = self._served.get(name)
        if served is None:
            served = self._served[name] = ServedWeights(version=version, number=self._free())
        else:
            self._forget(served.key)
        served.version, served.checksum, served.serial = version, checksum, self._loads
        before = self._model.adapters.by_number.get(served.number)
        if before is not None and before.takes(state := adapter.state()):
            before.load_state(state)  # graphs of its number go on
        else:
            self._model.adapters.put(served.number, adapter)
        return served

    def _free(self) -> int:
        taken = {served.number for served in (*self._served.values(), *self._leaving)}
        return next(number for number in range(len(taken) + 1) if number not in taken)
