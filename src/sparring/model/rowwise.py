"""Row-invariant execution of transformers' own code between our modules.

torch changes an element's bits with its position: vectorised functions compute the remainder after the last whole
vector, or the beginning of the next thread's share, in another way; sums and products use an order that depends on the
shape. Within `RowWise` such functions do not depend on position and shape, and unknown functions are recorded by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sparring.errors import refusal
from sparring.kernels import gradients, ops

Result = TypeVar("Result")

WHOLE = 64
"""Number of elements that fill at least two whole vectors, for every dtype and processor: a multiple of it leaves no
remainder."""
PIECE = 2048
"""Maximum number of elements that torch never divides among threads."""

POINTWISE = frozenset(
    "sigmoid silu gelu tanh exp expm1 log log1p log2 exp2 erf softplus logsigmoid log_sigmoid mish elu selu celu "
    "hardsigmoid "
    "hardswish sin cos pow rpow sqrt rsqrt reciprocal".split()
)
"""Functions of one element whose vectorised form may round differently from the scalar one."""

SAFE = frozenset(
    # elementwise, and rounded once as IEEE 754 says
    "add radd iadd sub rsub isub rsub mul rmul imul div rdiv rtruediv truediv itruediv true_divide neg abs square "
    "relu relu6 clamp clip clamp_min clamp_max maximum minimum floor ceil round sign threshold leaky_relu where "
    "masked_fill nan_to_num "
    # exact in any order
    "max min amax amin topk sort argsort kthvalue "
    # moves and lookups
    "get set getitem setitem view view_as reshape reshape_as transpose swapaxes movedim permute contiguous t "
    "expand expand_as "
    "repeat repeat_interleave tile unsqueeze squeeze flatten unflatten split split_with_sizes tensor_split chunk "
    "cat concat "
    "concatenate stack unbind narrow select index_select index_copy gather take_along_dim scatter pad roll flip "
    "tril triu broadcast_to broadcast_tensors embedding view_as_real copy clone detach requires_grad fill zero "
    # conversions and new tensors
    "to type type_as float double half bfloat16 cpu cuda zeros zeros_like ones ones_like full full_like "
    "empty empty_like "
    "new_zeros new_ones new_full new_empty new_tensor tensor as_tensor arange linspace scalar_tensor eye "
    # dropout, which is off
    "dropout alpha_dropout feature_alpha_dropout".split()
)
"""Functions that give a row's elements the same bits in every batch."""

PRODUCTS = frozenset("mul rmul imul multiply div rdiv idiv truediv rtruediv itruediv true_divide divide square".split())
"""Functions that round once for real numbers, but several times, and platform-dependently, for complex ones."""

SPREADING = frozenset("add radd sub rsub mul rmul div rdiv rtruediv truediv true_divide".split())
"""Functions of two operands that may broadcast a weight over rows."""

COPYING = frozenset("expand expand_as broadcast_to".split())
"""Functions that broadcast a value."""

SUMMING = frozenset(("alpha", "reduce", "accumulate"))
"""Keywords with which some safe functions also multiply or sum."""


def row_invariant(function: Callable[..., Result]) -> Callable[..., Result]:
    """Make one of our own functions run outside the mode: the operations that it calls are row-invariant already."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


class RowWise(TorchFunctionMode):
    """Mode that computes transformers' code row by row; it does not apply inside `row_invariant` functions, and does
    not see code that TorchScript compiled.

    Attributes:
        unknown: functions that returned numbers and are not known to be row-invariant.
        is_proven: True if an unknown function is refused, because the self-test passed without calling it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replaced: set[str] = set()
        self.unknown: set[str] = set()
        self.is_proven = False
        self._safe: dict[Callable[..., Any], bool] = {}
        self._has_complex = False

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute one function of torch row by row, or refuse it; torch calls this for every function."""
        named = kwargs or {}
        if (safe := self._safe.get(function)) is None:
            name = function.__name__.strip("_")
            safe = self._safe[function] = name in SAFE and not (self._has_complex and name in PRODUCTS)
        if safe and (not named or SUMMING.isdisjoint(named)):
            return broadcast_weight(function, args, named) if torch.is_grad_enabled() else function(*args, **named)
        name = function.__name__ if _is_in_place(function) else function.__name__.strip("_")
        if name == "view_as_complex" and not self._has_complex:
            self._has_complex = True
            self._safe.clear()
        is_complex = self._has_complex and _is_complex((*args, *named.values()))
        row_safe = function.__name__.strip("_") in SAFE and not is_complex and SUMMING.isdisjoint(named)
        if row_safe or name == "view_as_complex":
            return function(*args, **named)
        if name in ("mul", "rmul") and is_complex and len(args) == 2 and not named:
            self.replaced.add(name)
            return complex_product(*args)
        if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            result = self._replacement(name, function, args, named)
            if result is not None:
                self.replaced.add(name)
                return result
        result = function(*args, **named)
        results = result if isinstance(result, (tuple, list)) else (result,)
        if any(isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex()) for one in results):
            self.unknown.add(name)
            if self.is_proven:
                given = f"{name}, which was not tested when the model was loaded"
                raise refusal(
                    "exact numerics",
                    "functions that compute each row by itself",
                    given,
                    'set numerics = "fast" for this model',
                )
        return result

    @staticmethod
    def _replacement(
        name: str, function: Callable[..., torch.Tensor], args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> torch.Tensor | None:
        if named.get("inplace"):
            return None
        if name in POINTWISE and not _has_tensors((*args[1:], *named.values())):
            return pointwise(function, *args, **named)
        return REPLACED[name](*args, **named) if name in REPLACED else None


def _is_in_place(function: Callable[..., Any]) -> bool:
    return function.__name__.endswith("_") and not function.__name__.startswith("_")


def _is_complex(values: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)


def complex_product(a: Any, b: Any) -> torch.Tensor:
    """Multiply broadcastable tensors or numbers, one of them complex, with real operations that each round once."""
    (a, ai), (b, bi) = (_parts(a), _parts(b))
    return torch.complex(a * b - ai * bi, a * bi + ai * b)


def _parts(x: Any) -> tuple[Any, Any]:
    return (x, 0.0) if isinstance(x, torch.Tensor) and not x.is_complex() else (x.real, x.imag)


def _has_tensors(values: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values)


def pointwise(function: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """Compute function(x) of any shape in whole vectors and on one thread. A GPU computes all elements alike, so it
    needs neither."""
    if x.device.type != "cpu":
        return function(x, *rest, **named)
    flat = x.reshape(-1)
    pieces = functional.pad(flat, (0, -flat.numel() % WHOLE), value=1.0).split(PIECE)
    return torch.cat([function(piece, *rest, **named) for piece in pieces])[: flat.numel()].view(x.shape)


def row_sums(x: torch.Tensor, dim: int, *, keepdim: bool = False) -> torch.Tensor:
    """Sum along one dimension by repeated halving, so that elements are only ever added pairwise."""
    sums = x.movedim(dim, -1)
    while sums.shape[-1] > 1:
        half = -(-sums.shape[-1] // 2)
        sums = sums[..., :half] + functional.pad(sums[..., half:], (0, 2 * half - sums.shape[-1]))
    return sums.movedim(-1, dim) if keepdim else sums.squeeze(-1)


def _sum(
    x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None, *, axis: Any = None
) -> torch.Tensor | None:
    dim = axis if dim is None else dim
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    if not isinstance(dim, int) or not x.shape[dim]:
        return None
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return row_sums(wide, dim, keepdim=keepdim).to(dtype or x.dtype)


def _mean(
    x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None, *, axis: Any = None
) -> torch.Tensor | None:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    sums = _sum(wide, dim, keepdim, axis=axis)
    return None if sums is None else (sums / (wide.numel() // max(sums.numel(), 1))).to(dtype or x.dtype)


def _softmax(
    x: torch.Tensor, dim: int | None = None, dtype: torch.dtype | None = None, _stacklevel: int = 3
) -> torch.Tensor | None:
    if dim is None:
        return None
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    weights = pointwise(torch.exp, wide - wide.amax(dim, keepdim=True))
    return (weights / row_sums(weights, dim, keepdim=True)).to(dtype or x.dtype)


def _rms_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor | None:
    if len(normalized_shape) != 1:
        return None
    wide, least = (
        x.float() if x.dtype in (torch.bfloat16, torch.float16) else x,
        torch.finfo(x.dtype).eps if eps is None else eps,
    )
    wide = wide * pointwise(torch.rsqrt, row_sums(wide * wide, -1, keepdim=True) / x.shape[-1] + least)
    return (wide if weight is None else wide * weight).to(x.dtype)


def broadcast_weight(function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Call function(*args, **named). If it broadcasts a weight over rows, the gradient of the weight is summed in a
    fixed order: see `kernels.threads`."""
    name = function.__name__.strip("_")
    if name in COPYING and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
        return gradients.Broadcast.apply(args[0], function(*args, **named).shape)
    if name in SPREADING and len(args) == 2 and all(isinstance(one, torch.Tensor) for one in args):
        a, b = args
        if a.shape != b.shape and (a.requires_grad or b.requires_grad):
            shape = torch.broadcast_shapes(a.shape, b.shape)
            args = tuple(gradients.Broadcast.apply(one, shape) if _repeats_rows(one, shape) else one for one in args)
    return function(*args, **named)


def _repeats_rows(x: torch.Tensor, shape: torch.Size) -> bool:
    """Return True if x has gradients and is broadcast along a dimension other than the last."""
    sizes = (1,) * (len(shape) - x.dim()) + tuple(x.shape)
    return x.requires_grad and any(size < new_size for size, new_size in zip(sizes[:-1], shape[:-1], strict=True))


def _layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor | None:
    """Compute torch's layer norm with each row on one thread, in one order."""
    if len(normalized_shape) != 1:
        return None
    y: torch.Tensor = gradients.LayerNorm.apply(x, weight, bias, eps)
    return y


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """Multiply by a small weight that belongs to no module, such as a router's; it is packed for this call."""
    if (
        x.dtype is not weight.dtype
        or x.dtype not in (torch.float32, torch.bfloat16)
        or weight.dim() != 2
        or not x.numel()
    ):
        return None
    y = ops.linear(x.reshape(-1, x.shape[-1]), ops.pack(weight), bias)
    return y.view(*x.shape[:-1], len(weight))


REPLACED: dict[str, Callable[..., torch.Tensor | None]] = {
    **{"sum": _sum, "mean": _mean, "softmax": _softmax, "rms_norm": _rms_norm, "layer_norm": _layer_norm},
    "linear": _linear,
}
"""Row-invariant replacements of functions; they return None for arguments that they do not support."""
