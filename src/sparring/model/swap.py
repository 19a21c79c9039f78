"""Exact numerics for a library module: which of its parts are replaced by the row-invariant ones in `layers`."""

from __future__ import annotations

import torch
from torch import nn

from sparring.errors import refusal
from sparring.model.layers import RotaryTable, RowLinear, RowNorm, RowSilu


def swap(module: nn.Module, max_positions: int) -> list[str]:
    """Replace linear layers, RMS norms, SiLU and rotary embeddings in place; parameters keep their names.

    A norm or a rotary embedding is recognised by what it computes, not by its class: it is replaced only when ours
    gives the same values on random input. What is left is the caller's to prove or to refuse.

    Args:
        module: a Hugging Face causal LM.
        max_positions: rows of the rotary table.

    Returns:
        Names of the parts with arithmetic that were not replaced.

    Raises:
        BadInput: the rotary frequencies depend on the length of the sequence, so no table can hold them.
    """
    left = []
    for parent_name, parent in list(module.named_modules()):
        for name, child in list(parent.named_children()):
            path = f"{parent_name}.{name}".lstrip(".")
            replacement = _replacement(path, child, max_positions)
            if replacement is not None:
                setattr(parent, name, replacement)
            elif not list(child.children()) and not isinstance(child, (nn.Embedding, nn.Identity, nn.Dropout)):
                left.append(f"{path} ({type(child).__name__})")
    return left


def _replacement(path: str, child: nn.Module, max_positions: int) -> nn.Module | None:
    if type(child) is nn.Linear:
        return RowLinear(child)
    kind = type(child).__name__
    if "RotaryEmbedding" in kind:
        return _rotary(path, child, max_positions)
    if "Norm" in kind:
        return _norm(child)
    if kind in ("SiLU", "SiLUActivation"):
        return RowSilu()
    return None


def _norm(norm: nn.Module) -> RowNorm | None:
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if weight is None or eps is None or getattr(norm, "bias", None) is not None:
        return None
    ours = RowNorm(weight, eps)
    x = torch.randn(3, weight.shape[0], generator=torch.Generator().manual_seed(0)).to(weight)
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    with torch.no_grad():
        same = torch.allclose(norm(x).float(), ours(x).float(), rtol=tolerance, atol=tolerance)
    return ours if same else None


def _rotary(path: str, rotary: nn.Module, max_positions: int) -> RotaryTable | None:
    kind = getattr(rotary, "rope_type", "default")
    if not isinstance(kind, str):
        return None
    if kind == "longrope" or "dynamic" in kind:
        raise refusal(
            path,
            "rotary frequencies that depend on the position alone",
            f"rope_type {kind!r}",
            'set numerics = "fast" for this model',
        )
    parameter = rotary.inv_freq
    return RotaryTable(rotary, max_positions, _dtype_of(rotary), parameter.device)


def _dtype_of(rotary: nn.Module) -> torch.dtype:
    return getattr(rotary.config, "dtype", None) or torch.float32
