"""Ranks on CPUs, connected by gloo."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from sparring.errors import TrainerError, boundary

dist: Any = torch.distributed  # its process groups are not typed


LOOPBACK = "127.0.0.1"
"""Address by which ranks on one machine reach each other."""


class Meeting:
    """Store by which ranks find each other, in the process of the first rank. The store listens only on `host`, an
    address of this machine. Raises TrainerError if this machine does not have that address.

    Attributes:
        address: address of the store, `host:port`.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        with boundary(TrainerError, "meeting of the trainer's ranks"):
            listening = socket.create_server((host, 0))
            port = listening.getsockname()[1]
            self.address = f"{host}:{port}"
            # a port of its own choice would be open on all addresses of the machine
            self._store = dist.TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )


class GlooRanks:
    """Processes, or threads, that are connected by gloo. Implements `Ranks`.

    Args:
        meeting: address of the ranks' `Meeting`.
        timeout_s: seconds that a rank waits for another rank.
        host: address by which the other ranks reach this machine.

    Raises:
        TrainerError: the other ranks did not connect in time.
    """

    def __init__(self, rank: int, count: int, meeting: str, timeout_s: float, host: str = LOOPBACK) -> None:
        self.rank, self.count, self.waited_s = rank, count, 0.0  # waited in `gather`, which comes before each sum
        timeout, (at, _, port) = timedelta(seconds=timeout_s), meeting.rpartition(":")
        with boundary(TrainerError, self._where):
            store = dist.TCPStore(at, int(port), wait_for_workers=False, timeout=timeout)
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timeout
            # no default group of the process, so that several trainers, and threads of a test, have one each
            self._group = dist.ProcessGroupGloo(store, rank, count, options)

    @property
    def _where(self) -> str:
        return f"rank {self.rank} of {self.count}"

    def gather(self, data: bytes) -> list[bytes]:
        with boundary(TrainerError, self._where):
            sizes, begun = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)], time.monotonic()
            self._group.allgather([sizes], [torch.tensor([len(data)])]).wait()
            self.waited_s += time.monotonic() - begun
            longest = max(1, *(int(size) for size in sizes))
            padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
            every = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.count)]
            self._group.allgather([every], [padded]).wait()
        return [each.numpy().tobytes()[: int(size)] for each, size in zip(every, sizes, strict=True)]

    def exchange(self, given: torch.Tensor, lengths: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        with boundary(TrainerError, self._where):
            self._group.alltoall_base(received, given, list(sizes), list(lengths), dist.AllToAllOptions()).wait()
        return list(received.split(list(sizes)))

    def broadcast(self, data: torch.Tensor, owner: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = owner, 0
        with boundary(TrainerError, self._where):
            self._group.broadcast([data], options).wait()
