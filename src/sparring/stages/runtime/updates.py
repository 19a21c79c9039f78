"""Weight updates of an engine that are repeated if they are late or refused (law 9)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sparring.backoff import retry_pause_s
from sparring.engine.config import EngineConfig
from sparring.errors import EngineError, SparringError, WeightsError
from sparring.protocols import Engine
from sparring.types import WeightRef


class RetriedUpdates:
    """Engine that repeats failed weight updates. Implements `loop.ServesWeights`: `pull` returns when the weights are
    served; until then the window stays shut and the engine serves the old weights.

    Args:
        report: called with a sentence before each repetition.
    """

    def __init__(self, engine: Engine, config: EngineConfig, report: Callable[[str], None]) -> None:
        self._engine, self._config, self._report = engine, config, report

    async def pull(self, ref: WeightRef) -> None:
        """Serve published weights.

        Raises:
            WeightsError: all tries failed; the engine serves the old version.
        """
        retries, where = self._config.update.retries, f"weights of {ref.model} version {ref.version}"
        for attempt in range(retries + 1):
            try:
                return await self._engine.pull(ref)
            except (WeightsError, EngineError) as error:
                if attempt == retries:
                    raise WeightsError(self._failure(ref, error)) from error
                pause_s = retry_pause_s(self._config.update.retry_delay_s, attempt + 1, ref.checksum, ref.version)
                again = f"tried again in {pause_s:.1f} s ({attempt + 1} of {retries})"
                self._report(f"{where}: {again}, version {self._engine.version} serves on: {error}")
                await asyncio.sleep(pause_s)

    def _failure(self, ref: WeightRef, error: SparringError) -> str:
        expected = f"expected an update within {self._config.update.retries + 1} tries"
        served = f"the engine serves version {self._engine.version}, the run cannot go on without them"
        fix = f"mend the engine, then the same command goes on after step {ref.version}"
        return f"weights of {ref.model} version {ref.version}: {expected}, got {error}; {served}; {fix}"
