"""Steps of the optimiser against AdamW as torch writes it without fusing, whatever the layout of gradients."""

import asyncio

import pytest
import torch
from common.tiny_adapters import tiny_adapter
from torch import nn

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.policy import PolicyLoss
from sparring.model.load import load
from sparring.testing.tiny_models import FEATURES, tiny_model
from sparring.train.config import TrainConfig
from sparring.train.optimiser import Optimiser
from sparring.train.trainer import LocalTrainer

CONFIG = TrainConfig(learning_rate=1e-2, weight_decay=0.1, token_budget=60)
RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h")
STACKED = ("mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v3", "deepseek_v2", "gpt_oss", "mimo_v2_flash")
SHORT = ("qwen3", "gpt2", "qwen3_moe")
FAMILIES = ["llama", "qwen2", "olmo2", "starcoder2", "nemotron", "gemma4", *FEATURES]


def plain_step(masters, gradients, moments=None, step=0):
    """AdamW of arXiv 1711.05101, algorithm 2, in float64; (weights, first and second moments) after it."""
    after, kept = {}, {}
    for name, weight in masters.items():
        if (gradient := gradients[name]) is None:
            after[name] = weight.double()
            continue
        first, second = (0.0, 0.0) if moments is None else moments[name]
        first = CONFIG.beta1 * first + (1 - CONFIG.beta1) * gradient.double()
        second = CONFIG.beta2 * second + (1 - CONFIG.beta2) * gradient.double() ** 2
        decay = CONFIG.weight_decay if weight.ndim >= 2 else 0.0
        rate = first / (1 - CONFIG.beta1 ** (step + 1)) / ((second / (1 - CONFIG.beta2 ** (step + 1))).sqrt() + 1e-8)
        after[name] = (1 - CONFIG.learning_rate * decay) * weight.double() - CONFIG.learning_rate * rate
        kept[name] = first, second
    return after, kept


def layouts(shape, draw, dtype):
    """The same numbers [n, m] as autograd may return them: whole, every second column, a transpose, a piece of a joined
    product, a row that is repeated without being copied."""
    values = (0.01 * torch.randn(shape, generator=draw)).to(dtype)
    spaced = values.new_zeros(shape[0], 2 * shape[1])[:, ::2]
    piece = values.new_zeros(3 * shape[0], shape[1] + 5)[shape[0] : 2 * shape[0], 5:]
    turned = values.t().contiguous().t()
    repeated = values[:1].expand(shape)
    return {
        "whole": values,
        "spaced": spaced.copy_(values),
        "piece": piece.copy_(values),
        "turned": turned,
        "repeated": repeated,
    }


@pytest.mark.parametrize("layout", ["whole", "spaced", "piece", "turned", "repeated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("parameter_layout", ["whole", "turned", "piece"])
def test_a_step_reads_gradients_and_weights_in_any_layout(layout, dtype, parameter_layout):
    """Three micro-batches a step, two steps, so that sums and moments take part, too."""
    draw = torch.Generator().manual_seed(3)
    weight = nn.Parameter(layouts((6, 70), draw, dtype)[parameter_layout])
    before = weight.detach().float().contiguous().clone()
    optimiser, moments, expected = Optimiser({"w": weight}, CONFIG), None, {"w": before}
    for step in range(2):
        given = [layouts((6, 70), draw, dtype)[layout] for _ in range(3)]
        total = sum(gradient.double() for gradient in given)
        for gradient in given:
            optimiser.add([gradient])
        assert optimiser.step(CONFIG.learning_rate) == pytest.approx(total.norm().item(), rel=1e-5)
        expected, moments = plain_step(expected, {"w": total}, moments, step)
        torch.testing.assert_close(optimiser.masters()["w"].double(), expected["w"], rtol=0, atol=1e-5)
    master = optimiser.masters()["w"]
    assert (master.data_ptr() == weight.data_ptr()) == (dtype == torch.float32 and parameter_layout == "whole")
    assert master.is_contiguous()
    optimiser.write_back()
    assert torch.equal(weight, master.to(dtype))


def test_one_tensor_may_be_the_gradient_of_two_parameters():
    one, other = (nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    gradients = torch.autograd.grad((one + other).exp().sum() * 2.0, [one, other])
    optimiser = Optimiser({"one": one, "other": other}, TrainConfig(learning_rate=1e-2, gradient_clip=0.0))
    assert gradients[0].data_ptr() == gradients[1].data_ptr(), "else it shows nothing"
    optimiser.add(gradients)
    optimiser.add([gradient.clone() for gradient in gradients])
    assert optimiser.step(1e-2) == pytest.approx((12 * 4.0**2) ** 0.5)


def families():
    """The ones that differ most in the short suite: a joined decoder, Conv1D, experts. Of the others each form
    has one dtype."""
    for place, family in enumerate(FAMILIES):
        for at, form in enumerate(("whole", "adapter")):
            dtype = "float32" if family in SHORT else ("float32", "bfloat16")[(place + at) % 2]
            slow = () if family in SHORT else (pytest.mark.slow,)
            yield pytest.param(family, form, dtype, marks=slow, id=f"{family} {form} {dtype}")


@pytest.mark.usefixtures("kernel_path")
@pytest.mark.kernel_paths(portable=False)
@pytest.mark.parametrize(("family", "form", "dtype"), list(families()))
def test_a_step_of_every_family_equals_plain_adamw(family, form, dtype, make_batch, tmp_path):
    """Our gradients of two micro-batches, stepped by AdamW as it is written; half the signs were wrong once."""
    folder = tiny_model(family, tmp_path / "base", seed=1)
    if form == "adapter":
        stacks = ("experts.gate_up_proj", "experts.down_proj") if family in STACKED else ()
        folder = tiny_adapter(folder, tmp_path / "adapter", seed=1, target_parameters=stacks)
    model = load(folder, dtype=dtype, numerics="fast" if family in RECURRENT else "exact")
    trainer = LocalTrainer(model, CONFIG, [PolicyLoss(AlgoConfig())], name="policy", total_steps=3, threads=1)

    async def step():
        metrics = await trainer.forward_backward(make_batch(rows=5))
        assert metrics["micro_batches"] >= 2
        optimiser = trainer._optimiser
        masters = {name: master.clone() for name, master in optimiser.masters().items()}
        gradients = {
            name: None if master.grad is None else master.grad.clone(memory_format=torch.contiguous_format)
            for name, master in optimiser._masters.items()
        }
        result = await trainer.step()
        await trainer.close()
        return masters, gradients, result.metrics["grad_norm"], optimiser.masters()

    masters, gradients, norm, after = asyncio.run(step())
    shrunk = min(1.0, CONFIG.gradient_clip / norm)
    scaled = {name: None if gradient is None else gradient * shrunk for name, gradient in gradients.items()}
    expected, _ = plain_step(masters, scaled)
    assert any(not torch.equal(weight, masters[name]) for name, weight in after.items())
    for name, weight in after.items():
        torch.testing.assert_close(weight.double(), expected[name], rtol=0, atol=2e-5, msg=name)
