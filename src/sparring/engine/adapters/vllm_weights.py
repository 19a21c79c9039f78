"""`VllmWeights`: weights of a vLLM server, and the transaction that replaces them (law 9)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from uuid import uuid4

from safetensors import safe_open
from safetensors.torch import save_file

from sparring.engine.adapters.vllm_client import VllmClient
from sparring.engine.adapters.vllm_server import VllmServer
from sparring.engine.adapters.vllm_wire import GENERATE, PROBE, judge_body, judged_rows
from sparring.engine.config import EngineConfig
from sparring.engine.update import OLD_STAYS, where
from sparring.errors import EngineError, SparringError, WeightsError, boundary
from sparring.types import WeightRef
from sparring.weights.fetch import fetch
from sparring.weights.inline import Probe

TOLERANCES = {"float32": 1e-2, "bfloat16": 0.25}
"""Largest accepted difference between the publisher's log-probabilities of its probe and vLLM's, by dtype."""
_MOST_URGENT = 1 << 31


class VllmWeights:
    """Weights that a vLLM server serves. An update pauses the server, loads, verifies and commits weights, and resumes.

    Args:
        version: version of the weights in the server's folder.

    Attributes:
        shapes: shape of each tensor of the checkpoint.
        available: set while requests may be sent, cleared during an update.
        broken: error for all requests after an update failed and the old weights could not be restored; "" otherwise.
    """

    def __init__(
        self, server: VllmServer, client: VllmClient, config: EngineConfig, *, engine: str, version: int, dtype: str
    ) -> None:
        self._server, self._client, self._config, self._engine = server, client, config, engine
        self._tolerance, self._files = TOLERANCES[dtype], count()
        self._turn, self.available = asyncio.Lock(), asyncio.Event()
        self.available.set()
        self._served = sorted(map(str, server.path.glob("*.safetensors")))
        self.shapes = _shapes(self._served)
        self.version, self.broken = version, ""
        self._checksum: str | None = None
        self._closed = False
        server.ask("POST", "/update_weight_version", {"new_version": str(version)})

    async def pull(self, ref: WeightRef) -> bool:
        """Serve new weights, one update after the other. Return False if these weights are served already. Raises
        WeightsError if the update failed its verification or took too long; the old weights were loaded again. Raises
        EngineError if the old weights could not be restored."""
        async with self._turn:
            if (ref.version, ref.checksum) == (self.version, self._checksum):
                return False
            with boundary(WeightsError, where(ref)):
                staged = await asyncio.to_thread(self._stage, ref)
            self.available.clear()
            try:
                async with asyncio.timeout(self._config.update.timeout_s):
                    await self._pause()
                    tokens = ref.probe[0] if ref.probe is not None else ()
                    before = await self._judged(tokens) if tokens else ()
                await self._commit(ref, staged, (tokens, before))
                return True
            except TimeoutError:
                late = f"not applied within engine.update.timeout_s = {self._config.update.timeout_s}"
                raise WeightsError(f"{where(ref)}: {late}; {OLD_STAYS}") from None
            finally:
                if str(staged) not in self._served:
                    staged.unlink(missing_ok=True)
                try:
                    if not self._closed:
                        await self._client.post("/resume")
                finally:
                    self.available.set()

    async def verify(self, probe: Probe, about: str) -> None:
        """Compare a probe with log-probabilities under vLLM's present weights; works while vLLM is paused. Raises
        WeightsError if vLLM's log-probabilities differ from the publisher's."""
        tokens, expected = probe
        try:
            async with asyncio.timeout(self._config.update.timeout_s):
                logprobs = await self._judged(tokens)
        except TimeoutError:
            silence = f"no answer within engine.update.timeout_s; {OLD_STAYS}"
            raise WeightsError(f"{about}: expected vLLM to score the probe, got {silence}") from None
        worst = max((abs(a - b) for a, b in zip(logprobs, expected, strict=True)), default=0.0)
        # a comparison with NaN is false, so NaN is refused
        if not all(abs(a - b) <= self._tolerance for a, b in zip(logprobs, expected, strict=True)):
            raise WeightsError(
                f"{about}: expected the publisher's log-probabilities on its probe within {self._tolerance}, "
                f"got a difference of {worst:.3g}; {OLD_STAYS}"
            )

    def close(self) -> None:
        """From now on, leave the server paused if an update is interrupted, because the server is about to end."""
        self._closed = True

    async def _judged(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return log-probabilities of tokens[1:] at temperature 1; works while vLLM is paused."""
        body = judge_body(f"{PROBE}-{uuid4().hex}", tokens, 0, _MOST_URGENT)
        rows = judged_rows(await self._client.post(GENERATE, body))
        return tuple(row[token] for row, token in zip(rows, tokens[1:], strict=True))

    def _stage(self, ref: WeightRef) -> Path:
        """Write the weights to a file that vLLM's workers can read, and return its path. Shapes are compared first:
        after a load that vLLM gives up half way, the model cannot load weights again."""
        state = fetch(ref)
        for name, tensor in state.items():
            if self.shapes.get(name) != list(tensor.shape):
                expected = f"{name} of shape {self.shapes.get(name)}, as in the checkpoint"
                raise WeightsError(f"{where(ref)}: expected {expected}, got {list(tensor.shape)}; {OLD_STAYS}")
        file = self._server.folder / f"weights-{next(self._files)}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
        return file

    async def _pause(self) -> None:
        kind = self._config.update.live_kv
        await self._client.post(f"/pause?mode={'wait' if kind == 'drain' else 'keep'}&clear_cache=false")
        if kind == "recompute":
            await self._client.post("/reset_prefix_cache?reset_running_requests=true")

    async def _commit(self, ref: WeightRef, staged: Path, before: Probe) -> None:
        """Load and verify the weights of the file `staged`. On failure restore the old weights and verify them by
        `before`, a probe of the old weights."""
        try:
            with boundary(WeightsError, where(ref)):
                await self._load([str(staged)])
            if ref.probe is not None:
                await self.verify(ref.probe, where(ref))
            await self._client.post("/update_weight_version", {"new_version": str(ref.version)})
        except SparringError as cause:
            await self._roll_back(before, where(ref))
            raise cause if isinstance(cause, WeightsError) else WeightsError(str(cause)) from cause
        for file in map(Path, self._served):
            if file.is_relative_to(self._server.folder):
                file.unlink()
        self._served, self.version, self._checksum = [str(staged)], ref.version, ref.checksum

    async def _roll_back(self, probe: Probe, about: str) -> None:
        try:
            await self._load(self._served)
            if probe[0]:
                await self.verify(probe, f"{about}, rolled back")
        except SparringError as cause:
            self.broken = f"engine {self._engine}: {about} failed and the old weights could not be restored: {cause}"
            raise EngineError(self.broken) from cause

    async def _load(self, paths: list[str]) -> None:
        await self._client.post("/start_weight_update")
        await self._client.post("/update_weights", {"update_info": {"paths": paths}})
        await self._client.post("/finish_weight_update", {})


def _shapes(paths: Sequence[str]) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            shapes.update({name: file.get_slice(name).get_shape() for name in file.keys()})
    return shapes
