"""A critic through the trainer: which state each value is of, and that it learns what was earned from there on."""

import random
from dataclasses import replace

import pytest
import torch
from training import run

from sparring.algo.annotate.trainer_quantity import TrainerQuantity
from sparring.algo.loss.value import ValueLoss
from sparring.batch.critic import value_rows
from sparring.batch.denominators import denominators
from sparring.model.attention import Packed
from sparring.model.load import load
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Batch

DIGIT = 7


def critic(model_path, *, random_head=False, clip=0.0):
    model = load(model_path, head="new scalar")
    if random_head:
        with torch.no_grad():
            model.module.score.weight.normal_(generator=torch.Generator().manual_seed(3))
        model.refresh()
    config = TrainConfig(learning_rate=1e-2, token_budget=64)
    return model, LocalTrainer(model, config, [ValueLoss(clip=clip)], name="critic", total_steps=40, threads=1)


def of_prefix(model, tokens):
    """The value of a text, by a forward of that text alone."""
    where = Packed(torch.tensor([0, len(tokens)], dtype=torch.int32))
    with torch.no_grad():
        return model.values(model.hidden(torch.tensor(tokens), torch.arange(len(tokens)), where))[-1].item()


def test_the_value_at_a_token_is_that_of_the_text_before_it(model_path, make_batch):
    """Of every sampled token, over turns with a tool's answer between; what is not sampled has none."""
    model, trainer = critic(model_path, random_head=True)
    rows = make_batch(rows=5).rows

    found = run(trainer, lambda t: TrainerQuantity(t.forward, "value", "value").annotate(rows))
    for row in found:
        for at, (weight, said) in enumerate(zip(row.weights["policy"], row.annotations["value"], strict=True)):
            assert said == (of_prefix(model, row.tokens[:at]) if weight else 0.0)
    assert len({said for row in found for said in row.annotations["value"]}) > 20


def test_at_equal_weights_nothing_is_clipped(model_path, make_batch):
    """What was said before the update has the bits that training finds; after one step it has not."""
    _, trainer = critic(model_path, random_head=True, clip=1e-9)

    async def trained(trainer):
        rows = await TrainerQuantity(trainer.forward, "value", "value").annotate(make_batch(rows=12).rows)
        rows = value_rows([replace(row, annotations={**row.annotations, "return": row.advantages}) for row in rows])
        batch = Batch(step=1, model="critic", rows=tuple(rows), denominators=denominators(rows), publish=False)
        found = []
        for _ in range(2):
            found.append((await trainer.forward_backward(batch))["clip_fraction"])
            await trainer.step(ends_update=False)
        return found

    before, after = run(trainer, trained)
    assert before == 0.0 and after > 0.5


def test_the_critic_learns_the_reward_to_go(model_path, make_batch):
    """A token pays by what was sampled just before it: the state knows, the token itself does not."""
    _, trainer = critic(model_path)
    draw, rows = random.Random(4), []
    for row in make_batch(rows=40).rows:
        tokens = tuple(draw.choice((DIGIT, 11, 23)) for _ in row.tokens)
        earned = tuple(float(at and tokens[at - 1] == DIGIT) for at in range(len(tokens)))
        known = {"value": (0.0,) * len(tokens), "return": earned}
        rows += value_rows([replace(row, tokens=tokens, annotations=known)])
    batch = Batch(step=1, model="critic", rows=tuple(rows), denominators=denominators(rows), publish=False)

    async def trained(trainer):
        losses = []
        for _ in range(15):
            losses.append((await trainer.forward_backward(batch))["loss_value"])
            await trainer.step(ends_update=False)
        return losses, trainer.version

    losses, version = run(trainer, trained)
    tokens = [
        earned
        for row in rows
        for earned, weight in zip(row.annotations["return"], row.weights["value"], strict=True)
        if weight
    ]
    assert losses[0] == pytest.approx(0.5 * sum(tokens) / len(tokens)), "a new head says 0 of everything"
    assert losses[-1] < 0.2 * losses[0]
    assert version == 0, "updates are counted on the policy"


def test_every_sampled_token_trains_the_critic_whatever_its_advantage(make_batch):
    rows = [
        replace(row, annotations={"value": row.advantages, "return": row.advantages}) for row in make_batch(rows=3).rows
    ]
    idle = replace(
        rows[0],
        advantages=(0.0,) * len(rows[0].tokens),
        weights={"policy": tuple(w / 8 for w in rows[0].weights["policy"])},
    )
    silent = replace(rows[1], weights={"policy": (0.0,) * len(rows[1].tokens)})
    first, last = value_rows([idle, silent, rows[2]])
    assert first.weights == {"value": rows[0].weights["policy"]} and last.id == rows[2].id
    assert first.advantages is None and first.logprobs is None
