"""A model without values, on torch's meta device, and the memory that the real one takes.

Parameters, packed weights and tables are counted on the model, which is made of the same parts as a real one. What a
micro-batch or a generation step allocates is a formula: a number of bytes for each output of the linear layers, by
family.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparring.errors import BadInput, boundary
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
"""What a layer keeps for its backward pass, by `model_type` (`ACTIVATIONS`) or for any other: for each token and output
of its linear layers, a number of values in the model's dtype, and of further bytes (log/2026-11-29-memory.md)."""
BATCHED = "batched_mm"
"""Implementation of experts in transformers that runs on torch's meta device in every dtype."""
LOGITS = 3 * CHUNK_ELEMENTS
"""Maximum number of float32 values of logits and what is computed of them at a time (`model.head`)."""
SCATTERED = 1.2
"""Memory of a trainer's threads as a multiple of the activations: threads keep freed pieces that are too small for the
next tensor. Measured by `benchmarks/memory.py`."""


class Outline:
    """Sizes of a model, in bytes unless stated otherwise.

    Attributes:
        trained: tensors that a trainer trains: the factors of the adapter, or all parameters of a model without one.
        num_trained: number of parameters in `trained`.
        published: size of `trained`, which a trainer publishes.
        parameters: number of parameters, a tied weight once.
        weights: weights in files, and an adapter's factors.
        packed: packed copies, which the products read, of weights and factors.
        tables: tables, such as rotary cosines.
        staged: what an update brings: new weights, or an adapter's factors, and their packed copies.

    Args:
        model: model on the meta device, with its adapter for all rows, if any.
    """

    def __init__(self, model: CausalModel, *, gradient_checkpointing: bool = False) -> None:
        self.model, self.gradient_checkpointing = model, gradient_checkpointing
        self.vocab_size, self.max_positions, self.kv_heads = model.vocab_size, model.max_positions, model.kv_heads
        own, adapter = model.parameters().values(), model.adapters.everywhere
        factors = [] if adapter is None else list(adapter.parameters().values())
        terms = [] if adapter is None else list(adapter.terms.values())
        self.trained = factors or [one for one in own if isinstance(one, nn.Parameter)]
        self.num_trained, self.published = sum(one.numel() for one in self.trained), _bytes(self.trained)
        self.parameters = sum(one.numel() for one in own)
        self.weights = _bytes([*own, *factors])
        of_products = _bytes(part.packed.storage for part, _ in model.packed_parts() if isinstance(part, Product))
        stacks = [stack for part in model.parts if isinstance(part, RowExperts) for stack in part.stacks]
        of_factors = _bytes(one.storage for term in terms for one in (term.a, term.b) if one is not None)
        self.packed = of_products + _bytes(stack.storage for stack in stacks) + of_factors
        self.tables = _bytes(one for one in model.module.buffers() if not any(one is other for other in own))
        self.staged = _bytes(factors) + of_factors if factors else self.weights + self.packed

    def token_bytes(self, dtype: str) -> int:
        """Return the size of one token's keys and values, over all layers that attend."""
        return token_bytes(self.kv_heads, DTYPES[dtype])

    def kept(self, tokens: int) -> int:
        """Return the size of the activations that the layers keep for the backward pass of `tokens` tokens."""
        layers = self._text.num_hidden_layers
        if self.gradient_checkpointing:  # what each layer takes and adds to; one of them is computed again
            return int((self._layer + 2 * layers * self._text.hidden_size * self.model.dtype.itemsize) * tokens)
        return int(layers * self._layer * tokens)

    def micro_batch(self, tokens: int, *, keeps_gradients: bool = False) -> int:
        """Return the peak memory of a micro-batch of `tokens` tokens, all of them trained: activations, the backward
        pass of one layer, logits, and the gradients that exist at once. A trainer takes each gradient as soon as
        autograd has computed it, or with `keeps_gradients` all after the backward pass; the gradients of head and
        embedding wait for each other, and a tied weight also has their sum."""
        tables = [one.nbytes for one in self.trained if one.shape[:1] == (self.vocab_size,)]
        table, logits = max(tables, default=0), self._logits(min(tokens, LOGITS // self.vocab_size))
        first = self.published if keeps_gradients else table * (2 if len(tables) == 1 else 1)
        second = logits if keeps_gradients else max(table, logits)
        return int(SCATTERED * (self.kept(tokens) + self._layer * tokens)) + first + second

    def step(self, tokens: int, sampled: int) -> int:
        """Return the peak memory of a generation step over `tokens` tokens that samples `sampled` new tokens: one
        layer's tensors, and the logits."""
        return int(self._layer * tokens) + self._logits(sampled)

    def _logits(self, rows: int) -> int:
        return 0 if self.model.is_scalar else rows * self.vocab_size * FLOAT

    @property
    def _text(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def _layer(self) -> float:
        """Return the bytes that a layer keeps of one token, which goes through some of the experts."""
        outputs, text = 0, self._text
        for part in self.model.parts:
            if isinstance(part, RowExperts):
                chosen = getattr(text, "num_experts_per_tok", 0) or getattr(text, "top_k_experts", 1)
                outputs += chosen * sum(stack.shape[1] for stack in (part.gate_up_proj, part.down_proj))
            elif isinstance(part, RowLinear) and part is not self.model.head:
                outputs += part.out_features
        numbers, more = ACTIVATIONS.get(text.model_type, OTHER_ACTIVATIONS)
        return float(outputs / text.num_hidden_layers * (numbers * self.model.dtype.itemsize + more))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(one.nbytes for one in tensors)


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
        options = {"attn_implementation": IMPLEMENTATION, "experts_implementation": BATCHED}
        module = kind.from_config(config, dtype=DTYPES[dtype], **options)
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


class ZeroValues(TorchDispatchMode):
    """Dispatch mode of torch in which every value that a model reads is 0."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation of torch; torch calls this method for each operation."""
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0
        return function(*args, **(kwargs or {}))
