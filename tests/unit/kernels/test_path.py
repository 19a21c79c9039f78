"""The written protocol of a path is the truth: every path has its operations, with its signatures, and no others."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch

from sparring.kernels import paths
from sparring.kernels.compiled.path import CompiledPath
from sparring.kernels.device.path import DevicePath
from sparring.kernels.path import FusedPath, KernelPath
from sparring.kernels.torch.path import TorchPath

PROTOCOLS = {CompiledPath: FusedPath, TorchPath: KernelPath, DevicePath: KernelPath}
"""Every class with values that `paths` makes, with the protocol that it promises."""


def operations(cls: type) -> dict[str, Callable[..., object]]:
    """Public methods by name, inherited ones too."""
    return {name: value for name, value in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}


def signatures(cls: type) -> dict[str, inspect.Signature]:
    return {name: inspect.signature(method, eval_str=True) for name, method in operations(cls).items()}


def properties(protocol: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(protocol, lambda value: isinstance(value, property))}


@pytest.mark.parametrize(("path", "protocol"), PROTOCOLS.items(), ids=lambda cls: cls.__name__)
def test_a_path_has_the_operations_of_its_protocol_and_no_others(path: type, protocol: type) -> None:
    assert len(operations(protocol)) >= 20
    assert signatures(path) == signatures(protocol)


@pytest.mark.parametrize("protocol", [KernelPath, FusedPath], ids=lambda cls: cls.__name__)
def test_every_operation_of_the_protocol_is_documented(protocol: type) -> None:
    described = [*operations(protocol).values(), *(getattr(protocol, name) for name in properties(protocol))]
    assert all(inspect.getdoc(member) for member in described)


def test_every_path_that_can_be_chosen_is_one_of_these(kernel_path: str) -> None:
    path = paths.current()
    assert path.name == kernel_path and path.is_compiled == (PROTOCOLS[type(path)] is FusedPath)
    assert all(hasattr(path, name) for name in properties(KernelPath))
    assert type(path) in PROTOCOLS and paths.path_of(torch.empty(1, device="meta")) is path


class Longer(TorchPath):
    """A path with another signature."""

    def tanh(self, x: torch.Tensor, slowly: bool) -> torch.Tensor:
        """Takes one parameter more."""
        return x if slowly else x  # noqa: RUF034


class Richer(TorchPath):
    """A path with an operation that nobody has written down."""

    def sinh(self, x: torch.Tensor) -> torch.Tensor:
        """An operation of its own."""
        return torch.sinh(x)


@pytest.mark.parametrize("path", [Longer, Richer], ids=lambda cls: cls.__name__)
def test_a_path_that_differs_would_be_seen(path: type) -> None:
    assert signatures(path) != signatures(KernelPath)
