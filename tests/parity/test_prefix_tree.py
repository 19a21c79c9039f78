"""Law 3 where it is cheapest to break: rollouts of groups under one header, trained as a tree of prefixes."""

import asyncio

import pytest
import torch
from suite import short_of

from sparring.batch.packing import pack
from sparring.batch.tensors import micro_batch
from sparring.engine.config import BatchConfig, EngineConfig
from sparring.engine.native import NativeEngine
from sparring.generation import GenerateRequest, Sampling
from sparring.model.attention import Packed
from sparring.model.head import token_quantities
from sparring.model.load import load
from sparring.testing.tiny_models import VOCABULARY, tiny_model
from sparring.types import Sample

pytestmark = pytest.mark.usefixtures("kernel_path")

FAMILIES = ("qwen3", "mistral", "phi3", "gemma2", "mixtral", "gpt_oss")

HEADER = tuple(3 * i % VOCABULARY for i in range(37))


def sampled(model):
    """A row for each of five rollouts of three prompts under one header, and what the engine says it sampled with."""
    prompts = [HEADER + tuple((7 * group + i) % VOCABULARY for i in range(5 + 9 * group)) for group in range(3)]
    requests = [
        GenerateRequest(
            id=f"{group}-{i}",
            tokens=prompt,
            sampling=Sampling(max_tokens=3 + 8 * i, seed=10 * group + i, temperature=0.9),
        )
        for group, prompt in enumerate(prompts)
        for i in range(5)
    ]

    async def serve():
        engine = NativeEngine(model, EngineConfig(batch=BatchConfig(max_running=7, max_tokens=48)), threads=1)
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.close()
        return answers

    return [
        Sample(
            id=request.id,
            group=request.id[0],
            source="policy",
            tokens=(*request.tokens, *answer.tokens),
            weights={"policy": (0.0,) * len(request.tokens) + (1.0,) * len(answer.tokens)},
            logprobs=(0.0,) * len(request.tokens) + tuple(answer.logprobs),
            temperature=request.sampling.temperature,
        )
        for request, answer in zip(requests, asyncio.run(serve()), strict=True)
    ]


@pytest.mark.parametrize(
    ("family", "dtype"),
    short_of(
        [(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")],
        [("qwen3", "float32"), ("qwen3", "bfloat16"), ("gemma2", "float32"), ("gpt_oss", "bfloat16")],
    ),
)
def test_engine_equals_the_training_forward_of_the_tree(family, dtype, tmp_path):
    path = tiny_model(family, tmp_path / family, seed=3)
    rows = sampled(load(path, dtype=dtype))
    for checkpointing in (False, True):
        trainer = load(path, dtype=dtype, gradient_checkpointing=checkpointing)
        for budget in (100, 10_000):
            for part in pack(rows, budget):
                micro = micro_batch(part, {"policy": 1.0})
                assert len(micro.tokens) <= budget and (len(part) == 1 or micro.shared.max() >= len(HEADER))
                hidden = trainer.hidden(micro.tokens, micro.positions, Packed(micro.cu_seqlens, micro.shared))
                chosen = hidden.index_select(0, micro.predicting)
                found = token_quantities(trainer, chosen, micro.targets, micro.temperature, {"logprob"})["logprob"]
                found.sum().backward()
                assert torch.equal(found.detach(), micro.behaviour_logprobs)
