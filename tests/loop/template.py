"""A process that has imported what a run imports and computed nothing: runs of the tests begin as forks of it.

A start of `sparring run` is mostly imports, 4 s of them. What tests of killed, stopped and resumed runs are about comes
after: a process of its own, which knows nothing of those before it, with its own signals, memory and locks. Such is a
fork of one that has only imported. Imports themselves are tested in fresh processes (tests/unit/cli/test_main.py,
tests/loop/test_verbs.py), and so are limits and sizes of memory.

Each request on the socket is a command's words, its folder and environment, with its standard streams. The process is
forked twice, so that it becomes a child of the tests' process (a "subreaper"), which waits for it as for any other.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys

MESSAGE = 1 << 20


def serve(requests: socket.socket) -> list[str] | None:
    """Fork a process for each request. Returns in it, with its words; None in the template, at its end."""
    while True:
        message, streams, _, _ = socket.recv_fds(requests, MESSAGE, 3)
        if not message:
            return None
        middle = os.fork()
        if not middle:
            if pid := os.fork():
                requests.send(str(pid).encode())
                os._exit(0)
            requests.close()
            return begin(json.loads(message), streams)
        os.waitpid(middle, 0)
        requests.send(b"begun")  # the process is a child of the tests' process now
        for stream in streams:
            os.close(stream)


def begin(request: dict, streams: list[int]) -> list[str]:
    """Give a new process its streams, folder and environment; returns its words."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        if stream > 2:
            os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return request["words"]


def main() -> int:
    """Import, then serve on the socket that is given by its number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import sparring.cli.chat
    import sparring.cli.result
    import sparring.cluster.inline
    import sparring.dashboard.report
    import sparring.engine.native
    import sparring.launch.chat
    import sparring.launch.diff
    import sparring.launch.gateway
    import sparring.launch.replay
    import sparring.launch.run
    import sparring.launch.serve
    import sparring.render.load
    import sparring.stages.preflight.run
    import sparring.train.trainer  # noqa: F401
    from sparring.cli.start import main as program

    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    gc.collect()
    gc.freeze()
    words = serve(socket.socket(fileno=int(sys.argv[1])))
    if words is None:
        return 0
    sys.argv = words
    return program()


if __name__ == "__main__":
    sys.exit(main())
