"""Folders of weights, compared tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparring.errors import BadInput
from sparring.weights.compare import first_tensor_difference, stored_tensors


def folder(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir()
    half = len(tensors) // 2  # in two files, as large models are written
    names = list(tensors)
    for number, part in enumerate((names[:half], names[half:])):
        save_file({name: tensors[name] for name in part}, path / f"model-{number}.safetensors")
    return path


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.arange(12).reshape(3, 4).to(dtype) for name in ("b", "a", "c")}


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.float32, ("6.0 (0x40c00000)", "0.5 (0x3f000000)")),
        (torch.bfloat16, ("6.0 (0x40c0)", "0.5 (0x3f00)")),
        (torch.float16, ("6.0 (0x4600)", "0.5 (0x3800)")),
        (torch.int64, ("6 (0x0000000000000006)", "0 (0x0000000000000000)")),
        (torch.float8_e4m3fn, ("0x4c", "0x30")),
    ],
)
def test_position_and_values_are_named(tmp_path: Path, dtype: torch.dtype, values: tuple[str, str]) -> None:
    one, other = weights(dtype), weights(dtype)
    other["b"].view(-1)[6] = torch.tensor(0.5).to(dtype)
    other["c"].view(-1)[0] = torch.tensor(9.0).to(dtype)
    difference = first_tensor_difference(folder(tmp_path / "1", **one), folder(tmp_path / "2", **other))
    assert (difference.tensor, difference.what, difference.values) == ("b", "value at (1, 2)", values)


def test_equal_weights_have_no_difference_across_file_layouts(tmp_path: Path) -> None:
    one = weights(torch.float32)
    other = {name: one[name] for name in sorted(one)}
    assert first_tensor_difference(folder(tmp_path / "1", **one), folder(tmp_path / "2", **other)) is None


def test_zeros_of_other_signs_differ(tmp_path: Path) -> None:
    one, other = {"a": torch.zeros(())}, {"a": -torch.zeros(())}
    difference = first_tensor_difference(folder(tmp_path / "1", **one), folder(tmp_path / "2", **other))
    assert difference.values == ("0.0 (0x00000000)", "-0.0 (0x80000000)") and difference.what == "value at (0)"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"b": torch.zeros(3, 4, dtype=torch.float64)}, "dtype"),
        ({"b": torch.zeros(4, 3)}, "shape"),
        ({"b2": torch.zeros(3)}, "tensor"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, change: dict[str, torch.Tensor], what: str) -> None:
    one = weights(torch.float32)
    difference = first_tensor_difference(folder(tmp_path / "1", **one), folder(tmp_path / "2", **{**one, **change}))
    assert (difference.tensor, difference.what) == (next(iter(change)), what)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = next(folder(tmp_path / "1", **weights(torch.float32)).glob("*1.safetensors"))
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(BadInput, match=r"expected a .*safetensors file"):
            stored_tensors(file)
