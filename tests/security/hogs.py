"""Programs that hold memory where no count of their own pages shows it, or as much of a processor as they get. Each
prints what it could open and waits, so that what it holds can be measured."""

from __future__ import annotations

SOCKETS = """
import socket, time
held = []
try:
    while len(held) < PAIRS * 2:
        held += socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        sender = held[-1]
        sender.setblocking(False)
        try:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 20)
        except OSError as error:
            print(type(error).__name__)
        try:
            while True: sender.send(b"x")
        except OSError:
            pass
except OSError:
    pass
print(len(held), flush=True)
time.sleep(1)
"""
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

NETLINK = """
import socket, struct, time
held = []
try:
    while len(held) < 200:
        held.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
        held[-1].bind((0, 0))
        held[-1].setblocking(False)
        try:
            for count in range(2000):
                held[-1].send(struct.pack("IHHIIBxHiII", 32, 18, 0x301, count, 0, 0, 0, 0, 0, 0))
        except OSError:
            pass
except OSError as error:
    print(type(error).__name__)
print(len(held), flush=True)
time.sleep(1)
"""
"""Answers of the kernel in the queues of netlink sockets (N6)."""

PIPES = """
import fcntl, os, time
held = []
try:
    while True:
        held += os.pipe()
        os.set_blocking(held[-1], False)
        try:
            fcntl.fcntl(held[-1], 1031, 1 << 20)
        except OSError as error:
            print(type(error).__name__)
        try:
            while True: os.write(held[-1], bytes(1 << 16))
        except OSError:
            pass
except OSError:
    pass
print(len(held), flush=True)
time.sleep(1)
"""
"""Bytes in pipes that were made larger."""

TCP = """
import socket, time
held = []
listening = socket.create_server(("127.0.0.1", 9000))
try:
    while len(held) < 200:
        held += socket.create_connection(("127.0.0.1", 9000)), listening.accept()[0]
        held[-2].setblocking(False)
        try:
            while True: held[-2].send(bytes(1 << 16))
        except OSError:
            pass
except OSError:
    pass
print(len(held), flush=True)
time.sleep(1)
"""
"""Bytes in the buffers of connections to itself, where a box has a loopback interface."""

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

WORK = """
import time
began = time.perf_counter()
total = 0
for number in range(3_000_000): total += number
print(time.perf_counter() - began)
"""
"""A third of a second of honest work, and how long it took."""
