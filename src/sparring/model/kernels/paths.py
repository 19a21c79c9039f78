"""Which path computes: the CPU's is chosen once for the process, a GPU has one of its own."""

from __future__ import annotations

import torch

from sparring.errors import refusal
from sparring.model.kernels.compiled_library import COMPILED
from sparring.model.kernels.compiled_path import CompiledPath, compiled_path
from sparring.model.kernels.device_path import DevicePath, is_interpreted
from sparring.model.kernels.meta_path import MetaPath
from sparring.model.kernels.torch_path import TorchPath

Path = CompiledPath | TorchPath | DevicePath | MetaPath

_path: Path | None = None
_device_path: DevicePath | None = None


def current() -> Path:
    """Of the CPU."""
    global _path
    if _path is None:
        _path = compiled_path() or TorchPath()
    return _path


_meta_path = MetaPath(current)


def path_of(x: torch.Tensor) -> Path:
    """Of the device on which `x` lies; what lies on none, torch's meta device, is as large as on the CPU."""
    return _path_on(x.device.type)


def _path_on(kind: str) -> Path:
    return current() if kind == "cpu" else _meta_path if kind == "meta" else _on_device()


def _on_device() -> DevicePath:
    global _device_path
    if _device_path is None:
        _device_path = DevicePath()
    return _device_path


def path_name(device: torch.device | str = "cpu") -> str:
    """The path in use on a device: one of `path_names` on the CPU, "exact-device" on a GPU."""
    return _path_on(torch.device(device).type).name


def transposes_keys(device: torch.device | str = "cpu") -> bool:
    """Whether the path in use on a device keeps keys in transposed blocks; see `KvPages`."""
    return path_name(device) != DevicePath.name


def path_names() -> tuple[str, ...]:
    """The paths that this machine's CPU has, best first; "exact-device" where Triton is interpreted, for tests."""
    compiled = tuple(name for name in COMPILED if compiled_path(name) is not None)
    return (*compiled, TorchPath.name, *([DevicePath.name] if is_interpreted() else []))


def use(name: str) -> None:
    """Choose the CPU's path for this process, before anything is packed. SPARRING_KERNELS in the environment does the same,
    as "off" (exact-torch), "portable" (exact-kernels) and "tiles" (exact-tiles).

    Raises:
        BadInput: the name is unknown, or the kernels were asked for and cannot be built here.
    """
    global _path
    if name not in path_names():
        raise refusal("numerics path", f"one of {', '.join(path_names())}", repr(name), "choose one that this machine has")
    _path = _on_device() if name == DevicePath.name else TorchPath() if name == TorchPath.name else compiled_path(name)
