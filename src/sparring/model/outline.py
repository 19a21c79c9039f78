"""A model without values, on torch's meta device, and the memory that the real one takes.

Parameters, packed weights and tables are counted on the model, which is made of the same parts as a real one. What a
micro-batch or a generation step allocates is a formula: a number of bytes for each output of the linear layers, by
family.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparring.errors import BadInput, boundary, refusal
from sparring.kernels.pages import token_bytes
from sparring.model.attention import IMPLEMENTATION
from sparring.model.causal import CausalModel
from sparring.model.config import InitConfig, LoraConfig
from sparring.model.create import config_of
from sparring.model.experts import RowExperts
from sparring.model.head import CHUNK_ELEMENTS
from sparring.model.hub import base_folder
from sparring.model.layers import Product, RowLinear
from sparring.model.library import class_of
from sparring.model.load import DTYPES, build_model, read_config
from sparring.model.lora import SCALE, A, Adapter, B
from sparring.model.targets import targeted, targets_of

FLOAT = 4
"""Bytes of a float32 number."""
ACTIVATIONS = {
    **dict.fromkeys(("llama", "mistral", "qwen2"), (1.2, 0.0)),
    "qwen3": (1.5, 0.0),
    "mixtral": (1.4, 0.0),
    "gpt_oss": (1.3, 10.5),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma4_text"), (1.9, 5.9)),
    **dict.fromkeys(("gpt2", "starcoder2", "phi"), (1.4, 8.0)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), (2.1, 5.2)),
    "nemotron_h": (1.6, 23.0),
}
OTHER_ACTIVATIONS = (2.2, 0.0)
"""What a layer keeps for its backward pass, by `model_type`, and for others: for each token and each output of the
layer's linear layers, a number of values in the model's dtype, and bytes besides (log/2026-11-29-memory.md)."""
LOGITS = 3 * CHUNK_ELEMENTS
"""Maximum number of float32 values of logits and what is computed of them at a time (`model.head`)."""
SCATTERED = 1.2
"""Memory of a trainer's threads as a multiple of the activations: threads keep freed pieces that are too small for the
next tensor. Measured by `benchmarks/memory.py`."""


class Outline:
    """Sizes of a model, in bytes where nothing else is said.

    Args:
        model: model on the meta device, with its adapter for all rows, if any.
    """

    def __init__(self, model: CausalModel, *, gradient_checkpointing: bool = False) -> None:
        self.model, self.gradient_checkpointing = model, gradient_checkpointing
        self.vocab_size, self.max_positions, self.kv_heads = model.vocab_size, model.max_positions, model.kv_heads

    @property
    def parameters(self) -> int:
        """Count the parameters, a tied weight once."""
        return sum(one.numel() for one in self.model.state().values())

    def token_bytes(self, dtype: str) -> int:
        """Return the size of one token's keys and values, over all layers that attend."""
        return token_bytes(self.kv_heads, DTYPES[dtype])

    @property
    def trained(self) -> list[torch.Tensor]:
        """Return the tensors that a trainer trains: the factors of the adapter, or all parameters of a model without
        one."""
        return self._factors() or [one for one in self.model.parameters().values() if isinstance(one, nn.Parameter)]

    @property
    def weights(self) -> int:
        """Return the size of the weights in files, and of an adapter."""
        return sum(one.nbytes for one in [*self.model.state().values(), *self._factors()])

    @property
    def packed(self) -> int:
        """Return the size of the packed weights and factors, which the products read."""
        return sum(one.nbytes for one in [*self._storages(), *self._packed_factors()])

    @property
    def tables(self) -> int:
        """Return the bytes of tables, such as rotary cosines."""
        parameters = self.model.parameters().values()
        return sum(one.nbytes for one in self.model.module.buffers() if not any(one is other for other in parameters))

    def staged(self) -> int:
        """Return the size of what an update brings: the new weights, or an adapter's factors, and their packed form."""
        if not (factors := self._factors()):
            return self.weights + self.packed
        return sum(one.nbytes for one in [*factors, *self._packed_factors()])

    def kept(self, tokens: int) -> int:
        """Return the size of the activations that the layers keep for the backward pass of `tokens` tokens."""
        layers, layer = self._text.num_hidden_layers, self._layer
        if self.gradient_checkpointing:  # what each layer takes and adds to; one of them is computed again
            return int((layer + 2 * layers * self._text.hidden_size * self.model.dtype.itemsize) * tokens)
        return int(layers * layer * tokens)

    def micro_batch(self, tokens: int, *, keeps_gradients: bool = False) -> int:
        """Return the peak memory of a micro-batch of `tokens` tokens, all of them trained: activations, the backward
        pass of one layer, logits, and the gradients that exist at once. A trainer takes each gradient as soon as
        autograd has computed it, or with `keeps_gradients` all after the backward pass; those of the head and the
        embedding wait for each other."""
        tables = [one.nbytes for one in self.trained if one.shape[:1] == (self.vocab_size,)]
        logits = self._logits(min(tokens, LOGITS // self.vocab_size))
        if keeps_gradients:
            gradients = sum(one.nbytes for one in self.trained) + logits
        elif len(tables) == 1:  # a tied weight has the head's gradient, the embedding's, and their sum
            gradients = max(3 * tables[0], 2 * tables[0] + logits)
        else:
            gradients = max(sum(tables), max(tables, default=0) + logits)
        return int(SCATTERED * (self.kept(tokens) + self._layer * tokens)) + gradients

    def step(self, tokens: int, sampled: int) -> int:
        """Return the peak memory of a generation step over `tokens` tokens, of which `sampled` are followed by a new
        one: one layer's tensors, and the logits."""
        return int(self._layer * tokens) + self._logits(sampled)

    def _logits(self, rows: int) -> int:
        return 0 if self.model.is_scalar else rows * self.vocab_size * FLOAT

    @property
    def _text(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def _layer(self) -> float:
        """Return what a layer keeps of one token, which goes through some of the experts."""
        outputs, text = 0, self._text
        for part in self.model.parts:
            if isinstance(part, RowExperts):
                chosen = getattr(text, "num_experts_per_tok", 0) or getattr(text, "top_k_experts", 1)
                outputs += chosen * sum(stack.shape[1] for stack in (part.gate_up_proj, part.down_proj))
            elif isinstance(part, RowLinear) and part is not self.model.head:
                outputs += part.out_features
        numbers, more = ACTIVATIONS.get(text.model_type, OTHER_ACTIVATIONS)
        return float(outputs / text.num_hidden_layers * (numbers * self.model.dtype.itemsize + more))

    def _factors(self) -> list[torch.Tensor]:
        everywhere = self.model.adapters.everywhere
        return [] if everywhere is None else list(everywhere.parameters().values())

    def _storages(self) -> Iterator[torch.Tensor]:
        parts, decoder = self.model.parts, self.model.decoder
        joined = {part for product in (() if decoder is None else decoder.joined) for part in product.parts}
        for part in parts:
            if isinstance(part, RowExperts):
                yield from (stack.storage for stack in part.stacks)
            elif isinstance(part, Product):
                yield part.packed.storage
            elif isinstance(part, RowLinear) and part not in joined:
                yield part.product.packed.storage

    def _packed_factors(self) -> Iterator[torch.Tensor]:
        everywhere = self.model.adapters.everywhere
        for delta in () if everywhere is None else everywhere.terms.values():
            yield from (one.storage for one in (delta.a, delta.b) if one is not None)


@lru_cache(maxsize=32)
def outline(
    source: Path | InitConfig,
    *,
    dtype: str = "float32",
    numerics: str = "exact",
    scalar: bool = False,
    lora: LoraConfig | None = None,
    gradient_checkpointing: bool = False,
) -> Outline:
    """Make the outline of the model that `load` would make, with the same settings.

    Args:
        source: folder of a checkpoint; folder of an adapter, which stands for its base; or the sizes of a fresh model.

    Raises:
        BadInput: the config is missing, the library cannot make a model of it, or the model cannot have such an
            adapter.
    """
    if isinstance(source, InitConfig):
        where, config = "models.policy.init", config_of(source, source.vocab_size)
    else:
        where = str(base_folder(source))
        config = read_config(where, numerics, "own" if scalar else "tokens")
    config = copy.deepcopy(config)
    if getattr(config.get_text_config(), "pad_token_id", None) is not None:
        config.get_text_config().pad_token_id = 0  # whether ids fit the embedding is told elsewhere
    kind = class_of(config)
    if scalar:
        kind, config.num_labels = transformers.AutoModelForSequenceClassification, 1
    with torch.device("meta"), boundary(BadInput, where, "a config that the library makes a model of", "repair it"):
        module = kind.from_config(config, dtype=DTYPES[dtype], attn_implementation=IMPLEMENTATION)
    with ZeroValues():
        model = build_model(module, where, numerics=numerics, gradient_checkpointing=gradient_checkpointing)
    if lora is not None:
        targets, state = targets_of(module), {SCALE: torch.tensor(lora.scale, dtype=torch.float64)}
        for name in targeted(module, lora.target_modules, lora.target_parameters):
            *experts, outputs, inputs = targets[name].shape
            state[f"{name}.{A}"] = torch.empty(*experts, lora.rank, inputs, device="meta")
            state[f"{name}.{B}"] = torch.empty(*experts, outputs, lora.rank, device="meta")
        model.adapters.everywhere = model.adapters.fit(Adapter(state, model.dtype, model.device))
    return Outline(model, gradient_checkpointing=gradient_checkpointing)


def checkpoint_outline(folder: Path, head: str = "tokens") -> Outline:
    """Return the outline of the checkpoint in `folder`, or of an adapter's base, with the defaults of `outline`; `head`
    as in `load`.

    Raises:
        BadInput: the folder has no weights; or as `read_config` and `outline`.
    """
    folder = base_folder(folder)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise refusal(
            str(folder), "weights (*.safetensors)", "none in the folder", "copy or download the whole checkpoint"
        )
    read_config(str(folder), "fast", head)
    return outline(folder, numerics="fast", scalar=head == "scalar")


class ZeroValues(TorchDispatchMode):
    """Mode in which every value that a model reads is 0. It also replaces operations that torch refuses on the meta
    device although it computes them with values: grouped products of float32."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace an operation of torch that reads values; torch calls this for every operation."""
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0
        if function is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            a, b = args[:2]
            groups = (
                [] if a.dim() != b.dim() else [(kwargs or {}).get("offs", args[2] if len(args) > 2 else a).shape[0]]
            )
            return a.new_empty([*groups, a.shape[0], b.shape[-1]])
        return function(*args, **(kwargs or {}))
