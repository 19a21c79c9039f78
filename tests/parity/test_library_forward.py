"""Our forward and backward pass against the untouched library in float64."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparring.model.attention import Packed
from sparring.model.head import token_quantities
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.usefixtures("kernel_path")

FAMILIES = [("qwen3", False), ("qwen3", True), ("llama", False), ("qwen2", True), ("mistral", False)]
OTHERS = [
    ("phi3", False),
    ("olmo2", False),
    ("glm4", False),
    ("gemma2", True),
    ("gemma3_text", True),
    ("mixtral", False),
    ("qwen3_moe", False),
    ("gpt_oss", False),
]
SHORT = [("qwen3", True), ("qwen2", True), ("glm4", False), ("gemma2", True), ("gpt_oss", False)]
LENGTHS = [9, 1, 30, 17]


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each in SHORT else pytest.mark.full) for each in FAMILIES + OTHERS],
    ids=lambda m: f"{m[0]}-{'tied' if m[1] else 'untied'}",
)
def path(request, tmp_path_factory):
    family, tied = request.param
    return tiny_model(family, tmp_path_factory.mktemp("model") / family, tied=tied, seed=11)


def rows():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def library(path):
    """Sum of log-probabilities, entropies and gradients by the library itself, row by row, in float64."""
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **implementations)
    logprobs, entropies = [], []
    for row in rows():
        table = module(input_ids=row[None]).logits[0, :-1].log_softmax(-1)
        logprobs.append(table.gather(1, row[1:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    torch.cat(logprobs).sum().backward()
    return torch.cat(logprobs), torch.cat(entropies), {name: p.grad for name, p in module.named_parameters()}


def ours(path, **settings):
    model = load(path, **settings)
    tokens = torch.cat(rows())
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    inside = torch.cat([torch.arange(length) < length - 1 for length in LENGTHS])
    hidden = model.hidden(tokens, positions, Packed.of(LENGTHS))[inside]
    targets = tokens.roll(-1)[inside]
    found = token_quantities(model, hidden, targets, torch.ones(len(targets)), {"logprob", "entropy"})
    found["logprob"].sum().backward()
    return found["logprob"], found["entropy"], {name: p.grad for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"numerics": "fast"}], ids=str)
def test_values_and_gradients_are_the_librarys(path, settings):
    expected, found = library(path), ours(path, **settings)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-4, atol=1e-5)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in found[2].items():
        torch.testing.assert_close(
            gradient.double(), expected[2][name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_bfloat16_is_close(path):
    expected, found = library(path), ours(path, dtype="bfloat16")
    assert (found[0].double() - expected[0]).abs().mean() < 0.1
