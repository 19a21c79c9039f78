"""Replacement of submodules of a transformers module by the row-invariant ones in `layers` and `experts`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sparring.errors import refusal
from sparring.model.experts import RowExperts, RowRouter, gates_of
from sparring.model.layers import (
    RotaryPhases,
    RotaryTable,
    RotaryTables,
    RowConv1D,
    RowGelu,
    RowLinear,
    RowNorm,
    RowSilu,
    WideNorm,
)
from sparring.model.library import text_model


def swap(module: PreTrainedModel, max_positions: int, *, exact: bool) -> bool:
    """Replace linear layers, norms, activations, rotary embeddings, routers and experts in place; parameters keep their
    names. Return whether every submodule with arithmetic was replaced.

    A submodule is recognised by its function, not only by its class: it is replaced only by one of ours that gives the
    same values on random input. All others run transformers' code, within `RowWise`. On torch's meta device, which has
    no values, the first candidate is taken.

    Raises:
        BadInput: the numerics are `exact`, and the rotary frequencies depend on the length of the sequence, so that no
            table of `max_positions` rows can hold them. With fast numerics such a submodule stays.
    """
    every = True
    computing = {module, *text_model(module).modules()}
    for parent_name, parent in list(module.named_modules()):
        for name, child in list(parent.named_children()) if parent in computing else ():
            replacement = _replacement(f"{parent_name}.{name}".lstrip("."), child, max_positions, exact)
            if replacement is not None:
                setattr(parent, name, replacement)
            elif _computes(child):
                every = False
    return every


def _computes(child: nn.Module) -> bool:
    leaf = not list(child.children()) and not isinstance(child, (nn.Embedding, nn.Identity, nn.Dropout))
    return leaf or type(child).__name__.endswith("Experts")


def _replacement(path: str, child: nn.Module, max_positions: int, exact: bool) -> nn.Module | None:
    if type(child) is nn.Linear:
        return RowLinear(child)
    if type(child) is Conv1D:
        return RowConv1D(child)
    kind = type(child).__name__
    if "RotaryEmbedding" in kind:
        return _rotary(path, child, max_positions, exact)
    if "Norm" in kind:
        return _norm(child)
    if "SiLU" in kind or "GELU" in kind:
        return _alike(child, [RowSilu(), RowGelu()], torch.linspace(-8.0, 8.0, 400))
    if kind.endswith("Router") and hasattr(child, "top_k") and hasattr(child, "weight") and _takes_one(child):
        return _router(child)
    if kind.endswith("Experts") and getattr(child, "has_gate", False) and not child.has_post_expert_norm:
        return _experts(child)
    return None


def _takes_one(part: nn.Module) -> bool:
    return len(inspect.signature(part.forward).parameters) == 1


def _norm(norm: nn.Module) -> nn.Module | None:
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is None or eps is None or getattr(norm, "bias", None) is not None or not _takes_one(norm):
        return None
    candidates = [RowNorm(weight, eps), WideNorm(weight, eps, 0.0), WideNorm(weight, eps, 1.0)]
    return _alike(norm, candidates, _random(64, weight.shape[0], like=weight))


def _router(router: nn.Module) -> RowRouter | None:
    if router.weight.is_meta:
        knows_more = {name for name, _ in [*router.named_parameters(), *router.named_buffers()]} - {"weight", "bias"}
        return None if knows_more else RowRouter(router, renormalise=True)
    # in float32: transformers' router rounds logits to bfloat16, which may reorder nearly equal ones
    reference = copy.deepcopy(router).float()
    weight = reference.get_parameter("weight")

    def shares(route: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        _, weights, chosen = route(x)
        return torch.zeros(len(x), weight.shape[0], device=x.device).scatter_(1, chosen, weights.float())

    kinds, x = (True, False), _random(64, weight.shape[1], like=weight)
    outputs = [shares(RowRouter(reference, renormalise=kind), x) for kind in kinds]
    at = _closest(shares(reference, x), outputs, weight.dtype)
    return None if at is None else RowRouter(router, renormalise=kinds[at])


def _experts(experts: nn.Module) -> RowExperts | None:
    gates, down = gates_of(experts), experts.get_parameter("down_proj")
    if down.is_meta:
        return RowExperts(experts, gates[0])
    x = 4.0 * _random(64, 2 * down.shape[1 if experts.is_transposed else 2], like=down)
    own = experts._apply_gate
    assert callable(own)
    at = _closest(own(x), [gate(x) for gate in gates], x.dtype)
    return None if at is None else RowExperts(experts, gates[at])


def _alike(reference: nn.Module, candidates: Sequence[nn.Module], x: torch.Tensor) -> nn.Module | None:
    if x.is_meta:
        return candidates[0]
    at = _closest(reference(x), [one(x) for one in candidates], x.dtype)
    return None if at is None else candidates[at]


def _closest(expected: torch.Tensor, outputs: Sequence[torch.Tensor], dtype: torch.dtype) -> int | None:
    """Return the index of the candidate closest to the expected output, the first on a tie; None if none is close."""
    scale = float(expected.detach().float().abs().mean())
    errors = [float((one.detach().float() - expected.detach().float()).abs().mean()) for one in outputs]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    best = min(range(len(errors)), key=errors.__getitem__)
    return best if errors[best] <= tolerance * scale else None


def _random(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(like)


def _rotary(path: str, rotary: nn.Module, max_positions: int, exact: bool) -> nn.Module | None:
    kind = getattr(rotary, "rope_type", "default")
    kinds = kind if isinstance(kind, dict) else {"": kind}
    for rope_type in kinds.values():
        if rope_type == "longrope" or "dynamic" in str(rope_type):
            if not exact:
                return None
            raise refusal(
                path,
                "rotary frequencies that depend on the position alone",
                f"rope_type {rope_type!r}",
                'set numerics = "fast" for this model',
            )
    where = (max_positions, getattr(rotary.config, "dtype", None) or torch.float32, next(rotary.buffers()).device)
    if not isinstance(kind, dict):
        phases = rotary(torch.empty(0, device=where[2]), torch.zeros(1, 1, dtype=torch.int64, device=where[2]))
        if not isinstance(phases, tuple):
            return RotaryPhases(rotary, *where)
        table = RotaryTable(rotary, *where)
        table.config = rotary.config  # Granite looks there
        return table
    return RotaryTables({name: RotaryTable(partial(rotary, layer_type=name), *where) for name in kinds})
