"""Weights that adapters may add to: linear layers of a model by name, and the stacked matrices of its experts.

Shapes: K inputs, M outputs, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sparring.errors import refusal
from sparring.model.config import STACKED
from sparring.model.layers import RowConv1D, RowLinear
from sparring.model.library import text_model

LYING = (Conv1D, RowConv1D)
"""Linear layers whose weight is [K, M] (GPT-2)."""

DEFAULT = ("q_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn")
"""Name endings of the layers that compute queries and values, alone or with keys."""


class AdaptableWeight(NamedTuple):
    """Weight that an adapter may add to.

    Attributes:
        shape: (M, K) or (E, M, K).
        transposed: whether the parameter stores the last two dimensions in the other order.
    """

    weight: str
    shape: tuple[int, ...]
    transposed: bool = False


def linears_of(module: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the linear layers of a Hugging Face model that may have adapters, by name; the head, routers and experts
    are excluded."""
    text = {*text_model(module).modules()} - {module.get_output_embeddings(), getattr(module, "score", None)}
    return {
        name: part
        for name, part in module.named_modules()
        if part in text and type(part) in (nn.Linear, RowLinear, *LYING)
    }


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """Return (M, K) of a linear layer."""
    first, second = layer.get_parameter("weight").shape
    return (second, first) if type(layer) in LYING else (first, second)


def targets_of(module: PreTrainedModel) -> dict[str, AdaptableWeight]:
    """Return the weights that adapters may add to: linear layers by name, and stacked matrices of experts by the name
    of their parameter."""
    linears = linears_of(module)
    targets = {
        name: AdaptableWeight(f"{name}.weight", shape_of(layer), type(layer) in LYING)
        for name, layer in linears.items()
    }
    for path, part in module.named_modules():
        for name in STACKED if type(part).__name__.endswith("Experts") else ():
            weight, transposed = getattr(part, name, None), bool(getattr(part, "is_transposed", False))
            if isinstance(weight, nn.Parameter) and weight.dim() == 3:
                experts, outputs, inputs = weight.mT.shape if transposed else weight.shape
                targets[f"{path}.{name}"] = AdaptableWeight(f"{path}.{name}", (experts, outputs, inputs), transposed)
    return targets


def targeted(
    module: PreTrainedModel, target_modules: str | Sequence[str], target_parameters: Sequence[str] = ()
) -> list[str]:
    """Return the names of the linear layers and stacked expert matrices that a `LoraConfig` selects, by the rules of
    PEFT. Raises BadInput if an entry selects nothing."""
    names = list(linears_of(module))
    if target_modules == "default":
        ends = {name.rpartition(".")[2] for name in names}
        target_modules = [end for end in DEFAULT if end in ends]
    stacks = [name for name, target in targets_of(module).items() if len(target.shape) == 3]
    selected = [*names] if target_modules == "all-linear" else []
    for available, targets in ((names, () if selected else target_modules), (stacks, target_parameters)):
        for target in targets:
            matches = [name for name in available if name == target or name.endswith(f".{target}")]
            if not matches:
                raise unknown_target(target, available, "target_modules" if available is names else "target_parameters")
            selected += [name for name in matches if name not in selected]
    return selected


def unknown_target(
    name: str, available: Sequence[str] | Mapping[str, object], setting: str = "target_modules"
) -> Exception:
    """Return the error for an adapter of a weight that the model lacks."""
    ends = ", ".join(sorted({one.rpartition(".")[2] for one in available})) or "none"
    what = "linear layers" if setting == "target_modules" else "stacked matrices of experts"
    return refusal(f"lora {setting}", f"{what} of the model: {ends}", repr(name), "name some of these")
