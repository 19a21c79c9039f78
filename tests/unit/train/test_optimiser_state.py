"""The optimiser's state is read in other stretches than it was written in."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparring.errors import StoreError
from sparring.train.optimiser_state import StoredOptimiser

WHOLE = torch.arange(40, dtype=torch.float32)
SIZES = {"a": 40, "b": 6}


def written(folder: Path, *cuts: int) -> dict[Path, dict[str, tuple[int, int]]]:
    """Files with the stretches of `a` between cuts, and `b` in the last; shapes are whole only where stretches are."""
    files = {}
    for number, (begin, end) in enumerate(zip((0, *cuts), (*cuts, 40), strict=True)):
        stretches, tensors = {"a": (begin, end)}, {"m/a": WHOLE[begin:end].clone(), "step/a": torch.tensor(3.0)}
        if end == 40:
            stretches["b"], tensors["m/b"] = (0, 6), torch.ones(2, 3)
        save_file(tensors, folder / str(number))
        files[folder / str(number)] = stretches
    return files


@pytest.mark.parametrize("cuts", [(), (8,), (8, 24)])
@pytest.mark.parametrize("stretch", [(0, 40), (0, 8), (7, 9), (5, 31), (24, 40), (12, 12)])
def test_any_stretch_is_read_from_any_files(cuts: tuple[int, ...], stretch: tuple[int, int], tmp_path: Path) -> None:
    with StoredOptimiser(tmp_path, written(tmp_path, *cuts), SIZES) as stored:
        assert torch.equal(stored.stretch("m/a", stretch), WHOLE[slice(*stretch)])
        assert torch.equal(stored.stretch("m/b", (1, 5)), torch.ones(4))
        assert stored.steps("a") == 3 and "m/c" not in stored and sorted(stored.names) == ["m/a", "m/b", "step/a"]


def test_a_file_without_stretches_has_whole_parameters(tmp_path: Path) -> None:
    save_file({"m/a": WHOLE.view(8, 5)}, tmp_path / "whole")
    with StoredOptimiser(tmp_path, {tmp_path / "whole": None}, SIZES) as stored:
        assert torch.equal(stored.stretch("m/a", (3, 22)), WHOLE[3:22])


@pytest.mark.parametrize("stretches", [[(0, 8), (8, 39)], [(0, 8), (9, 40)], [(0, 8), (7, 40)], [(0, 9), (8, 40)]])
def test_stretches_that_are_not_those_of_the_whole_are_refused(
    stretches: list[tuple[int, int]], tmp_path: Path
) -> None:
    files = written(tmp_path, 8)
    for file, stretch in zip(files, stretches, strict=True):
        files[file]["a"] = stretch
    with pytest.raises(StoreError, match="state of the whole model"):
        StoredOptimiser(tmp_path, files, SIZES)
