"""A model without values, on torch's meta device: made of the same parts as a real one, it says how much memory that
takes.

Whatever holds numbers is counted as what it is: parameters of their dtype, a tied one once; what the products read in
the place of weights, as the path in use packs it; tables; and what a micro-batch allocates on its way forward and back.
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

from sparring.errors import BadInput, boundary
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
"""Bytes from which on the C library gives a tensor's memory back to the system when it is freed; it may keep smaller
ones for the thread that had them (M_MMAP_THRESHOLD, at its most on 64 bits)."""


class Size(NamedTuple):
    """Bytes of tensors: of those that a thread keeps for its next ones when they are freed, and of those that the
    system gets back at once."""

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
        model: on the meta device; with the adapter that it has everywhere, if any.

    packed: what the products read in the place of weights and factors.
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
        """Return the tensors that a trainer trains: the adapter's factors where there is one, else all parameters."""
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
        """Return the size that an update brings: weights, or an adapter's factors, and the same packed."""
        if not (factors := self._factors()):
            return self.weights, self.packed
        return Size.of(one.nbytes for one in factors), Size.of((one.nbytes for one in self._packed_factors()), LARGE)

    def micro_batch(self, tokens: int) -> Size:
        """Measure the most that a micro-batch of so many tokens, all of them trained, holds at once: activations for
        the backward pass, and the gradients that nobody has taken yet. A trainer takes each when it is found.

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
            with _taken(self.trained):
                total = reduce(add, (one.sum() for one in quantities.values()))
                torch.autograd.grad(total, self.trained, allow_unused=True)
        return meter.peak

    def step(self, tokens: int, sampled: int) -> Size:
        """Measure the most that a step of generation over so many tokens, of which some are followed by a new one,
        holds at once.

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
    """Leave autograd a gradient that takes no memory in the place of each that it has found, as a trainer does."""
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
        source: a checkpoint's folder, that of an adapter, whose base it is then, or the sizes of a fresh model.
        scalar: with a scalar head.
        lora: the adapter that it has everywhere.

    Raises:
        BadInput: there is no config, none that the library makes a model of, or it cannot have such an adapter.
    """
    if isinstance(source, InitConfig):
        where, config = "models.policy.init", config_of(source, source.vocab_size)
    else:
        where = str(base_folder(source))
        config = read_config(where, numerics)
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


class ZeroValues(TorchDispatchMode):
    """Mode for models that look at values, each of which is 0 here, and for operations that torch refuses without
    values though it computes them with some: grouped products of float32."""

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
    """Mode that counts the bytes of the tensors made within while they live; `peak`: the most of each kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._now, self._most = [0, 0], [0, 0]
        self._noted: set[int] = set()

    @property
    def peak(self) -> Size:
        """Return the most at any time."""
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
