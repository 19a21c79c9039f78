"""Scalar heads: one number a row, the library's values and gradients, the same bits in any company."""

import pytest
import torch
from refusals import refused_at
from transformers import AutoModelForSequenceClassification

from sparring.errors import BadInput
from sparring.model.attention import Packed
from sparring.model.load import load
from sparring.model.save import save
from sparring.testing.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.usefixtures("kernel_path")

LENGTHS = [9, 1, 40, 17]


@pytest.fixture(scope="module", params=["qwen3", "mistral", "gemma2", "mixtral"])
def folder(request, tmp_path_factory):
    """A classifier with one label and random weights, written by us."""
    source = tiny_model(request.param, tmp_path_factory.mktemp("model") / "source", seed=2)
    model = load(source, head="new scalar")
    with torch.no_grad():
        model.state()["score.weight"].normal_(0.0, 0.2, generator=torch.Generator().manual_seed(1))
    return save(model.state(), source, source.parent / "scalar")


def rows():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def values(model, sequences):
    positions = torch.cat([torch.arange(len(row)) for row in sequences])
    return model.values(model.hidden(torch.cat(sequences), positions, Packed.of([len(row) for row in sequences])))


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_values_and_gradients_are_the_librarys(folder, numerics):
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float64, **implementations
    )
    model = load(folder, head="scalar", numerics=numerics)
    expected = torch.cat([theirs.score(theirs.model(input_ids=row[None]).last_hidden_state)[0, :, 0] for row in rows()])
    found = values(model, rows())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    expected.square().sum().backward()
    found.square().sum().backward()
    for name, parameter in theirs.named_parameters():
        ours = model.module.get_parameter(name).grad
        torch.testing.assert_close(
            ours.double(), parameter.grad, rtol=1e-3, atol=1e-4 * float(parameter.grad.abs().max())
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_its_bits_alone_and_among_others(folder, dtype):
    model = load(folder, head="scalar", dtype=dtype)
    for row, found in zip(rows(), values(model, rows()).split(LENGTHS), strict=True):
        assert torch.equal(values(model, [row]), found)


def test_a_new_head_begins_at_zero_and_needs_to_be_asked_for(tmp_path):
    path = tiny_model("llama", tmp_path)
    model = load(path, head="new scalar")
    assert not values(model, rows()).any()
    with refused_at(f"{path / 'config.json'}", "a checkpoint with a scalar head"):
        load(path, head="scalar")
    with refused_at("head", "'vector'"):
        load(path, head="vector")


def test_logits_need_a_token_head_and_values_a_scalar_head(tmp_path):
    path = tiny_model("llama", tmp_path)
    hidden = torch.zeros(1, 48)
    with pytest.raises(BadInput, match="expected a head over tokens"):
        load(path, head="new scalar").logits(hidden)
    with pytest.raises(BadInput, match="expected a scalar head"):
        load(path).values(hidden)
