"""A vLLM server as a process: started, called over a socket file, and ended with the process that started it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import httpx

from sparring.engine.config import EngineConfig
from sparring.errors import EngineError, refusal
from sparring.scratch import scratch

PROCESS = Path(__file__).parent / "vllm_process"
BLOCK_SIZE = 32
"""Tokens per block of vLLM's cache, the smallest number that its attention on a CPU supports."""
_TAIL_LINES, _SHORT_S, _PATIENCE_S = 25, 0.1, 10.0
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
_MEMORY = Path("/dev/shm")


class VllmServer:
    """Process that serves a checkpoint folder with vLLM; the constructor waits until it answers.

    The server runs in its own interpreter, so its packages may differ from Sparring's. It listens on a socket file in a
    private folder, because vLLM's training interface has no password. It reads its standard input, which only this
    process writes: however this process ends, `kill -9` included, the server and its workers end too.

    Args:
        path: Hugging Face checkpoint folder.
        threads: CPU threads of its worker.

    Raises:
        BadInput: the interpreter does not exist, or has no vLLM.
        EngineError: the server did not start; the message includes the end of the server's log.
    """

    def __init__(self, path: str | Path, config: EngineConfig, *, dtype: str = "float32", threads: int = 1) -> None:
        python = find_vllm(config)
        shape = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        self.vocab_size = int((shape.get("text_config") or shape)["vocab_size"])
        self.path = Path(path)
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(scratch(_MEMORY if _MEMORY.is_dir() else None, "vllm"))
        self.socket = self.folder / "socket"
        self._log, self._closed = self.folder / "log", False
        command = [python, PROCESS / "serve.py", "--model", path, "--uds", self.socket, *_arguments(config, dtype)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*map(str, command)],
                env=_environment(python, threads),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait(time.monotonic() + config.vllm.start_timeout_s)
            [model] = self.ask("GET", "/v1/models")["data"]
        except BaseException:
            self.close()
            raise
        self.max_positions = int(model["max_model_len"])

    @property
    def pid(self) -> int:
        """Process id of the server; its workers are in its process group."""
        return self._process.pid

    @property
    def transport(self) -> httpx.AsyncHTTPTransport:
        """New transport for asyncio. A connection serves one call, because vLLM closes a connection after a failed
        call."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncHTTPTransport(uds=str(self.socket), limits=limits)

    def ask(self, method: str, address: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send one blocking request; used while the server starts. Raises EngineError if the request failed."""
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://vllm") as client:
            answer = client.request(method, address, json=body)
        if answer.status_code != httpx.codes.OK:
            raise EngineError(f"vLLM {address}: expected status 200, got {answer.status_code}: {answer.text[:500]}")
        return answer.json() if answer.content else None

    def ending(self) -> str:
        """Describe how the server ended: exit status and the end of its log; "" while the server runs."""
        code = self._process.poll()
        return "" if code is None else f"; vLLM ended with status {code}, the end of its log:\n{self.log_tail()}"

    def log_tail(self) -> str:
        """Return the last lines of its log, preceded by the first line that names an error: vLLM's processes end one
        after the other, so the cause is far above the end."""
        return told(self._log.read_text(errors="replace")) if self._log.exists() else ""

    def wait(self) -> str:
        """Wait until the server has ended; return its `ending`, or "" if `close` ended it."""
        self._process.wait()
        return "" if self._closed else self.ending()

    def close(self) -> None:
        """End the server and its workers and remove its folder. Safe to call twice."""
        self._closed = True
        assert self._process.stdin is not None
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.stdin.close()  # which kills its process group
            self._process.wait()
        self._process.stdin.close()
        self._stack.close()

    def _wait(self, deadline: float) -> None:
        while True:
            code = self._process.poll()
            if code is not None:
                end = f"exit status {code}; the end of its log:\n{self.log_tail()}"
                raise EngineError(f"vLLM: expected the server to start, got {end}")
            if time.monotonic() > deadline:
                remedy = f"raise engine.vllm.start_timeout_s; the end of its log:\n{self.log_tail()}"
                raise EngineError(f"vLLM: expected the server to start in time, got no answer; {remedy}")
            try:
                self.ask("GET", "/health")
                return
            except (httpx.TransportError, EngineError, json.JSONDecodeError):
                time.sleep(_SHORT_S)


def find_vllm(config: EngineConfig) -> str:
    """Return the path of the Python interpreter with vLLM. Raises BadInput if it does not exist, or lacks vLLM."""
    python = config.vllm.python or sys.executable
    where = "engine.vllm.python"
    remedy = "name the interpreter of an environment with vLLM (`make test-vllm` installs .venv-vllm, for CPUs)"
    looks = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    try:
        done = subprocess.run([python, "-c", looks], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        raise refusal(where, "a Python interpreter", f"{python}: {error.strerror}", remedy) from error
    if done.returncode:
        raise refusal(where, "a Python that can import vllm", f"{python}, which cannot", remedy)
    return python


def _arguments(config: EngineConfig, dtype: str) -> list[str]:
    """Return vLLM's command-line arguments. The user's arguments come last, so they override the others."""
    cached = config.kv.share_prefixes or config.kv.across_turns != "drop"
    options = {
        "--dtype": dtype,
        "--max-num-seqs": config.batch.max_running,
        "--max-num-batched-tokens": config.batch.max_tokens,
        "--block-size": BLOCK_SIZE,
        "--kv-cache-memory-bytes": config.kv.bytes,
        "--scheduling-policy": "priority",
        # log-probabilities of the sampling distribution (law 2), without a limit on their number
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": -1,
        "--generation-config": "vllm",
    }
    flags = [
        "--skip-tokenizer-init",
        "--enable-prompt-tokens-details",
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
    ]
    flags.append("--enable-prefix-caching" if cached else "--no-enable-prefix-caching")
    return [*flags, *(str(word) for pair in options.items() for word in pair), *config.vllm.arguments]


def _environment(python: str, threads: int) -> dict[str, str]:
    """Return the environment that vLLM's documentation recommends on a CPU, with its training interface enabled."""
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    libraries = [
        str(openmp) if openmp.exists() else None,
        find_library("tcmalloc_minimal"),
        os.environ.get("LD_PRELOAD"),
    ]
    return {
        **{name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"},
        "LD_PRELOAD": ":".join(name for name in libraries if name),
        "PYTHONPATH": str(PROCESS),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def told(log: str) -> str:
    """Return the last lines of a log, preceded by the first line that names an error, if that is further up."""
    lines = log.splitlines()
    above = [line for line in lines[:-_TAIL_LINES] if _ERROR.search(line)]
    return "\n".join([*above[:1], *lines[-_TAIL_LINES:]])
