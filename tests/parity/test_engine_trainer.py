"""Law 3: the log-probability that the engine samples with is, to the bit, the one of the packed training forward."""

import asyncio
import itertools

import pytest
import torch

from sparring.engine.config import BatchConfig, EngineConfig
from sparring.engine.native import NativeEngine
from sparring.generation import GenerateRequest, Sampling
from sparring.model.attention import Packed
from sparring.model.head import token_quantities
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.usefixtures("kernel_path")

MODELS = [("qwen3", False), ("qwen3", True), ("llama", False), ("qwen2", True), ("mistral", False)]
PACKINGS = [[[0], [1], [2], [3], [4], [5], [6]], [[0, 1, 2, 3, 4, 5, 6]], [[6, 2], [5, 0, 4], [3, 1]]]


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: f"{m[0]}-{'tied' if m[1] else 'untied'}")
def path(request, tmp_path_factory):
    family, tied = request.param
    return tiny_model(family, tmp_path_factory.mktemp("model") / family, tied=tied, seed=3)


def requests():
    lengths = [3, 16, 17, 40, 1, 33, 9]
    return [
        GenerateRequest(
            id=str(i),
            tokens=tuple((7 * i + 3 * j) % VOCABULARY for j in range(length)),
            sampling=Sampling(max_tokens=5 + 6 * i, seed=i, temperature=(1.0, 0.7)[i % 2]),
        )
        for i, length in enumerate(lengths)
    ]


def sampled(model):
    """(prompt, tokens, log-probabilities, temperature) of each request, served together."""

    async def serve():
        engine = NativeEngine(model, EngineConfig(batch=BatchConfig(max_running=5, max_tokens=24)), threads=1)
        answers = await asyncio.gather(*(engine.generate(request) for request in requests()))
        await engine.close()
        return answers

    answers = asyncio.run(serve())
    return [(r.tokens, a.tokens, a.logprobs, r.sampling.temperature) for r, a in zip(requests(), answers, strict=True)]


def trained(model, rows):
    """Log-probabilities of the answers in one packed forward with gradients on; the backward pass runs too."""
    tokens = torch.tensor([t for prompt, answer, _, _ in rows for t in (*prompt, *answer)])
    lengths = [len(prompt) + len(answer) for prompt, answer, _, _ in rows]
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = itertools.accumulate([0, *lengths[:-1]])
    predicting = torch.cat(
        [torch.arange(len(a)) + s + len(p) - 1 for s, (p, a, _, _) in zip(starts, rows, strict=True)]
    )
    heat = torch.cat([torch.full((len(answer),), temperature) for _, answer, _, temperature in rows])
    hidden = model.hidden(tokens, positions, Packed.of(lengths))
    logprobs = token_quantities(model, hidden[predicting], tokens[predicting + 1], heat, {"logprob"})["logprob"]
    logprobs.sum().backward()
    return logprobs.detach().split([len(answer) for _, answer, _, _ in rows])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_equals_packed_training_forward(path, dtype):
    rows = sampled(load(path, dtype=dtype))
    for checkpointing in (False, True):
        trainer = load(path, dtype=dtype, gradient_checkpointing=checkpointing)
        for packing in PACKINGS:
            for group in packing:
                found = trained(trainer, [rows[i] for i in group])
                for i, logprobs in zip(group, found, strict=True):
                    assert logprobs.tolist() == list(rows[i][2])


def test_one_unit_in_the_last_place_shows(path):
    """Of the weights of one value; a single one may be lost in a sum."""
    rows = sampled(load(path))
    trainer = load(path)
    with torch.no_grad():
        weight = trainer.state()["model.layers.0.self_attn.v_proj.weight"]
        weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))
    trainer.refresh()
    found = trained(trainer, rows)
    assert any(logprobs.tolist() != list(row[2]) for logprobs, row in zip(found, rows, strict=True))
