"""What a backward pass computes again: nothing but memory differs."""

import gc

import pytest
import torch

from sparring.kernels import ops
from sparring.kernels.recomputation import told

pytestmark = pytest.mark.usefixtures("kernel_path")


def inputs(dtype):
    draw = torch.Generator().manual_seed(2)
    shapes = {"x": (9, 32), "y": (9, 32), "norm": (32,), "up": (48, 32), "down": (32, 24)}
    return {name: torch.randn(*shape, generator=draw).to(dtype).requires_grad_() for name, shape in shapes.items()}


def block(given, through=lambda tensor: tensor):
    """A norm, a product, a gate and a product; `through` may hide how an input of a product is computed again."""
    total, h = ops.add_rms_norm(given["x"], given["y"], given["norm"], 1e-5)
    gated = ops.swiglu(ops.linear(through(h), ops.pack(given["up"])))
    z = ops.linear(through(gated), ops.pack(given["down"])) + total
    return ops.linear(through(ops.rms_norm(z, given["norm"], 1e-5)), ops.pack(given["up"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_inputs_that_are_kept(dtype):
    again, kept = inputs(dtype), inputs(dtype)
    block(again).float().pow(2).sum().backward()
    block(kept, torch.clone).float().pow(2).sum().backward()
    assert all(torch.equal(again[name].grad, kept[name].grad) for name in again)


def test_the_input_of_a_product_is_let_go():
    given = inputs(torch.float32)
    gate_up = ops.linear(given["x"], ops.pack(given["up"]))
    gated = ops.swiglu(gate_up)
    assert told(gated) is not None and told(gated.clone()) is None
    out = ops.linear(gated, ops.pack(given["down"]))
    shape = gated.shape
    del gated
    gc.collect()
    assert not any(type(one) is torch.Tensor and one.shape == shape for one in gc.get_objects())
    out.sum().backward()


def test_spent_logits_become_their_gradient_once():
    draw = torch.Generator().manual_seed(4)
    logits, targets, heat = torch.randn(6, 50, generator=draw), torch.arange(6), torch.full((6,), 0.7)
    offsets, ids = torch.tensor([0, 0, 2, 2, 4, 4, 4]), torch.tensor([1, 30, 3, 49], dtype=torch.int32)
    for kept in (None, (offsets, ids)):
        found = []
        for spent in (False, True):
            leaf = logits.clone().requires_grad_()
            given = leaf * 1.0
            logprob, entropy = ops.token_logprobs(given, targets, heat, kept, spent=spent)
            total = (logprob * 2.0 - entropy).sum()
            found.append(torch.autograd.grad(total, leaf, retain_graph=True)[0])
            if spent:
                with pytest.raises(RuntimeError, match="one backward pass"):
                    torch.autograd.grad(total, leaf)
        assert torch.equal(*found)
