"""Choice of the kernel path: the CPU's is chosen once per process, a GPU has its own."""

from __future__ import annotations

import os
from functools import cache

import torch

from sparring.errors import refusal
from sparring.kernels.compiled.build import FLAGS, SOFTWARE_PAIRS, SOFTWARE_TILES, build, load
from sparring.kernels.compiled.library import COMPILED, NAME, PAIRS_NAME, TILES_NAME, Library
from sparring.kernels.compiled.path import CompiledPath
from sparring.kernels.device.path import DevicePath, is_interpreted
from sparring.kernels.path import FusedPath, KernelPath
from sparring.kernels.torch.path import TorchPath

ALL_PATHS = (*COMPILED, TorchPath.name, DevicePath.name)
"""Names of all paths: the CPU's, best first, then the GPU's."""
SETTINGS = {"off": TorchPath.name, "portable": NAME, "pairs": PAIRS_NAME, "tiles": TILES_NAME}
"""Values of SPARRING_KERNELS and the paths that they select."""

_SOFTWARE = {TILES_NAME: SOFTWARE_TILES, PAIRS_NAME: SOFTWARE_PAIRS}
_PROBES = {TILES_NAME: "has_tiles", PAIRS_NAME: "has_pairs"}
_INSTRUCTIONS = {TILES_NAME: "AMX tiles", PAIRS_NAME: "AVX512_BF16"}
_NO_COMPILER = "no C++ compiler was found (g++, or what CXX names)"
_NO_DEVICE = "it computes on a GPU (make test-gpu), or in Triton's interpreter (make test-triton)"

_path: KernelPath | None = None
_device_path: DevicePath | None = None


def current() -> KernelPath:
    """Return the CPU's path: the one that SPARRING_KERNELS selects, or the best that the processor supports.

    Raises:
        BadInput: SPARRING_KERNELS is not a key of `SETTINGS`, or selects a path that this machine cannot compute.
    """
    global _path
    if _path is None:
        wish = os.environ.get("SPARRING_KERNELS")
        if wish and wish not in SETTINGS:
            expected = f"one of {', '.join(SETTINGS)}"
            raise refusal("SPARRING_KERNELS", expected, repr(wish), "take one of these, or unset it")
        _path = (
            _make_path(SETTINGS[wish], f"SPARRING_KERNELS={wish}")
            if wish
            else _make_path(path_names()[0], "numerics path")
        )
    return _path


def path_of(x: torch.Tensor) -> KernelPath:
    """Return the path of the device that holds `x`; for torch's meta device the path of the CPU."""
    return _of_device(x.device)


def fused_path(device: torch.device | str = "cpu") -> FusedPath | None:
    """Return the path of a device if it is a compiled path, which fuses operations; else None."""
    path = _of_device(device)
    return path if isinstance(path, CompiledPath) else None


def _of_device(device: torch.device | str) -> KernelPath:
    kind = torch.device(device).type
    return current() if kind in ("cpu", "meta") else _on_device()


def _on_device() -> DevicePath:
    global _device_path
    if _device_path is None:
        _device_path = DevicePath()
    return _device_path


def path_name(device: torch.device | str = "cpu") -> str:
    """Return the name of the path in use on a device: one of `path_names` on the CPU, "exact-device" on a GPU."""
    return _of_device(device).name


def transposes_keys(device: torch.device | str = "cpu") -> bool:
    """Return True if the path of a device stores keys in transposed blocks; see `KvPages`."""
    return _of_device(device).transposes_keys


def is_compiled(device: torch.device | str = "cpu") -> bool:
    """Return True if the path of a device is a compiled one, which computes a step in one call."""
    return _of_device(device).is_compiled


def path_names(*, software: bool = False) -> tuple[str, ...]:
    """Return the paths that this machine's CPU supports, best first; with `software` also those whose missing
    instructions are emulated, slowly; with Triton's interpreter, for tests, also "exact-device"."""
    return tuple(name for name in ALL_PATHS if not why_not(name, software=software))


def why_not(name: str, *, software: bool = True) -> str:
    """Return the reason why this machine's CPU does not support a path; empty if it does. With `software`, emulation of
    missing instructions counts as support."""
    if name in COMPILED:
        library = _library(name, software)
        return library if isinstance(library, str) else ""
    return _NO_DEVICE if name == DevicePath.name and not is_interpreted() else ""


def use(name: str) -> None:
    """Choose this process's CPU path by a name of `ALL_PATHS`, before anything is packed (SPARRING_KERNELS takes a key
    of `SETTINGS`). Missing instructions are emulated, slowly, where possible; a path that this machine cannot compute
    is refused (`BadInput`)."""
    global _path
    _path = _make_path(name, "numerics path")


def _make_path(name: str, where: str) -> KernelPath:
    absent = why_not(name) if name in ALL_PATHS else "there is none of that name"
    if absent:
        expected = f"a path that this machine computes ({', '.join(path_names())})"
        raise refusal(where, expected, f"{name}: {absent}", "choose one of them")
    if name == DevicePath.name:
        return _on_device()
    if name == TorchPath.name:
        return TorchPath()
    library = _library(name, True)
    assert isinstance(library, Library)
    return CompiledPath(library, name)


def _library(name: str, software: bool) -> Library | str:
    """Return the library of a compiled path, or the reason why this machine cannot use the path."""
    native = _loaded(FLAGS)
    if native is None:
        return _NO_COMPILER
    if name not in _PROBES or native.functions[_PROBES[name]]():
        return native
    lacking = f"the processor has no {_INSTRUCTIONS[name]}"
    if not software:
        return lacking
    slow = _loaded(_SOFTWARE[name])
    if slow is not None and slow.functions[_PROBES[name]]():
        return slow
    return f"{lacking}, nor what computes them in software ({_INSTRUCTIONS[PAIRS_NAME]})"


@cache
def _loaded(flags: tuple[str, ...]) -> Library | None:
    path = build(flags)
    return None if path is None else Library(load(path))
