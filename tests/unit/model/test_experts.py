"""Experts and their router: a row's bits know nothing of other rows or of the load; values and gradients are the
library's."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sparring.model.experts import RowExperts, RowRouter, gates_of
from sparring.model.load import load
from sparring.testing.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("kernel_path")

FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss"]


def block(family, tmp_path, dtype):
    """The library's router and experts of the first layer."""
    path = tiny_model(family, tmp_path, seed=3)
    config = AutoConfig.from_pretrained(path)
    mlp = (
        AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, experts_implementation="eager")
        .model.layers[0]
        .mlp
    )
    return mlp.router if family == "gpt_oss" else mlp.gate, mlp.experts


def swapped(router, experts):
    return RowRouter(router, renormalise=True), RowExperts(
        experts, gates_of(experts)[-1 if hasattr(experts, "limit") else 0]
    )


def rows(count, dtype=torch.float32):
    return torch.randn(count, 48, generator=torch.Generator().manual_seed(1)).to(dtype)


def mixed(router, experts, x):
    _, shares, chosen = router(x)
    return experts(x, chosen, shares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_the_same_alone_and_among_others(family, dtype, tmp_path):
    router, experts = swapped(*block(family, tmp_path, dtype))
    x, threads = rows(90, dtype), torch.get_num_threads()
    with torch.no_grad():
        full = mixed(router, experts, x)
        for count in (1, 3):
            torch.set_num_threads(count)
            for part in (slice(0, 1), slice(7, 8), slice(2, 19), slice(40, 90)):
                assert torch.equal(mixed(router, experts, x[part]), full[part])
        torch.set_num_threads(threads)
        one_expert = x[:1].repeat(33, 1)  # all load on the same two
        assert torch.equal(mixed(router, experts, one_expert), full[:1].expand(33, -1))
    assert torch.equal(mixed(router, experts, x), full)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_the_librarys(family, tmp_path):
    theirs, ours = block(family, tmp_path / "a", torch.float64), swapped(*block(family, tmp_path / "b", torch.float32))
    exact, x = rows(5).double().requires_grad_(), rows(5).requires_grad_()
    expected, found = mixed(*theirs, exact), mixed(*ours, x)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)
    slope = torch.randn(5, 48, generator=torch.Generator().manual_seed(2))
    expected.backward(slope.double())
    found.backward(slope)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
    for their, our in zip(theirs, ours, strict=True):
        for name, parameter in our.named_parameters():
            torch.testing.assert_close(parameter.grad.double(), their.get_parameter(name).grad, rtol=1e-4, atol=1e-5)
    _, _, chosen = ours[0](x)
    idle = sorted(set(range(6)) - set(chosen.flatten().tolist()))
    assert idle and not ours[1].gate_up_proj.grad[idle].any()


def test_two_backward_passes_add_up(tmp_path):
    router, experts = swapped(*block("gpt_oss", tmp_path, torch.float32))
    mixed(router, experts, rows(5)).sum().backward()
    once = experts.down_proj.grad.clone()
    mixed(router, experts, rows(5)).sum().backward()
    torch.testing.assert_close(experts.down_proj.grad, 2 * once)


def test_refresh_packs_changed_experts(tmp_path):
    router, experts = swapped(*block("mixtral", tmp_path, torch.float32))
    before = mixed(router, experts, rows(9))
    with torch.no_grad():
        experts.down_proj.mul_(2.0)
        experts.refresh()
        assert torch.equal(mixed(router, experts, rows(9)), 2.0 * before)


@pytest.mark.parametrize("family", FAMILIES)
def test_many_experts_in_bfloat16_are_recognised_in_every_layer(family, tmp_path):
    """Logits that the library rounds to bfloat16 are often equal where the experts are many: such a row has others in
    ours."""
    many = {"num_experts_per_tok": 8, "num_experts": 128, "num_local_experts": 128}
    model = load(tiny_model(family, tmp_path, **many), dtype="bfloat16")
    kinds = [type(module) for module in model.module.modules()]
    assert kinds.count(RowRouter) == kinds.count(RowExperts) == 2
