"""`cluster.kind = "ray"`: engines of the policy, and ranks of trainers, on the nodes of a Ray cluster. A separate
process runs `ray_client`, the only client of Ray."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sparring.cluster.child import ChildProcess
from sparring.cluster.config import ClusterConfig
from sparring.cluster.engine_process import DeadEngine
from sparring.cluster.rank import RankEnded
from sparring.errors import EngineError, SparringError, refusal

OLDEST = (2, 52)
"""Oldest version of Ray with authentication by token."""

CONNECT_S = 10.0
"""Seconds that Ray has to connect, in addition to `cluster.wait_s`."""

END_S = 20.0
"""Seconds that the client may take to end the engines and itself."""

LARGE = 1 << 18
"""Number of bytes from which on the data of a call is put into Ray's object store once for all ranks."""

MAIN = "from sparring.cluster.ray_client import main; main()"
"""Program of the client: not the module itself, whose classes Ray then could not find on its nodes."""


class RayProcess:
    """Process with a `RayClient`, which ends with this process. The methods may be called in any thread. The output of
    Ray goes to the file `log`; with None it is dropped."""

    def __init__(self, log: Path | None, *arguments: Any) -> None:
        self._log, self._process = log, ChildProcess((sys.executable, "-c", MAIN), log)
        self._connection = Connection(os.dup(self._process.socket.fileno()))
        self._asked: dict[int, Future[Any]] = {}
        self._lock, self._number, self._ended = threading.Lock(), 0, False
        self._connection.send(arguments)
        with suppress(EOFError, OSError):
            self._connection.recv()  # it has imported Ray
        self._reading = threading.Thread(target=self._read, name="Ray's answers", daemon=True)
        self._reading.start()

    def call(self, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        """Call a method of the client and return its result.

        Raises:
            TimeoutError: there is no result within `within_s` seconds.
            DeadEngine: the client's process has ended.
            BadInput, EngineError: error of the method.
        """
        answer: Future[Any] = Future()
        with self._lock:
            if self._ended:
                raise self._gone()
            self._number += 1
            self._asked[self._number] = answer
            with suppress(OSError):  # it has ended, which `_read` notices
                self._connection.send((self._number, method, arguments))
        return answer.result(within_s)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the client, and ignore an `EngineError`: the engine or rank may have ended."""
        with suppress(EngineError):
            self.call(method, *arguments)

    def close(self, within_s: float = END_S) -> None:
        """End the client, and with it the engines. Safe to call twice."""
        self._process.close(within_s)
        self._reading.join()
        self._connection.close()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, result, failure = self._connection.recv()
                answer = self._asked.pop(number)
                if failure is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(failure)
        with self._lock:
            self._ended = True
        while self._asked:
            self._asked.popitem()[1].set_exception(self._gone())

    def _gone(self) -> DeadEngine:
        where = f"; see {self._log}" if self._log is not None else ""
        return DeadEngine(f"Ray: expected its client in a process of the run, got one that has ended{where}")


class RayEngine:
    """Engine process of a run on a node of a Ray cluster. Ray restarts the process if the node dies. Implements
    `PlacedEngine`."""

    def __init__(self, ray: RayProcess, number: int) -> None:
        self._ray, self._number = ray, number

    def find(self, within_s: float, last: bool = False) -> str:
        return str(self._ray.call("find", self._number, within_s, last))

    def kill(self) -> None:
        self._ray.tell("tell", self._number, "kill")

    def replied(self) -> None:
        self._ray.tell("tell", self._number, "replied")

    def close(self) -> None:
        self._ray.tell("end", self._number)


class Given:
    """Data of the last call of a trainer, put into Ray's object store once for all ranks."""

    def __init__(self, ray: RayProcess) -> None:
        self._ray, self._one_at_a_time = ray, threading.Lock()
        self._data, self._number = b"", 0

    def number(self, data: bytes) -> int:
        """Put data into Ray's object store, unless the last call had the same data. Return the data's number for
        `RankPlaces.call`."""
        with self._one_at_a_time:
            if data is not self._data:
                self._number = self._ray.call("ranks.give", data, self._number)
                self._data = data
            return self._number


class RayRank:
    """Rank of a trainer on a node of a Ray cluster. The ranks of a trainer share `given`. Implements `RankCalls`."""

    def __init__(self, ray: RayProcess, number: int, given: Given) -> None:
        self._ray, self._number, self._given = ray, number, given

    def call(self, method: str, data: bytes) -> tuple[bytes, bytes]:
        try:
            argument = self._given.number(data) if len(data) >= LARGE else data
            failure, answer = self._ray.call("ranks.call", self._number, method, argument)
        except EngineError as error:
            raise RankEnded(str(error)) from None
        return failure, answer

    def kill(self) -> None:
        self._ray.tell("ranks.kill", self._number)

    def close(self) -> None:
        self._ray.tell("ranks.end", self._number)


class RayParts:
    """Engines and ranks of a run on a Ray cluster of `nodes` nodes.

    Args:
        threads: processors of each engine.
        for_ranks: processors of the ranks of one trainer together.
        log: file for the output of Ray; None drops the output.

    Raises:
        BadInput: Ray is not installed, does not answer, or lacks processors.
    """

    def __init__(self, config: ClusterConfig, threads: int, for_ranks: int, log: Path | None) -> None:
        _check_installed()
        self._ray = RayProcess(log, config, threads, for_ranks)
        try:
            self._ray.call("connect", within_s=config.wait_s + CONNECT_S)
            self.nodes: int = self._ray.call("check_resources", within_s=config.wait_s + CONNECT_S)
        except TimeoutError:
            self._ray.close(within_s=0)
            expected = f"a Ray cluster at {config.address} that answers within cluster.wait_s = {config.wait_s:g} s"
            advice = "start it again, correct the address, or raise cluster.wait_s"
            raise refusal("cluster.address", expected, "none", advice) from None
        except SparringError:
            self._ray.close()
            raise

    def start(self, words: Sequence[str], key: str) -> list[RayEngine]:
        """Place engines and start them. Return without waiting for their answer."""
        return [RayEngine(self._ray, number) for number in self._ray.call("start", words, key)]

    def ranks(self, threads: int) -> Callable[[int], list[RayRank]]:
        """Return a function that places a given number of ranks of a trainer. When it is called again, the new ranks
        replace the earlier ranks and may be fewer."""
        made = list[RayRank]()

        def place(count: int) -> list[RayRank]:
            given, numbers = Given(self._ray), self._ray.call("ranks.place", count, threads, bool(made))
            made[:] = [RayRank(self._ray, number, given) for number in numbers]
            return made

        return place

    def close(self) -> None:
        """Leave the cluster, which ends engines and ranks."""
        self._ray.close()


def _check_installed() -> None:
    """Refuse a missing or an old version of Ray, without importing Ray."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError as error:
        raise refusal("cluster.kind", '"ray" with Ray installed', "none", "pip install 'sparring[ray]'") from error
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise refusal("Ray", f"version {'.'.join(map(str, OLDEST))} or newer", version, "install a newer one")
