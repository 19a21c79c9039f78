"""Decoders are made once, whichever threads ask for them first."""

import subprocess
import sys

PROGRAM = """
import sys, threading
from sparring.store.codec import decode, encode
from sparring.types import Batch, Sample

row = Sample(
    id="a", group="g", source="policy", tokens=(1, 2), weights={"policy": (0.0, 1.0)}, advantages=(0.0, 1.0),
    logprobs=(0.0, -1.0), versions=(-1, 0), kv_versions=(-1, 0),
)
data = encode(Batch(step=1, model="policy", rows=(row,) * 50, denominators={"policy": 1.0}))
ready, found = threading.Barrier(8), []
sys.setswitchinterval(1e-6)


def read():
    ready.wait()
    found.append(decode(data, Batch).step)


threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == [1] * 8
"""


def test_threads_that_decode_a_class_for_the_first_time_do_not_crash() -> None:
    """Each try is a process, because the first time is over after one; without a lock one in four crashed."""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", PROGRAM], check=True)
