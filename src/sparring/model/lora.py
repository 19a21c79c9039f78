"""Low-rank adapters of a model's linear layers: y = W x + scale * B (A x) (Hu et al., arXiv 2106.09685, eq. 3).

Rows of one call may have different adapters, or none. Exact numerics compute A x and B (A x) with the row-invariant
product and add elementwise, so that a row's bits depend only on that row and its adapter. Shapes: N rows, K inputs, M
outputs, R rank (times the number of layers that one product joins), E experts, whose matrices and factors are stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from sparring.errors import refusal
from sparring.kernels import ops
from sparring.kernels.threads import take
from sparring.model.config import STACKED
from sparring.model.decoder import LlamaDecoder
from sparring.model.experts import AdaptedExpert, RowExperts
from sparring.model.layers import RowLinear
from sparring.model.targets import AdaptableWeight, linears_of, shape_of, targets_of, unknown_target

A, B, SCALE = "lora_A.weight", "lora_B.weight", "lora_scale"
"""Names in a state: suffixes of a layer's two factors, and the scale."""

RowGroup = tuple["Adapter", torch.Tensor | None]
"""Adapter and the rows [n] int64 that have it; None for all rows."""


PackedFactors = tuple[ops.PackedWeight, ops.PackedWeight]
"""Packed factors A and B of one matrix."""


class AdapterAssignment(NamedTuple):
    """Adapters of the rows of a call: numbers[N], -1 for none, and the rows of each adapter."""

    numbers: np.ndarray
    groups: list[RowGroup]


class Adapter:
    """Factors of one adapter by linear layer, as parameters; `Adapters.fit` prepares them for a model.

    Args:
        state: `<layer>.lora_A.weight` [R, K], `<layer>.lora_B.weight` [M, R] and the float64 number `lora_scale`; for
            stacked experts [E, R, K] and [E, M, R]. Copied.

    Raises:
        BadInput: a factor lacks its partner, or their ranks differ.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        names = sorted({name.removesuffix(f".{A}").removesuffix(f".{B}") for name in state if name != SCALE})
        wanted = {SCALE, *(f"{name}.{factor}" for name in names for factor in (A, B))}
        if wanted != state.keys() or not names:
            mismatched = sorted(wanted ^ state.keys())[:3]
            raise refusal(
                "adapter", "two factors for each layer, and the scale", f"a difference in {mismatched}", "repair it"
            )
        self.scale = float(state[SCALE])
        self._parameters = {
            name: nn.Parameter(state[name].to(dtype=dtype, device=device, copy=True), requires_grad=False)
            for name in sorted(wanted - {SCALE})
        }
        self.factors = {name: (self._parameters[f"{name}.{A}"], self._parameters[f"{name}.{B}"]) for name in names}
        for name, (a, b) in self.factors.items():
            if a.dim() not in (2, 3) or a.dim() != b.dim() or a.shape[:-1] != (*b.shape[:-2], b.shape[-1]):
                given = f"{tuple(a.shape)} and {tuple(b.shape)}"
                expected = "A [rank, inputs] and B [outputs, rank], of experts stacked"
                raise refusal(f"adapter {name}", expected, given, "repair it")
        self.terms: dict[LoraTarget | ExpertLoraTarget, LoraTerm | ExpertLoraTerm] = {}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return dict(self._parameters)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name, sharing their storage, and the scale, as the constructor takes them."""
        scale = torch.tensor(self.scale, dtype=torch.float64)
        return {SCALE: scale, **{name: parameter.detach() for name, parameter in self._parameters.items()}}

    def takes(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Return True if names, shapes and scale of a state equal this adapter's."""
        shapes, own = ({name: values.shape for name, values in one.items()} for one in (state, self.state()))
        return shapes == own and float(state[SCALE]) == self.scale

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy every value from `state`, cast to this dtype, then `refresh()`. If names, shapes or the scale differ,
        raise BadInput and copy nothing."""
        own = self.state()
        unlike = [
            n for n in own.keys() | state.keys() if n not in own or n not in state or own[n].shape != state[n].shape
        ]
        if unlike or float(state[SCALE]) != self.scale:
            given = f"a difference in {sorted(unlike)[:3]}" if unlike else f"scale {float(state[SCALE])}"
            raise refusal(
                "adapter", f"{len(self.factors)} layers of these shapes and scale {self.scale}", given, "load another"
            )
        for name, parameter in self._parameters.items():
            parameter.copy_(state[name])
        self.refresh()

    def refresh(self) -> None:
        """Pack changed factors again."""
        for delta in self.terms.values():
            delta.refresh()

    def merged(
        self, state: Mapping[str, torch.Tensor], targets: Mapping[str, AdaptableWeight]
    ) -> dict[str, torch.Tensor]:
        """Return a model's state with W replaced by W + scale * B A, computed in float64 and rounded once."""
        self.check(targets)
        merged = dict(state)
        for name, (a, b) in self.factors.items():
            key, _, transposed = targets[name]
            product = b.detach().double() @ a.detach().double()
            weight = state[key]
            merged[key] = (weight.double() + self.scale * (product.mT if transposed else product)).to(weight.dtype)
        return merged

    def check(self, targets: Mapping[str, AdaptableWeight]) -> None:
        """Check the factors against the weights of a model. Raises BadInput if one belongs to a weight that the model
        lacks, or has another shape."""
        for name, (a, b) in self.factors.items():
            if name not in targets:
                raise unknown_target(name, targets)
            expected = targets[name].shape
            if (*b.shape[:-1], a.shape[-1]) != expected:
                given = f"{tuple(b.shape)} and {tuple(a.shape)}"
                raise refusal(
                    f"adapter {name}", f"factors of a layer {list(expected)}", given, "load one of this model"
                )


class LoraTerm:
    """Term of one adapter in one product. For a product that joins layers, their A are stacked and their B form a
    block-diagonal matrix."""

    def __init__(self, adapter: Adapter, target: LoraTarget) -> None:
        self._target, self.scale = target, adapter.scale
        self._factors = [adapter.factors.get(name) for name in target.names]
        self._inner: list[torch.Tensor] = [factors[0] for factors in self._factors if factors is not None]
        self.a = ops.pack(*self._inner) if target.packed else None
        self.b = ops.pack(self._blocks().detach()) if target.packed else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x[N, K] -> scale * B (A x) [N, M]."""
        if self.a is None or self.b is None:
            return nn.functional.linear(nn.functional.linear(x, torch.cat(self._inner)) * self.scale, self._blocks())
        return _low_rank(
            x, self.a, self.b.with_weights(self._blocks()) if torch.is_grad_enabled() else self.b, self.scale
        )

    def refresh(self) -> None:
        """Pack changed factors again."""
        if self.a is not None and self.b is not None:
            self.a.update(*self._inner)
            self.b.update(self._blocks().detach())

    def _blocks(self) -> torch.Tensor:
        """Return B as a block-diagonal matrix [M, R], with rows of zeros for layers without factors."""
        if len(self._factors) == 1 and self._factors[0] is not None:
            return self._factors[0][1]
        like = self._inner[0]
        blocks = [
            like.new_zeros(size, 0) if factors is None else factors[1]
            for factors, size in zip(self._factors, self._target.sizes, strict=True)
        ]
        diagonal: torch.Tensor = torch.block_diag(*blocks)
        return diagonal


def _low_rank(x: torch.Tensor, a: ops.PackedWeight, b: ops.PackedWeight, scale: float) -> torch.Tensor:
    """Compute x[N, K] -> scale * B (A x) [N, M]."""
    return ops.linear((ops.linear(x, a, None, torch.float32) * scale).to(x.dtype), b)


class ExpertLoraTerm:
    """Terms that one adapter adds to the products of a layer's experts, whose weights are one stacked parameter."""

    def __init__(self, adapter: Adapter, target: ExpertLoraTarget) -> None:
        self._factors, self.scale = adapter.factors[target.name], adapter.scale
        self.a, self.b = (ops.PackedStack(weights) for weights in self._detached())

    def pairs(self) -> list[PackedFactors]:
        """Return packed (A, B) of each expert; with gradients, a stacked parameter's views share one autograd node."""
        packed = zip(self.a.matrices, self.b.matrices, strict=True)
        if not torch.is_grad_enabled():
            return list(packed)
        views = zip(*(factor.unbind(0) for factor in self._factors), strict=True)
        return [
            (a.with_weights(of_a), b.with_weights(of_b)) for (a, b), (of_a, of_b) in zip(packed, views, strict=True)
        ]

    def refresh(self) -> None:
        """Pack changed factors again."""
        for stack, weights in zip((self.a, self.b), self._detached(), strict=True):
            stack.update(weights)

    def _detached(self) -> list[tuple[torch.Tensor, ...]]:
        return [factor.detach().unbind(0) for factor in self._factors]


class LoraTarget:
    """Product of a model to which adapters add: that of the linear layers `names`, joined, with `sizes` outputs. If
    `packed`, our kernels compute the product and the adapters' terms."""

    def __init__(self, adapters: Adapters, names: Sequence[str], layers: Sequence[nn.Module], *, packed: bool) -> None:
        self._adapters, self.names, self.packed = adapters, names, packed
        self.sizes = [shape_of(layer)[0] for layer in layers]

    def term(self, adapter: Adapter) -> LoraTerm:
        """Make the term that an adapter adds to this product."""
        return LoraTerm(adapter, self)

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the terms of the rows' adapters, for inputs x[N, K], to the product y[N, M]."""
        for adapter, rows in self._adapters.groups(len(x)):
            delta = adapter.terms.get(self)
            if isinstance(delta, LoraTerm):
                y = _add(delta, rows, x, y)
        return y

    def hook(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Add the terms to the output of one of torch's own layers."""
        if not self._adapters.used:
            return output
        x = inputs[0]
        return self(x.reshape(-1, x.shape[-1]), output.reshape(-1, output.shape[-1])).view(output.shape)


class ExpertLoraTarget(NamedTuple):
    """Products of a layer's experts to which adapters add; their weights are one stacked parameter, `name`."""

    name: str

    def term(self, adapter: Adapter) -> ExpertLoraTerm:
        """Make the terms that an adapter adds to these products."""
        return ExpertLoraTerm(adapter, self)


class MixtureAdapters:
    """Terms that adapters add to the products of one layer's experts. Implements `ExpertAdapters`."""

    def __init__(self, adapters: Adapters, targets: Sequence[ExpertLoraTarget]) -> None:
        self._adapters, self.targets = adapters, targets

    @property
    def adds(self) -> bool:
        return any(target in adapter.terms for adapter in self._adapters.active for target in self.targets)

    def __call__(self, rows: Sequence[torch.Tensor]) -> list[AdaptedExpert]:
        pairs: dict[tuple[Adapter, int], list[PackedFactors]] = {}
        for adapter in self._adapters.active:
            for place, target in enumerate(self.targets):
                if isinstance(delta := adapter.terms.get(target), ExpertLoraTerm):
                    pairs[adapter, place] = delta.pairs()
        groups = self._adapters.groups_among(rows)
        return [partial(self._add_terms, one, pairs, expert) for expert, one in enumerate(groups)]

    @staticmethod
    def _add_terms(
        groups: Sequence[RowGroup],
        pairs: Mapping[tuple[Adapter, int], list[PackedFactors]],
        expert: int,
        place: int,
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> torch.Tensor:
        for adapter, rows in groups:
            if (adapter, place) in pairs:
                a, b = pairs[adapter, place][expert]
                y = _add(partial(_low_rank, a=a, b=b, scale=adapter.scale), rows, x, y)
        return y


def _add(
    delta: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor | None, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Add delta(x[N, K]) to y[N, M], in the given rows."""
    if rows is None:
        return y + delta(x)
    return y.index_copy_(0, rows, take(y, rows) + delta(take(x, rows)))


class Adapters:
    """Adapters of one model by number, and the assignment of a call's rows to them.

    A model without adapters pays nothing for this.

    Attributes:
        everywhere: adapter of all rows of a call without an assignment, as in training.
        num_changes: counter that changes with `by_number`.
    """

    def __init__(self, module: PreTrainedModel, decoder: LlamaDecoder | None) -> None:
        self._module, self._decoder = module, decoder
        self._targets: dict[str, LoraTarget | ExpertLoraTarget] = {}
        self._once = Lock()
        self._by_number: dict[int, Adapter] = {}
        self._device = module.get_input_embeddings().get_parameter("weight").device
        self.num_changes = 0
        self._current: AdapterAssignment | None = None
        self.everywhere: Adapter | None = None

    @property
    def by_number(self) -> Mapping[int, Adapter]:
        """Return the adapters by number."""
        return self._by_number

    @property
    def used(self) -> bool:
        """True if any row of the current call may have an adapter."""
        return self.everywhere is not None if self._current is None else bool(self._current.groups)

    def groups(self, num_rows: int) -> Sequence[RowGroup]:
        """Return the groups of rows of a product by adapter.

        Raises:
            BadInput: adapters were assigned to rows, but the product has another number of rows, because the model has
                rearranged them.
        """
        if self._current is None:
            return () if self.everywhere is None else ((self.everywhere, None),)
        numbers, groups = self._current
        if groups and num_rows != len(numbers):
            expected = f"a product over the {len(numbers)} rows that have adapters"
            raise refusal(
                "adapters", expected, f"one over {num_rows}", "serve one adapter alone, merged into the weights"
            )
        return groups

    @property
    def active(self) -> list[Adapter]:
        """Return the adapters that rows of the current call may have."""
        if self._current is None:
            return [] if self.everywhere is None else [self.everywhere]
        return [adapter for adapter, _ in self._current.groups]

    def groups_among(self, parts: Sequence[torch.Tensor]) -> list[Sequence[RowGroup]]:
        """Return, for each part, the `groups` of a product over the rows parts[i] [n] of the current call."""
        if self._current is None or all(rows is None for _, rows in self._current.groups):
            groups = self.groups(0) if self._current is None else self._current.groups
            return [groups] * len(parts)
        numbers = self._current.numbers[torch.cat(list(parts)).cpu().numpy()]
        bounds = np.cumsum([len(part) for part in parts])[:-1]
        return [self._group(one).groups if len(one) else () for one in np.split(numbers, bounds)]

    def assign_rows(self, numbers: np.ndarray) -> AbstractContextManager[None]:
        """Give row n the adapter numbers[n], -1 for none, in the calls within the context; without gradients."""
        return self.assigned(self._group(numbers))

    def assignment_of(self, rows: torch.Tensor) -> AdapterAssignment | None:
        """Return the assignment of rows[n] of the current call, for `assigned`; None without an assignment."""
        return None if self._current is None else self._group(self._current.numbers[rows.cpu().numpy()])

    @contextmanager
    def assigned(self, assignment: AdapterAssignment | None) -> Iterator[None]:
        """Use this assignment in the calls within the context."""
        before, self._current = self._current, assignment
        try:
            yield
        finally:
            self._current = before

    def _group(self, numbers: np.ndarray) -> AdapterAssignment:
        used = np.unique(numbers)
        rows_of = [(self._by_number[number], np.flatnonzero(numbers == number)) for number in used[used >= 0].tolist()]
        num_rows = len(numbers)
        return AdapterAssignment(
            numbers,
            [
                (one, None if len(rows) == num_rows else torch.from_numpy(rows).to(self._device))
                for one, rows in rows_of
            ],
        )

    def fit(self, adapter: Adapter) -> Adapter:
        """Prepare an adapter for this model's products. Raises BadInput if it belongs to another model, or has factors
        for experts that transformers computes."""
        targets = self._all_targets()
        adapter.check(targets_of(self._module))
        if alien := [name for name in adapter.factors if name not in targets]:
            raise library_experts_refusal(alien[0])
        adapter.terms = {target: target.term(adapter) for target in {targets[name]: None for name in adapter.factors}}
        return adapter

    def put(self, number: int, adapter: Adapter) -> None:
        """Register a fitted adapter under a number, replacing an earlier one."""
        self._by_number[number] = adapter
        self.num_changes += 1

    def take(self, number: int) -> Adapter | None:
        """Remove an adapter and return it; None if the number is free."""
        self.num_changes += 1
        return self._by_number.pop(number, None)

    def _all_targets(self) -> Mapping[str, LoraTarget | ExpertLoraTarget]:
        """Return the target of each linear layer; created with the first adapter, on the thread that stages it."""
        with self._once:
            if not self._targets:
                self._find_targets()
            return self._targets

    def _find_targets(self) -> None:
        linears = linears_of(self._module)
        names = {layer: name for name, layer in linears.items()}
        products = [product for layer in self._decoder.layers for product in layer.products] if self._decoder else []
        joined = {part for product in products for part in product.parts}
        products += [layer.product for layer in names if isinstance(layer, RowLinear) and layer not in joined]
        for product in products:
            product.adapted = self._new_target([names[part] for part in product.parts], product.parts, packed=True)
        for layer, name in names.items():
            if not isinstance(layer, RowLinear):
                layer.register_forward_hook(self._new_target([name], [layer], packed=False).hook)
        for path, experts in self._module.named_modules():
            if isinstance(experts, RowExperts):
                targets = [ExpertLoraTarget(f"{path}.{name}") for name in STACKED]
                experts.adapted = MixtureAdapters(self, targets)
                self._targets |= {target.name: target for target in targets}

    def _new_target(self, names: Sequence[str], layers: Sequence[nn.Module], *, packed: bool) -> LoraTarget:
        target = LoraTarget(self, names, layers, packed=packed)
        self._targets |= dict.fromkeys(names, target)
        return target


def library_experts_refusal(name: str) -> Exception:
    """Return the error for an adapter of experts that transformers computes."""
    remedy = 'name linear layers alone, or set numerics = "exact" where the model allows it'
    return refusal(f"adapter {name}", "experts that our own layers compute", "the library's layers", remedy)


def fresh_state(
    module: PreTrainedModel, names: Sequence[str], rank: int, scale: float, seed: int
) -> dict[str, torch.Tensor]:
    """Make the state of an untrained adapter: A uniform within 1 / sqrt(K) (Kaiming with a = sqrt(5), as PEFT
    initialises), B zero, so that the adapted model equals the model. A function of the arguments alone.

    Args:
        module: model with the layers; its weights are not read and may be on the meta device.
        names: names from `targeted`.
    """
    generator = torch.Generator().manual_seed(seed)
    state = {SCALE: torch.tensor(scale, dtype=torch.float64)}
    targets = targets_of(module)
    for name in sorted(names):
        *experts, num_outputs, num_inputs = targets[name].shape
        bound = num_inputs**-0.5
        state[f"{name}.{A}"] = torch.empty(*experts, rank, num_inputs).uniform_(-bound, bound, generator=generator)
        state[f"{name}.{B}"] = torch.zeros(*experts, num_outputs, rank)
    return state
