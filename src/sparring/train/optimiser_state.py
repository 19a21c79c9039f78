"""`StoredOptimiser`: the optimiser's state in a checkpoint. Each rank reads its own stretches, whatever number of ranks
wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from sparring.errors import StoreError
from sparring.train.blocks import Stretch

STEP = "step"
"""Kind of the tensors with a parameter's number of steps, which are scalars and never cut."""


class _Piece(NamedTuple):
    """Elements [begin, end) of a parameter's tensor in an open file."""

    begin: int
    end: int
    file: Any


class StoredOptimiser:
    """State of an optimiser, by `<kind>/<parameter>`, in the files that ranks have written. The files stay open until
    the context ends.

    Args:
        files: range of elements of each parameter in a file, by the file's path; None for a file with whole parameters.
        sizes: number of elements of each trained parameter.

    Raises:
        StoreError: the files do not have the whole parameters.
    """

    def __init__(
        self, path: Path, files: Mapping[Path, Mapping[str, Sequence[int]] | None], sizes: Mapping[str, int]
    ) -> None:
        self._pieces: dict[str, list[_Piece]] = {}
        with ExitStack() as opened:
            for file, stretches in files.items():
                tensors = opened.enter_context(safe_open(file, framework="pt"))
                for key in tensors.keys():
                    name = key.partition("/")[2]
                    begin, end = (0, sizes.get(name, 0)) if stretches is None else stretches[name]
                    self._pieces.setdefault(key, []).append(_Piece(begin, end, tensors))
            for key, pieces in self._pieces.items():
                pieces.sort(key=lambda piece: piece[:2])
                if key.partition("/")[0] != STEP:
                    _check_whole(path, key, pieces, sizes)
            self._open = opened.pop_all()

    def __enter__(self) -> StoredOptimiser:
        return self

    def __exit__(self, *_: object) -> None:
        self._pieces.clear()
        self._open.close()

    def __contains__(self, key: str) -> bool:
        return key in self._pieces

    @property
    def names(self) -> list[str]:
        """Names of all tensors, `<kind>/<parameter>`."""
        return list(self._pieces)

    def steps(self, name: str) -> torch.Tensor:
        """Return the number of steps of a parameter, float32 []."""
        tensor: torch.Tensor = self._pieces[f"{STEP}/{name}"][0].file.get_tensor(f"{STEP}/{name}")
        return tensor.clone()

    def stretch(self, key: str, stretch: Stretch) -> torch.Tensor:
        """Return a copy of the n elements `stretch` of a tensor, float32 [n], reading only the files with them."""
        found, (begin, end) = torch.empty(stretch[1] - stretch[0]), stretch
        for piece in self._pieces[key]:
            first, last = max(begin, piece.begin), min(end, piece.end)
            if first < last:
                flat = piece.file.get_tensor(key).reshape(-1)  # mapped, not read
                found[first - begin : last - begin] = flat[first - piece.begin : last - piece.begin]
        return found


def _check_whole(path: Path, key: str, pieces: Sequence[_Piece], sizes: Mapping[str, int]) -> None:
    """Refuse pieces that, joined in their order, are not all elements of a parameter."""
    size, at = sizes.get(key.partition("/")[2], -1), 0
    for piece in pieces:
        length = 1
        for width in piece.file.get_slice(key).get_shape():
            length *= width
        whole = piece.begin == at and piece.end - piece.begin == length
        at = piece.end if whole else -1
        if not whole:
            break
    if at != size:
        raise StoreError(f"checkpoint {path}: expected the state of the whole model, got another number of {key}")
