"""Programs that hold memory where no count of their own pages shows it, or as much of a processor as they get. Each
prints what it could open and waits, so that what it holds can be measured."""

from __future__ import annotations

FILLING = """
import fcntl, os, socket, struct, time
held = []
def attempt(call, *arguments):
    try: call(*arguments)
    except OSError as error: print(type(error).__name__)
def fill(call, *arguments):
    try:
        while True: call(*arguments)
    except OSError: pass
def more():
    {}
attempt(lambda: [more() for number in range({})])
print(len(held), flush=True)
time.sleep(1)
"""
"""Opens so many holders of bytes, and fills each until the kernel takes no more."""

SOCKETS = FILLING.format(
    """
    held.extend(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
    held[-1].setblocking(False)
    attempt(held[-1].setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 20)
    fill(held[-1].send, b"x")""",
    "PAIRS",
)
"""Bytes in the buffers of socket pairs, each a buffer of the kernel's own (S2)."""

SHARED = """
import mmap, os, signal, time
signal.alarm(4)
said, ready = os.pipe()
for number in range(12):
    if os.fork() == 0:
        pages = mmap.mmap(-1, 30 << 20)
        for at in range(0, 30 << 20, 4096): pages[at] = 1
        pages.madvise(mmap.MADV_DONTNEED)
        os.write(ready, b"x")
        time.sleep(20)
        os._exit(0)
    os.read(said, 1)
time.sleep(0.5)
"""
"""Shared memory that no process maps (S3)."""

SYSTEM_V = """
import ctypes, os
memory = ctypes.CDLL(None, use_errno=True)
memory.shmat.restype = ctypes.c_void_p
for number in range(12):
    if os.fork() == 0:
        segment = memory.shmget(0, 30 << 20, 0o1600)
        if segment < 0: raise OSError(ctypes.get_errno(), "shmget")
        ctypes.memset(memory.shmat(segment, None, 0), 1, 30 << 20)
        os._exit(0)
    os.wait()
"""
"""Shared memory of System V, which outlives the processes that wrote it."""

LEADERS = """
import ctypes, mmap, os, signal, threading, time
signal.alarm(4)
libc = ctypes.CDLL(None)
said, ready = os.pipe()
def hold():
    leader.wait()
    time.sleep(0.02)
    pages = mmap.mmap(-1, 30 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, 30 << 20, 4096): pages[at] = 1
    os.write(ready, b"x")
    time.sleep(20)
    os._exit(0)
for number in range(12):
    leader = threading.Event()
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        leader.set()
        libc.syscall(EXIT, 0)
    os.read(said, 1)
time.sleep(0.5)
"""
"""Memory of threads whose process's first thread has ended, so that its count of pages is 0 (S4)."""

NETLINK = FILLING.format(
    """
    held.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
    held[-1].bind((0, 0))
    held[-1].setblocking(False)
    try:
        for count in range(2000):
            held[-1].send(struct.pack("IHHIIBxHiII", 32, 18, 0x301, count, 0, 0, 0, 0, 0, 0))
    except OSError: pass""",
    "200",
)
"""Answers of the kernel in the queues of netlink sockets (N6)."""

PIPES = FILLING.format(
    """
    held.extend(os.pipe())
    os.set_blocking(held[-1], False)
    attempt(fcntl.fcntl, held[-1], 1031, 1 << 20)
    fill(os.write, held[-1], bytes(1 << 16))""",
    "9999",
)
"""Bytes in pipes that were made larger."""

SPIN = """
import os, time
for number in range(14):
    if os.fork() == 0:
        try: os.setsid()
        except OSError: pass
        while True: pass
time.sleep(60)
"""
"""Fourteen processes that never rest, each in a session of its own where it may begin one (S5)."""
