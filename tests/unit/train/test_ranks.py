"""A batch shared over simulated ranks: their gradients add up to those of one."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.imitate import ImitateLoss
from sparring.algo.loss.policy import PolicyLoss
from sparring.batch.denominators import denominators
from sparring.batch.packing import pack, share
from sparring.batch.tensors import micro_batch
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Batch, Sample

BUDGET, VOCABULARY = 48, 48


@pytest.fixture(scope="module")
def batch():
    """Two terms; groups under one header, of rows that end at different places, and single rows."""
    draw = random.Random(3)
    header = draw.choices(range(VOCABULARY), k=6)
    prompts = [[*header, *draw.choices(range(VOCABULARY), k=4 + 3 * group)] for group in range(4)]
    heads = [prompts[i % 4] if i < 14 else draw.choices(range(VOCABULARY), k=3) for i in range(18)]
    rows = [
        _row(draw, str(i), tuple(head), draw.randint(2, 30), "policy" if i % 3 else "imitate")
        for i, head in enumerate(heads)
    ]
    return Batch(step=1, model="policy", rows=tuple(rows), denominators=denominators(rows))


def _row(draw, name, prompt, length, term):
    tokens = (*prompt, *draw.choices(range(VOCABULARY), k=length))
    marks = (*(0.0 for _ in prompt), *(draw.choice((0.5, 1.0)) for _ in range(length)))
    row = Sample(id=name, group="g", source="policy", tokens=tokens, weights={term: marks})
    if term != "policy":
        return row
    advantage = draw.uniform(-1, 1)
    recorded = tuple(draw.uniform(-4.2, -3.5) if mark else 0.0 for mark in marks)
    versions = tuple(0 if mark else -1 for mark in marks)
    return replace(
        row,
        logprobs=recorded,
        advantages=tuple(advantage * bool(m) for m in marks),
        versions=versions,
        kv_versions=versions,
    )


def over_ranks(rows, ranks):
    """For each rank its micro-batches, equally many."""
    found = list(zip(*(share(part, ranks) for part in pack(rows, ranks * BUDGET)), strict=True))
    assert len(found) == ranks and all(any(parts) for parts in found)
    return found


def trained(model, batch, parts):
    """The gradients that the trainer adds up over `parts`, each a call of its own."""
    trainer = LocalTrainer(
        model,
        TrainConfig(token_budget=10_000),
        [PolicyLoss(AlgoConfig()), ImitateLoss()],
        name="policy",
        total_steps=1,
        threads=1,
    )

    async def work():
        for part in parts:
            await trainer.forward_backward(replace(batch, rows=tuple(part)))
        await trainer.close()

    asyncio.run(work())
    return {name: parameter.grad.double() for name, parameter in model.module.named_parameters()}


def distance(found, expected):
    """Between two sets of gradients, relative to the second."""
    norms = [
        sum(((a[name] - b[name]) ** 2).sum() for name in b)
        for a, b in ((found, expected), (expected, dict.fromkeys(expected, 0)))
    ]
    return float((norms[0] / norms[1]).sqrt())


def test_gradients_of_ranks_add_up_in_float32(make_model, batch):
    whole = trained(make_model(), batch, [batch.rows])
    for ranks in (1, 2, 4):
        each = [trained(make_model(), batch, parts) for parts in over_ranks(batch.rows, ranks)]
        found = {name: sum(gradients[name] for gradients in each) for name in whole}
        assert distance(found, whole) < 1e-5
        assert ranks == 1 or distance(each[0], whole) > 0.1


def in_double(module, batch, parts):
    """Gradients from the library's own forward in float64, row by row, through our micro-batches and losses."""
    module.zero_grad()
    losses = {loss.term: loss for loss in (PolicyLoss(AlgoConfig()), ImitateLoss())}
    for part in parts:
        micro = micro_batch(part, batch.denominators)
        found = []
        for row in part:
            logits = module(torch.tensor([row.tokens])).logits[0].double()
            trained = [t for t in range(1, len(row.tokens)) if any(weights[t] for weights in row.weights.values())]
            found.append(torch.log_softmax(logits[[t - 1 for t in trained]], 1))
        logs = torch.cat(found) if found else torch.zeros(0, VOCABULARY, dtype=torch.float64)
        logprob = logs.gather(1, micro.targets.unsqueeze(1))[:, 0]
        quantities = {"logprob": logprob, "entropy": -(logs.exp() * logs).sum(1)}
        if len(logprob):
            sum(losses[term](quantities, micro).loss for term in micro.weights).backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def test_gradients_of_ranks_add_up_in_float64(model_path, batch):
    module = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    whole = in_double(module, batch, [batch.rows])
    for ranks in (2, 4):
        each = [in_double(module, batch, parts) for parts in over_ranks(batch.rows, ranks)]
        assert distance({name: sum(gradients[name] for gradients in each) for name in whole}, whole) < 1e-9
