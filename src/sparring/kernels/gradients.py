"""Autograd functions around a path's forward and backward kernels. `ops` calls them only when a gradient is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sparring.kernels.attention_scores import AttentionForm
from sparring.kernels.path import KernelPath, PackedMatrix
from sparring.kernels.recomputation import told
from sparring.kernels.threads import sum_rows

SLAB = 8192
"""Outputs of a `Linear` whose gradients are computed at once when the weight's gradient is accumulated."""


class WeightSum:
    """Gradient of one weight [M, K], accumulated in float32 over all its uses.

    A separate gradient of each use would be as large as the weight, and autograd would hold two.
    """

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None

    def add(self, path: KernelPath, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Add the weight's gradient of one use, from the gradient of y[N, M], and return the gradient of x[N, K].
        Computed for `SLAB` outputs at a time, so that only the sum grows with M."""
        if self._total is None:
            self._total = torch.zeros_like(weight, dtype=torch.float32)
        dx = torch.zeros_like(x, dtype=torch.float32)
        for rows, part, total in zip(weight.split(SLAB), grad.split(SLAB, 1), self._total.split(SLAB), strict=True):
            of_x, of_weight = path.linear_backward(x, rows, part.to(x.dtype), (True, True))
            assert of_x is not None  # it was asked for
            dx += of_x
            total += of_weight
        return dx.to(x.dtype)

    def attach(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return a view of x that every operation with `weight` must take as its input. After all backward passes,
        the sum of the gradients becomes the gradient of `weight`."""
        attached: torch.Tensor = _ReturnSum.apply(x, weight, self)
        return attached

    def take(self) -> torch.Tensor | None:
        """Return the sum and reset it."""
        total, self._total = self._total, None
        return total


class _ReturnSum(Function):
    """Identity whose backward runs after all uses of x and returns the accumulated weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, total: WeightSum) -> torch.Tensor:
        """Return a view of x, of any shape."""
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of x and of the weight."""
        return grad, ctx.total.take(), None


class Linear(Function):
    """Product y = x W^T + b. The bits of W's gradient depend on the rows, not on threads (`kernels.threads`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: Any,
        packed: PackedMatrix,
        path: KernelPath,
        dtype: torch.dtype,
        total: WeightSum | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply x[N, K] by `packed` -> y[N, M]; the gradient of W goes to `weights`, or to `total` if given. An x
        that can be recomputed (`recomputation`) is not stored."""
        x = x.contiguous()
        again = told(x)
        ctx.save_for_backward(*weights, *((x,) if again is None else again.inputs))
        ctx.again = None if again is None else again.function
        ctx.path, ctx.total, ctx.count = path, total, len(weights)
        return path.linear(x, packed.storage, bias, packed.num_outputs, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return dx = dy W, dW = dy^T x, db = sum of dy over rows."""
        saved = ctx.saved_tensors
        weights, kept = saved[: ctx.count], saved[ctx.count :]
        x = kept[0] if ctx.again is None else ctx.again(*kept)
        if ctx.total is not None:
            dx = ctx.total.add(ctx.path, x, *weights, grad)
            return dx, _of_bias(ctx, grad), None, None, None, None, None
        needs = (ctx.needs_input_grad[0], any(ctx.needs_input_grad[6:]))
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        grad = grad.to(x.dtype)
        dx, dw = ctx.path.linear_backward(x, weight, grad, needs)
        db = _of_bias(ctx, grad)
        dws = [None] * len(weights) if dw is None else dw.split([w.shape[0] for w in weights])
        return dx, db, None, None, None, None, *dws


def _of_bias(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
    return ctx.path.sum_rows(grad).to(grad.dtype) if ctx.needs_input_grad[1] else None


def tracked(
    compute: Callable[..., torch.Tensor],
    pull: Callable[..., tuple[torch.Tensor | None, ...]],
    *inputs: torch.Tensor | None,
    saved: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute an operation with a single result, with gradients.

    Args:
        pull: function (*saved, gradient of the result) -> gradient of each input.
        saved: tensors that `pull` needs; the inputs by default.
    """
    result: torch.Tensor = _Tracked.apply((compute, pull, inputs if saved is None else saved), *inputs)
    return result


class _Tracked(Function):
    """Autograd function of `tracked`."""

    @staticmethod
    def forward(ctx: Any, operation: Any, *inputs: Any) -> torch.Tensor:
        """Compute the operation."""
        compute, ctx.pull, saved = operation
        ctx.save_for_backward(*saved)
        result: torch.Tensor = compute(*inputs)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of the inputs."""
        return None, *ctx.pull(*ctx.saved_tensors, grad.contiguous())


class LayerNorm(Function):
    """torch's layer norm, whose backward pass adds the gradients of the parameters row by row, not thread by thread."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float) -> torch.Tensor:
        """Return the layer norm [..., D] of x[..., D], with weight[D] and bias[D]; both may be None."""
        y, mean, inverse = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight, bias, mean, inverse = ctx.saved_tensors
        width, only_dx = x.shape[-1:], [True, False, False]
        dx = torch.ops.aten.native_layer_norm_backward(grad, x, width, mean, inverse, weight, bias, only_dx)[0]
        pulled = (grad.float(), grad.float() * (x.float() - mean) * inverse)
        db, dw = (sum_rows(part.reshape(-1, *width)) for part in pulled)
        return dx, *(None if t is None else dt.to(t.dtype) for t, dt in ((weight, dw), (bias, db))), None


class Broadcast(Function):
    """Tensor expanded to a larger shape, as torch does for operands of different shapes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return a view of `shape`."""
        ctx.shape = x.shape
        return x.expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of x: the sum over its copies."""
        aligned = (1,) * (grad.dim() - len(ctx.shape)) + tuple(ctx.shape)
        copies = [d for d, size in enumerate(aligned) if size != grad.shape[d]]
        others = [d for d, size in enumerate(aligned) if size == grad.shape[d]]
        rows = grad.permute(*copies, *others).flatten(0, len(copies) - 1) if copies else grad.unsqueeze(0)
        return sum_rows(rows.reshape(len(rows), -1)).to(grad.dtype).view(ctx.shape), None


class Tanh(Function):
    """Hyperbolic tangent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, path: KernelPath) -> torch.Tensor:
        """Compute tanh of x, contiguous, float32."""
        y = path.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of x."""
        (y,) = ctx.saved_tensors
        return grad * (1.0 - y * y), None


class AddRmsNorm(Function):
    """Sum of two tensors, and its root mean square norm."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, path: KernelPath
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + y and norm(x + y) of x[N, D], y[N, D], contiguous."""
        total, normed = path.add_rms_norm(x, y, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.path = eps, path
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Any, grad: Any) -> tuple[Any, ...]:
        """Return the gradients of x, y and weight."""
        if grad is None:
            return grad_total, grad_total, None, None, None
        total, weight = ctx.saved_tensors
        grad_total = None if grad_total is None else grad_total.contiguous()
        dx, dw = ctx.path.add_rms_norm_backward(total, weight, grad_total, grad.contiguous(), ctx.eps)
        return dx, dx, dw, None, None


class SplitHeads(Function):
    """Split of one product into normalised and rotated queries and keys, and values."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        q_weight: Any,
        k_weight: Any,
        angles: Any,
        shape: tuple[int, int, float],
        path: KernelPath,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split qkv[N, (H + 2 G) d] into q[N, H, d], k, v[N, G, d]; `angles` are cos and sin [N, d], `shape` is H, G,
        epsilon."""
        heads, kv_heads, eps = shape
        norms = None if q_weight is None else (q_weight, k_weight, eps)
        # without norms the gradient is that of a rotation, and needs no values
        ctx.save_for_backward(None if norms is None else qkv, q_weight, k_weight, *angles)
        ctx.eps, ctx.path, ctx.shape = eps, path, qkv.shape
        return path.split_heads(qkv, angles, norms, heads, kv_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of qkv and the norm weights."""
        qkv, q_weight, k_weight, *angles = ctx.saved_tensors
        norms = None if q_weight is None else (q_weight, k_weight, ctx.eps)
        qkv = grads[0].new_empty(ctx.shape) if norms is None else qkv
        gradients = ctx.path.split_heads_backward(qkv, angles, norms, tuple(grad.contiguous() for grad in grads))
        return *gradients, None, None, None


class AttentionPacked(Function):
    """Causal attention over packed sequences."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        where: tuple[torch.Tensor, torch.Tensor | None],
        form: AttentionForm,
        path: KernelPath,
    ) -> torch.Tensor:
        """Compute attention: q[N, H, d], k, v[N, G, d], sinks[H] -> [N, H, d]; `where` is cu_seqlens and shared."""
        cu_seqlens, shared = where
        out, logsumexp = path.attention_packed(q, k, v, cu_seqlens, form, shared, sinks)
        ctx.save_for_backward(q, k, v, cu_seqlens, shared, out, logsumexp, sinks)
        ctx.form, ctx.path = form, path
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of q, k, v and the sinks. A sink has no value: its gradient is minus its weight times
        grad . out, summed over rows."""
        *saved, out, logsumexp, sinks = ctx.saved_tensors
        grads = ctx.path.attention_packed_backward((*saved, out, logsumexp), grad.contiguous(), ctx.form)
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            weights = torch.exp((sinks - logsumexp).double()).float()
            of_sinks = -ctx.path.sum_rows(weights * (grad.float() * out.float()).sum(-1))
        return *grads, of_sinks, None, None, None


class TokenLogprobs(Function):
    """Log-probability of the target and entropy of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor,
        kept: Any,
        path: KernelPath,
        spent: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Compute logits[N, V] -> logprob[N], entropy[N], index of the first bad target or -1."""
        (logprob, entropy, maximum, log_sum), bad = path.token_logprobs(logits, targets, temperature, kept)
        ctx.save_for_backward(logits, targets, temperature, entropy, maximum, log_sum)
        ctx.path, ctx.kept, ctx.spent, ctx.ran = path, kept, spent, False
        ctx.set_materialize_grads(False)
        return logprob, entropy, bad

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Any, grad_entropy: Any, _bad: Any) -> tuple[Any, ...]:
        """Return the gradient of the logits."""
        saved = ctx.saved_tensors
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None, None, None
        if ctx.spent and ctx.ran:
            raise RuntimeError("token_logprobs: expected one backward pass of spent logits, got another")
        ctx.ran = True
        grad_logprob = torch.zeros_like(saved[3]) if grad_logprob is None else grad_logprob.contiguous()
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        grad = ctx.path.token_logprobs_backward(saved, grad_logprob, grad_entropy, ctx.kept, spent=ctx.spent)
        return grad, None, None, None, None, None
