"""Hidden states of the wanted rows alone: the bits of all rows, the same gradients within rounding."""

import pytest
import torch

from sparring.model.attention import Packed
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.usefixtures("kernel_path")

LENGTHS = [9, 40, 1, 17]
WANTED = torch.tensor([3, 8, 8, 30, 9, 66, 49, 3])


def hidden_and_gradients(model, rows):
    """The wanted rows, asked for or taken out of all, and the gradient of every parameter."""
    tokens = torch.arange(sum(LENGTHS)) * 7 % VOCABULARY
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    found = model.hidden(tokens, positions, Packed.of(LENGTHS), rows)
    found = found.index_select(0, WANTED) if rows is None else found
    slopes = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found.dtype)
    parameters = [p for name, p in model.module.named_parameters() if "lm_head" not in name]
    return found, torch.autograd.grad(found, parameters, slopes)


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), ("qwen2", "float32"), ("phi3", "float32")]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_wanted_rows_have_the_bits_of_all_rows(family, dtype, checkpointing, tmp_path):
    model = load(tiny_model(family, tmp_path / family), dtype=dtype, gradient_checkpointing=checkpointing)
    (every, of_every), (few, of_few) = (hidden_and_gradients(model, rows) for rows in (None, WANTED))
    assert torch.equal(every, few)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for a, b in zip(of_every, of_few, strict=True):
        assert float((a - b).abs().max()) <= tolerance * float(a.abs().max())
