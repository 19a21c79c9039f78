"""Devices of this machine, found without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Literal

from sparring.errors import refusal

Device = Literal["auto", "cpu", "cuda"]
"""Name of a device; auto: a GPU if there is one that the installed torch can use."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that names the GPUs of a process."""


def resolve_device(wanted: str, where: str) -> str:
    """Return "cpu" or "cuda" for a `Device`; refuse "cuda" if no GPU can be used (`BadInput`), with `where`, the name
    of the setting, in the message."""
    if wanted == "cpu":
        return "cpu"
    usable = gpu_count() > 0
    if wanted == "cuda" and not usable:
        raise refusal(where, "a GPU and a torch built for it", "none that can be used", 'write "cpu" or "auto"')
    return "cuda" if usable else "cpu"


@cache
def gpu_count() -> int:
    """Return the number of GPUs that the driver shows this process; 0 if the installed torch is built for CPUs."""
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.origin or not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def gpu_of(number: int, count: int) -> str:
    """Return the GPU for another process of this run, as a value of `VISIBLE`. `number` counts these processes from 0;
    the machine has `count` GPUs. The run's own process computes on the first GPU; the others have the rest in turn, or
    share the first if there is only one."""
    names = [name for name in os.environ.get(VISIBLE, "").split(",") if name] or [str(gpu) for gpu in range(count)]
    others = names[1:count] or names[:1]
    return others[number % len(others)]
