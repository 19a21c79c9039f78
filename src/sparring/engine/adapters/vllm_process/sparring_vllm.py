"""Extensions of vLLM's processes, run by vLLM's own Python. Imports nothing of Sparring.

`Receiver` loads weights; `ProbingScheduler` verifies them before they serve any request.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler as PlainScheduler
from vllm.v1.request import Request

BACKEND = "sparring"
PROBE = "sparring-verifies"
"""Part of the ids of requests that verify an update."""
_DIE_WITH_PARENT = 1


@dataclass
class Nothing:
    """Connection information of a weight transfer by files: empty."""


@dataclass
class Files:
    """Weight update by files: safetensors files with the complete model under its Hugging Face names."""

    paths: list[str]


class Receiver(WeightTransferEngine[Nothing, Files]):
    """Loader of weights from files, for example in shared memory, into the running model, by vLLM's layer-wise
    reload."""

    init_info_cls = Nothing
    update_info_cls = Files

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Do nothing: files need no connection."""

    def start_weight_update(self) -> None:
        """Begin to replace parameters layer by layer, and all data that vLLM has derived from them."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive weights and synchronise the device, if there is one. The base class also does so on a CPU build,
        which has no such device."""
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Files) -> None:
        """Load the tensors of the files."""
        self.model.load_weights(_tensors(update_info.paths))

    def finish_weight_update(self) -> None:
        """End the reload, and repack a head that shares the embedding: the reload notices only new embedding weights,
        and a CPU would continue with the packed copy of the old head (vLLM 0.32)."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        if current_platform.is_cpu() and head is not None and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Do nothing: there are no resources to free."""


class Worker:
    """Mix-in for vLLM's worker: each worker process imports this module for it, and so registers `Receiver`."""


_Scheduler: Any = PlainScheduler if current_platform.is_cpu() else AsyncScheduler


class ProbingScheduler(_Scheduler):
    """vLLM's scheduler, extended to serve requests that verify an update (probes) while all other requests are paused.
    Otherwise new weights could be checked only after running requests had sampled with them."""

    running: list[Request]
    waiting: Any
    policy: Any
    _pause_state: PauseState

    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests; while paused, the probes are included."""
        unfinished: int = super().get_num_unfinished_requests()
        return max(unfinished, len(self._probes()) if self._paused else 0)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """While paused, schedule only the probes; other requests keep their state."""
        probes = self._probes() if self._paused else []
        if not probes:
            return super().schedule(throttle_prefills)
        paused, running, waiting = self._pause_state, self.running, self.waiting
        self.running = [request for request in running if request in probes]
        self.waiting = create_request_queue(self.policy)
        for request in probes:
            if request not in self.running:
                waiting.remove_request(request)
                self.waiting.add_request(request)
        self._pause_state = PauseState.UNPAUSED
        try:
            return super().schedule(throttle_prefills)
        finally:
            for request in self.waiting:  # no room for it yet
                waiting.add_request(request)
            self.running = [request for request in running if request not in probes] + self.running
            self.waiting, self._pause_state = waiting, paused

    @property
    def _paused(self) -> bool:
        return bool(self._pause_state != PauseState.UNPAUSED)

    def _probes(self) -> list[Request]:
        return [request for request in (*self.running, *self.waiting) if PROBE in request.request_id]


def _tensors(paths: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def _end_with_parent() -> None:
    """Make this process end with the server, even if the server is killed."""
    if Path("/proc").is_dir():
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


WeightTransferEngineFactory.register_engine(BACKEND, __name__, "Receiver")
_end_with_parent()
