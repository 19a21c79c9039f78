"""A compiled library: its functions by name, the layouts of packed weights, and structures that several functions
read."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch

from sparring.kernels.path import PackedMatrix

NAME, PAIRS_NAME, TILES_NAME = "exact-kernels", "exact-pairs", "exact-tiles"
COMPILED = (TILES_NAME, PAIRS_NAME, NAME)
"""Compiled paths, best first."""
LAYOUTS = {
    (NAME, torch.float32): 0,
    (NAME, torch.bfloat16): 3,
    (PAIRS_NAME, torch.float32): 0,
    (PAIRS_NAME, torch.bfloat16): 4,
    (TILES_NAME, torch.float32): 2,
    (TILES_NAME, torch.bfloat16): 1,
}
"""Number of the packed format in `linear.h`, by path and dtype of the weight."""

_P, _I, _F, _T = c_void_p, c_int64, c_float, c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "pack_f32": (_P, _P, _I, _I, _T),
    "pack_panels_bf16": (_P, _P, _I, _I, _T),
    "linear_f32": (_P, _P, _P, _P, _I, _I, _I, _T),
    "linear_panels_bf16": (_P, _P, _P, _P, _I, _I, _I, _T),
    "has_pairs": (),
    "pack_pairs": (_P, _P, _I, _I, _T),
    "linear_pairs": (_P, _P, _P, _P, _T, _I, _I, _I, _T),
    "has_tiles": (),
    "pack_bf16": (_P, _P, _I, _I, _T),
    "linear_bf16": (_P, _P, _P, _P, _T, _I, _I, _I, _T),
    "pack_split": (_P, _P, _I, _I, _T),
    "pack_split_transposed": (_P, _P, _I, _I, _T),
    "pack_bf16_transposed": (_P, _P, _I, _I, _T),
    "transpose_bf16": (_P, _P, _I, _I, _T),
    "linear_split": (_P, _P, _P, _P, _I, _I, _I, _T),
    "weight_gradient_split": (_P, _P, _P, _I, _I, _I, _T),
    "route": (_P, _P, _P, _I, _I, _I, _T, _T),
    "tanh": (_P, _P, _I, _T),
    "token_logprobs": (*[_P] * 9, _I, _I, _T),
    "token_logprobs_backward": (*[_P] * 11, _I, _I, _T),
    "sample": (*[_P] * 11, _I, _I, _T),
}
_TYPED_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "input_gradient": (_P, _I, _P, _P, *[_I] * 3, _T, _T),
    "weight_gradient": (_P, _I, _P, _P, *[_I] * 3, _T, _T),
    "sum_rows": (_P, _I, _P, _I, _I, _T),
    "rms_norm": (_P, _P, _P, _I, _I, _F, _T),
    "rms_norm_backward": (*[_P] * 5, _I, _I, _F, _T),
    "silu_mul": (_P, _P, _P, _I, _T),
    "silu_mul_backward": (*[_P] * 5, _I, _T),
    "rope": (*[_P] * 4, _I, _I, _I, _T, _T),
    "add_rms_norm": (*[_P] * 5, _I, _I, _F, _T),
    "add_rms_norm_backward": (*[_P] * 6, _I, _I, _F, _T),
    "split_heads": (*[_P] * 8, *[_I] * 5, _F, _T),
    "split_heads_backward": (*[_P] * 10, *[_I] * 5, _F, _T),
    "swiglu": (_P, _P, _I, _I, _I, _T),
    "swiglu_backward": (_P, _P, _P, _I, _I, _I, _T),
    "attention_packed": (*[_P] * 7, *[_I] * 4, _F, _F, _I, _P, _T),
    "attention_backward": (*[_P] * 11, *[_I] * 4, _F, _F, _I, _T),
    "attention_paged": (*[_P] * 6, _I, _I, *[_P] * 3, *[_I] * 5, _F, _F, _I, _P, _T),
    "decoder_step": (_P, _P),
    "linear_groups": (*[_P] * 4, _I, _T),
    "mixture": (*[_P] * 5, _I, _I, _T),
}
_RETURNING = ("has_tiles", "has_pairs", "token_logprobs", "attention_paged", "decoder_step")
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Library:
    """Functions of one compiled library by name; functions with one version per dtype as `typed[name][dtype]`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.functions: dict[str, Any] = {}
        self.typed: dict[str, dict[torch.dtype, Any]] = {}
        for name, signature in _SIGNATURES.items():
            self.functions[name] = self._bind(library, name, name, signature)
        for name, signature in _TYPED_SIGNATURES.items():
            self.typed[name] = {t: self._bind(library, f"{name}_{s}", name, signature) for t, s in _SUFFIX.items()}

    @staticmethod
    def _bind(library: ctypes.CDLL, symbol: str, name: str, signature: tuple[Any, ...]) -> Any:
        function = getattr(library, f"sparring_{symbol}")
        function.argtypes = signature
        function.restype = c_int64 if name in _RETURNING else None
        return function


class Weight(Structure):
    """Packed weight [M, K] with its float32 bias or null; or the first of several in one block of memory."""

    _fields_ = [("panels", c_void_p), ("layout", c_int64), ("M", c_int64), ("K", c_int64), ("bias", c_void_p)]

    @staticmethod
    def on(path_name: str, packed: PackedMatrix, bias: torch.Tensor | None) -> Weight:
        """Make the structure of `packed`, as the path `path_name` packs it, with `bias` [M] or [E, M] float32. Both
        must outlive the structure."""
        pointer, layout = None if bias is None else bias.data_ptr(), LAYOUTS[path_name, packed.dtype]
        return Weight(packed.storage.data_ptr(), layout, packed.num_outputs, packed.num_inputs, pointer)


class Experts(Structure):
    """Gated MLPs of E experts, packed contiguously."""

    _fields_ = [("gate_up", Weight), ("down", Weight), ("E", c_int64)]
