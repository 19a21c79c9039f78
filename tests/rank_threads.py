"""`RankThread`: a rank of a trainer in this process, which starts in milliseconds."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Lock

from sparring.cluster.rank import Rank

LOADING = Lock()
"""Lock of a loading model, because transformers' loading is for one thread."""


class RankThread:
    """Rank of a trainer on the thread that calls it, with the bytes and the connections of a process. Implements
    `RankCalls`."""

    def __init__(self) -> None:
        self._rank = Rank()

    def call(self, method: str, data: bytes) -> tuple[bytes, bytes]:
        with LOADING if method == "load" else nullcontext():
            return self._rank.call(method, data)

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed."""

    def close(self) -> None:
        self._rank.close()
