"""One pool for all threads: a thread allocates where the first one does."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
from sparring.allocator import share_freed_memory
if sys.argv[1] == "shared":
    share_freed_memory()
if sys.argv[1] == "from Python":
    import sparring
    try:
        sparring.run(None)
    except sparring.errors.BadInput:
        pass
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
blocks = []
thread = threading.Thread(target=lambda: blocks.extend(library.malloc(1 << 16) for _ in range(40)))
thread.start()
thread.join()
heap = next(line for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")).split()[0]
first, end = (int(place, 16) for place in heap.split("-"))
print(sum(first <= block < end for block in blocks))
"""


@pytest.mark.parametrize(("pools", "there"), [("shared", "40"), ("from Python", "40"), ("apart", "0")])
def test_a_thread_allocates_from_the_pool_of_the_first(pools: str, there: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, pools], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == there
