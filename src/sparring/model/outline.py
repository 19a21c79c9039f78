"""A model without values, on torch's meta device. It is made of the same parts as a real model and tells how much
memory the real one takes.

Counted are: parameters in their dtype, tied ones once; the packed weights that the products read, in the layout of the
path in use; tables; and what a micro-batch allocates in its forward and backward passes.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparring.errors import BadInput, boundary, refusal
from sparring.kernels.memory import LARGE
from sparring.kernels.pages import token_bytes
from sparring.model.attention import IMPLEMENTATION, Packed
from sparring.model.causal import CausalModel
from sparring.model.config import InitConfig, LoraConfig
from sparring.model.create import config_of
from sparring.model.experts import RowExperts
from sparring.model.head import token_quantities
from sparring.model.hub import base_folder
from sparring.model.layers import Product, RowLinear
from sparring.model.library import class_of
from sparring.model.load import DTYPES, build_model, read_config
from sparring.model.lora import SCALE, A, Adapter, B
from sparring.model.targets import targeted, targets_of

OWN_MAPPING = 32 << 20
"""Minimum size, in bytes, of a tensor whose memory the C library gives back to the system when it is freed (the maximum
of M_MMAP_THRESHOLD on 64 bits). It may keep the memory of smaller ones for the thread that freed them."""


class Size(NamedTuple):
    """Bytes of tensors, by what happens when they are freed: `kept` for the thread's next tensors, or `returned` to the
    system at once."""

    kept: int = 0
    returned: int = 0

    @property
    def total(self) -> int:
        """Return all bytes."""
        return self.kept + self.returned

    def times(self, count: int) -> Size:
        """Multiply by a count."""
        return Size(self.kept * count, self.returned * count)

    @staticmethod
    def of(sizes: Iterable[int], own_mapping: int = OWN_MAPPING) -> Size:
        """Sum tensors with these numbers of bytes."""
        every = list(sizes)
        returned = sum(size for size in every if size >= own_mapping)
        return Size(sum(every) - returned, returned)


class Outline:
    """Sizes of a model.

    Args:
        model: model on the meta device, with its adapter for all rows, if any.

    packed: size of the packed weights and factors, which the products read.
    """

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.vocab_size, self.max_positions, self.kv_heads = model.vocab_size, model.max_positions, model.kv_heads
        self.packed = self._packed()  # first of all: experts are packed when first used, and no micro-batch takes that

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
    def weights(self) -> Size:
        """Return the size of the weights in files, and of an adapter."""
        return Size.of(one.nbytes for one in [*self.model.state().values(), *self._factors()])

    @property
    def tables(self) -> int:
        """Return the bytes of tables, such as rotary cosines."""
        parameters = self.model.parameters().values()
        return sum(one.nbytes for one in self.model.module.buffers() if not any(one is other for other in parameters))

    def staged(self) -> tuple[Size, Size]:
        """Return the sizes of what an update brings: the new weights, or an adapter's factors, and their packed
        form."""
        if not (factors := self._factors()):
            return self.weights, self.packed
        return Size.of(one.nbytes for one in factors), Size.of((one.nbytes for one in self._packed_factors()), LARGE)

    def micro_batch(self, tokens: int, *, keeps_gradients: bool = False) -> Size:
        """Measure the peak memory of a micro-batch of `tokens` tokens, all of them trained: activations for the
        backward pass, and gradients that the trainer has not taken yet. It takes each gradient as soon as autograd has
        computed it.

        Args:
            keeps_gradients: count all gradients, which the trainer takes after the backward pass.

        Raises:
            BadInput: the model cannot be computed without values.
        """
        self.model.module.requires_grad_(False)
        for parameter in self.trained:
            parameter.requires_grad_(True)
        with self._metered("a forward and a backward pass") as meter:
            hidden = self._hidden(tokens)
            needs = frozenset({"value"} if self.model.is_scalar else {"logprob", "entropy"})
            targets, heat = (torch.empty(tokens, dtype=kind, device="meta") for kind in (torch.int64, torch.float32))
            quantities = token_quantities(self.model, hidden, targets, heat, needs)
            with _taken(() if keeps_gradients else self.trained):
                total = reduce(add, (one.sum() for one in quantities.values()))
                torch.autograd.grad(total, self.trained, allow_unused=True)
        return meter.peak

    def step(self, tokens: int, sampled: int) -> Size:
        """Measure the peak memory of a generation step over `tokens` tokens, of which `sampled` are followed by a new
        one.

        Raises:
            BadInput: the model cannot be computed without values.
        """
        with torch.no_grad(), self._metered("a forward pass") as meter:
            rows = self._hidden(tokens)[:sampled]
            if not self.model.is_scalar:
                self.model.logits(rows)
        return meter.peak

    @contextmanager
    def _metered(self, passes: str) -> Iterator[AllocationMeter]:
        where = f"{type(self.model.module).__name__} without values"
        with boundary(BadInput, where, passes, "report it"), ZeroValues(), AllocationMeter() as meter:
            yield meter

    def _packed(self) -> Size:
        return Size.of((one.nbytes for one in [*self._storages(), *self._packed_factors()]), LARGE)

    def _hidden(self, tokens: int) -> torch.Tensor:
        ids, places = (torch.empty(tokens, dtype=torch.int64, device="meta") for _ in range(2))
        return self.model.hidden(ids, places, Packed.of([tokens]), places)

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


@contextmanager
def _taken(trained: Iterable[torch.Tensor]) -> Iterator[None]:
    """Replace each gradient that autograd computes by one that takes no memory, as a trainer does."""
    handles = [one.register_hook(lambda gradient: gradient.new_empty(()).expand_as(gradient)) for one in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
        scalar: whether the model has a scalar head.
        lora: settings of the adapter for all rows; None without one.

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
    return Outline(model)


def checkpoint_outline(folder: Path, head: str = "tokens") -> Outline:
    """Return the outline of the checkpoint in `folder`, or of an adapter's base, with the defaults of `outline`.

    Args:
        head: head that the checkpoint must have, as in `load`.

    Raises:
        BadInput: the folder has no config or no weights, transformers cannot make a model of the config, or the model
            has another head.
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


class AllocationMeter(TorchDispatchMode):
    """Mode that counts the bytes of the living tensors that were made within it. `peak` is the maximum of each kind of
    `Size`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._now, self._most = [0, 0], [0, 0]
        self._noted: set[int] = set()

    @property
    def peak(self) -> Size:
        """Return the maximum at any time, for each kind of `Size`."""
        return Size(*self._most)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the results of an operation of torch; torch calls this for every operation."""
        result = function(*args, **(kwargs or {}))
        inputs = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in inputs
            ):  # a view takes nothing
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        if (key := storage._cdata) in self._noted:
            return
        size = storage.nbytes()
        kind = int(size >= OWN_MAPPING)
        self._noted.add(key)
        self._now[kind] += size
        self._most[kind] = max(self._most[kind], self._now[kind])
        weakref.finalize(storage, self._forget, key, kind, size)

    def _forget(self, key: int, kind: int, size: int) -> None:
        self._noted.discard(key)
        self._now[kind] -= size
