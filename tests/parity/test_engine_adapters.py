"""Law 3 with adapters: what the engine samples under one of several has, to the bit, the log-probability of the
trainer's forward."""

import asyncio
import itertools
from dataclasses import replace

import pytest
import torch
from common.tiny_adapters import tiny_adapter
from suite import short_of
from tables import with_settings

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.generation import GenerateRequest, Sampling
from sparring.kernels.compiled.library import COMPILED
from sparring.model.attention import Packed
from sparring.model.head import token_quantities
from sparring.model.load import load
from sparring.model.peft import read
from sparring.testing.tiny_models import VOCABULARY, tiny_model
from sparring.weights.inline import publish

# in plain torch these take minutes
pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths("best", *COMPILED, portable=False)]

NAMES = ("a", "b", "c", "d")
ATTENTION, EXPERTS = ("q_proj", "v_proj"), ("experts.gate_up_proj", "experts.down_proj")
TARGETS = {
    "qwen3": {
        "a": ("all-linear", ()),
        "b": (ATTENTION, ()),
        "c": (("down_proj", "o_proj", "k_proj"), ()),
        "d": (("gate_proj",), ()),
    },
    "qwen3_moe": {
        "a": ("all-linear", EXPERTS),
        "b": (ATTENTION, ()),
        "c": ((), EXPERTS[1:]),
        "d": (("k_proj",), EXPERTS[:1]),
    },
}
"""Of each model, what linear layers and what experts an adapter has factors for."""
EVERYONE = (*NAMES, None)
PROMPTS = 128


@pytest.fixture(scope="module", params=TARGETS)
def folders(request, tmp_path_factory):
    """A base and four adapters of other ranks and for other layers."""
    folder = tmp_path_factory.mktemp("adapters")
    base = tiny_model(request.param, folder / "base", tied=True, seed=3)
    made = {}
    for seed, (name, (modules, stacks)) in enumerate(TARGETS[request.param].items()):
        settings = {"seed": seed, "rank": seed + 3, "target_modules": modules, "target_parameters": stacks}
        made[name] = tiny_adapter(base, folder / name, **settings)
    return {None: base, **made}


def requests():
    """Under every adapter and none; some begin alike, some with pages that are full and others found."""
    shared = tuple((11 * j) % VOCABULARY for j in range(35))
    for i in range(PROMPTS):
        own = tuple((7 * i + 3 * j) % VOCABULARY for j in range(1 + 13 * i % 40))
        yield GenerateRequest(
            id=str(i),
            tokens=(*shared, *own) if i % 3 == 0 else own,
            sampling=Sampling(max_tokens=6 + 3 * (i % 17), seed=i, temperature=(1.0, 0.7)[i % 2]),
            adapter=EVERYONE[i % len(EVERYONE)],
        )


def served(folders, asked, dtype="float32", **settings):
    async def serve():
        config = with_settings(EngineConfig(), **{"max_running": 32, "max_tokens": 64, **settings})
        engine = NativeEngine(load(folders[None], dtype=dtype), config, threads=1)
        for name in NAMES:
            await engine.pull(publish("policy", 1, read(folders[name]), adapter=name))
        try:
            return await asyncio.gather(*(engine.generate(request) for request in asked)), engine.metrics
        finally:
            await engine.close()

    return asyncio.run(serve())


def trained(model, rows):
    """Log-probabilities of the answers in one packed forward with gradients on; the backward pass runs too."""
    for parameter in model.adapters.everywhere.parameters().values() if model.adapters.everywhere else ():
        parameter.requires_grad_(True)
    tokens = torch.tensor([t for request, answer in rows for t in (*request.tokens, *answer.tokens)])
    lengths = [len(request.tokens) + len(answer.tokens) for request, answer in rows]
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = itertools.accumulate([0, *lengths[:-1]])
    predicting = [torch.arange(len(a.tokens)) + s + len(r.tokens) - 1 for s, (r, a) in zip(starts, rows, strict=True)]
    heat = torch.cat([torch.full((len(answer.tokens),), request.sampling.temperature) for request, answer in rows])
    at = torch.cat(predicting)
    hidden = model.hidden(tokens, positions, Packed.of(lengths), at)
    logprobs = token_quantities(model, hidden, tokens[at + 1], heat, {"logprob"})["logprob"]
    logprobs.sum().backward()
    return logprobs.detach().split([len(answer.tokens) for _, answer in rows])


@pytest.mark.parametrize("dtype", short_of(["float32", "bfloat16"], ["bfloat16"]))
def test_every_adapter_of_a_crowd_equals_its_trainer(folders, dtype):
    asked = list(requests())
    answers, metrics = served(folders, asked, dtype)
    assert metrics["cached_tokens"] > 0
    for name in EVERYONE:
        rows = [(r, a) for r, a in zip(asked, answers, strict=True) if r.adapter == name]
        for checkpointing in (False, True):
            model = load(folders[name], dtype=dtype, gradient_checkpointing=checkpointing)
            for (_, answer), found in zip(rows, trained(model, rows), strict=True):
                assert found.tolist() == list(answer.logprobs)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_in_a_crowd_is_as_alone(folders, dtype):
    asked = list(requests())
    alone = [served(folders, [request], dtype, max_tokens=2048)[0][0] for request in asked[::9]]
    for settings in (
        {},
        {"max_running": 7, "max_tokens": 8},
        {"share_prefixes": False},
        {"kv_tokens": 192, "max_running": 8},
    ):
        answers, metrics = served(folders, asked, dtype, **settings)
        assert [(a.tokens, a.logprobs) for a in answers[::9]] == [(a.tokens, a.logprobs) for a in alone]
        assert metrics["preemptions"] > 0 or "kv_tokens" not in settings


def test_adapters_give_different_log_probabilities(folders):
    """The control: the same prompt and seed under each."""
    request = next(requests())
    answers, _ = served(folders, [replace(request, adapter=name) for name in EVERYONE])
    assert len({answer.logprobs for answer in answers}) == len(EVERYONE)
    assert [answer.versions.values for answer in answers] == [(1,)] * len(NAMES) + [(0,)]
