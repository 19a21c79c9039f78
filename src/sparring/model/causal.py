"""`CausalModel`: the causal LM of trainer and engine. Flat tokens in, hidden states and logits out.

Shapes: N tokens, M selected rows, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from sparring.errors import WeightsError, refusal
from sparring.kernels import ops
from sparring.kernels.pages import KvHeads
from sparring.kernels.threads import take
from sparring.model.attention import CURRENT_ATTENTION, Attention, KeyRecording
from sparring.model.decoder import LlamaBody, LlamaDecoder
from sparring.model.experts import RowExperts
from sparring.model.layers import Product, RowLinear
from sparring.model.library import NonTextParts, text_model
from sparring.model.lora import Adapters
from sparring.model.recurrent import LAYOUT, MixerLayout
from sparring.model.rowwise import RowWise
from sparring.model.states import RecurrentLayers

ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds of layers that our attention computes; chunked attention is not among them."""
CONTEXT_PER_WIDTH = 6
"""Context, in multiples of D, at which attention costs as much as the rest of a layer: a typical layer has 12 D^2
weights, hence 24 D^2 operations per token, and 4 D for each position that the token attends to."""

Forward = Callable[[torch.Tensor, torch.Tensor, Attention, torch.Tensor | None], torch.Tensor]


class CausalModel:
    """Causal LM for trainer and engine. Made by `load`; not safe for concurrent use by two threads.

    Attributes:
        path_name: numerics in use: as `ops.path_name`, or "fast".
        decoder: forward of the Llama family; None for other models.
        library: forward of all other models; None for the Llama family.
        head: module that computes logits or, if `is_scalar`, one number per row.
        context: context length at which attention costs about as much as the rest of the forward.
        kv_heads: shapes of the keys and values that each attention layer stores.
        recurrent: layers with a recurrent state; empty in most models.
        adapters: adapters of the model; `state` and `parameters` exclude them.
    """

    def __init__(self, module: PreTrainedModel, forward: Forward, *, path_name: str, max_positions: int) -> None:
        self.module = module
        self.config = module.config
        self.path_name = path_name
        self.max_positions = max_positions
        text = self.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.context = CONTEXT_PER_WIDTH * text.hidden_size
        self.logit_scale = 1.0
        self.logit_cap: float | None = getattr(text, "final_logit_softcapping", None)
        self._forward = forward
        self.decoder = forward if isinstance(forward, LlamaDecoder) else None
        self.kv_heads = {} if self.decoder is None else self.decoder.kv_heads
        # cached: every weight update walks them several times
        saved, non_text = module.state_dict().keys(), NonTextParts(module)
        buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
        every = {**dict(module.named_parameters()), **buffers}
        self._parameters = {name: parameter for name, parameter in every.items() if name not in non_text}
        self.library = library = forward if isinstance(forward, LibraryForward) else None
        self.recurrent = {} if library is None else library.recurrent
        self.adapters = Adapters(module, self.decoder) if library is None else library.adapters
        # modules that hold packed copies of parameters
        parts = (part for part in module.modules() if isinstance(part, (RowLinear, RowExperts)))
        self.parts: list[RowLinear | RowExperts | Product] = [*parts]
        self.parts += [] if self.decoder is None else self.decoder.joined
        self.is_scalar = module.get_output_embeddings() is None
        self.head: nn.Module = module.get_submodule("score") if self.is_scalar else module.get_output_embeddings()
        weight = module.get_input_embeddings().get_parameter("weight")
        self.dtype, self.device = weight.dtype, weight.device

    @property
    def window(self) -> int | None:
        """Return the maximum number of positions that a position attends to, itself included; None if a layer attends
        to all positions, or if transformers computes the model."""
        windows = [] if self.decoder is None else [layer.form.window for layer in self.decoder.layers]
        limited = [window for window in windows if window is not None]
        return max(limited) if windows and len(limited) == len(windows) else None

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute hidden states after the final norm.

        Args:
            tokens: [N] int64.
            positions: [N] int64, position of each token in its own sequence.
            rows: [M] int64, indices of the tokens whose states are returned, in this order, repeats allowed; None for
                all.

        Returns:
            [N, D], or [M, D] with `rows`; with a graph if gradients are on.
        """
        return self._forward(tokens, positions, attention, rows)

    def logits(self, hidden: torch.Tensor, total: ops.WeightSum | None = None) -> torch.Tensor:
        """Compute hidden[M, D] -> [M, V] float32; exact numerics never round them to bfloat16. The gradient of the
        head's weight is added to `total`, if given, a sum from `weight_sum`. Raises BadInput if the head is scalar."""
        if self.is_scalar:
            raise refusal("logits", "a head over tokens", "a scalar head", 'load the model with head = "tokens"')
        exact = isinstance(self.head, RowLinear)
        logits = self.head.forward(hidden, torch.float32, total) if exact else self.head(hidden).float()
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if exact:
            return logits if self.logit_cap is None else ops.soft_cap(logits, self.logit_cap)
        return logits if self.logit_cap is None else torch.tanh(logits / self.logit_cap) * self.logit_cap

    def weight_sum(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ops.WeightSum | None]:
        """Return hidden[M, D], to be split into chunks, and the sum to which all chunks add their gradient of the
        head's weight. There is no sum for a weight without a gradient, or for a head that transformers computes, whose
        chunks have separate gradients."""
        if not isinstance(self.head, RowLinear) or not self.head.weight.requires_grad:
            return hidden, None
        total = ops.WeightSum()
        return total.attach(hidden, self.head.weight), total

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the scalar head, hidden[M, D] -> [M] float32: a value, or the reward of the text that ends in the
        row. Raises BadInput if the head is over tokens."""
        if not self.is_scalar:
            raise refusal("values", "a scalar head", "a head over tokens", 'load the model with head = "scalar"')
        if isinstance(self.head, RowLinear):
            return self.head.forward(hidden, torch.float32)[:, 0]
        values: torch.Tensor = self.head(hidden).float()[:, 0]
        return values

    def state(self) -> dict[str, torch.Tensor]:
        """Return every parameter by its Hugging Face name, tied weights once, and the buffers that checkpoints store
        (such as the biases of a router). The tensors share the module's storage."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the tensors of `state` with their gradients: parameters and stored buffers."""
        return dict(self._parameters)

    def packed_parts(self) -> list[tuple[Product | RowExperts, nn.Parameter]]:
        """Return all parts with packed copies, each with a parameter that it packs."""
        joined = {part for product in (self.decoder.joined if self.decoder else ()) for part in product.parts}
        found = list[tuple[Product | RowExperts, nn.Parameter]]()
        for part in self.parts:
            if isinstance(part, Product):
                found.append((part, part.parts[0].weight))
            elif isinstance(part, RowExperts):
                found.append((part, part.gate_up_proj))
            elif part not in joined:
                found.append((part.product, part.weight))
        return found

    def check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raise WeightsError if a state has other names or shapes than the parameters."""
        own = self._parameters
        if own.keys() != state.keys():
            mismatched = sorted(own.keys() ^ state.keys())
            raise WeightsError(
                f"weights: expected the {len(own)} parameters of this model, got a difference in {mismatched[:4]}"
            )
        for name, parameter in own.items():
            if parameter.shape != state[name].shape:
                raise WeightsError(
                    f"weights: {name} should be {tuple(parameter.shape)}, got {tuple(state[name].shape)}"
                )

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy every parameter from `state`, cast to this model's dtype, then `refresh()`. If names or shapes differ,
        raise WeightsError and copy nothing."""
        self.check(state)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state[name])
        self.refresh()

    def refresh(self) -> None:
        """Recompute everything that is derived from parameters. Call it after any in-place change."""
        for part in self.parts:
            part.refresh()


class LibraryForward:
    """Forward of transformers around our attention, for models outside the Llama family and for fast numerics.
    `rowwise` is the torch mode that makes transformers' own code row-invariant; None for fast numerics."""

    def __init__(
        self, module: PreTrainedModel, recurrent: RecurrentLayers, *, exact: bool, gradient_checkpointing: bool
    ) -> None:
        self.body, self.recurrent, self.adapters = text_model(module), recurrent, Adapters(module, None)
        self.rowwise = RowWise() if exact else None
        if gradient_checkpointing:
            # the library renamed it within version 5 and warns of the old name
            enable: Callable[[dict[str, Any]], None] = (
                getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False, "context_fn": self._checkpoint_contexts})
            for part in module.modules():  # only checkpointed layers read the flag; a router in training may sample
                part.training = hasattr(part, "gradient_checkpointing")

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute tokens[N], positions[N] -> [N, D], or [M, D] with rows[M]."""
        context: dict[str, Any] = {}
        if self.recurrent:
            context[LAYOUT] = MixerLayout.of(attention, tokens.device, self.adapters)
        with _LibraryCall(attention, self.rowwise):
            out = self.body(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **context)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden if rows is None else take(hidden, rows)

    def _checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a checkpointed layer's forward and of its recomputation. The forward's is empty,
        because the forward runs inside the call's context; the recomputation gets such a context, too."""
        return nullcontext(), _LibraryCall(CURRENT_ATTENTION.get(), self.rowwise)


@torch.no_grad()
def kv_heads_of(module: PreTrainedModel) -> dict[int, KvHeads]:
    """Return the keys and values that each layer stores, found by a forward of one token. The attention of `module` has
    to be ours. Works on torch's meta device for a module without replaced parts."""
    device = module.get_input_embeddings().get_parameter("weight").device
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    recording = KeyRecording(torch.tensor([0, 1], dtype=torch.int32, device=device))
    with _LibraryCall(recording, None):
        text_model(module)(input_ids=token, position_ids=token, use_cache=False)
    return recording.heads


class _LibraryCall(AbstractContextManager[None]):
    """Context of a call of transformers: the layout of its tokens, and `RowWise` for exact numerics. Reusable, not
    reentrant."""

    def __init__(self, attention: Attention | None, rowwise: RowWise | None) -> None:
        self._attention, self._rowwise = attention, rowwise or nullcontext()

    def __enter__(self) -> None:
        self._before = CURRENT_ATTENTION.set(self._attention)
        self._rowwise.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._rowwise.__exit__(*error)
        CURRENT_ATTENTION.reset(self._before)


def forward_of(
    module: PreTrainedModel, *, lean: bool, exact: bool, gradient_checkpointing: bool, recurrent: RecurrentLayers
) -> Forward:
    """Return the lean decoder for a swapped module of the Llama family, transformers' forward for any other."""
    if lean:
        body = cast("LlamaBody", module.base_model)  # of the family, swapped
        return LlamaDecoder(body, gradient_checkpointing=gradient_checkpointing)
    return LibraryForward(module, recurrent, exact=exact, gradient_checkpointing=gradient_checkpointing)
