"""An implicit process reward model through the trainer: told which rollouts were right, it knows which tokens are to
blame."""

import random
from dataclasses import replace
from statistics import mean

import pytest
from training import run

from sparring.algo.annotate.trainer_quantity import TrainerQuantity
from sparring.algo.loss.implicit import ImplicitReward
from sparring.batch.denominators import denominators
from sparring.batch.implicit import implicit_rows
from sparring.model.load import load
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Batch

GOOD, BAD, NEITHER = 7, 23, 11


def spoken(make_batch):
    """Rollouts of tokens that matter and others that do not; a right one says the good token, a wrong one the bad
    one."""
    draw, rows = random.Random(4), []
    for number, row in enumerate(make_batch(rows=48).rows):
        told = GOOD if number % 2 else BAD
        ours = [bool(weight) for weight in row.weights["policy"]]
        tokens = tuple(
            draw.choice((told, NEITHER)) if mine else token for mine, token in zip(ours, row.tokens, strict=True)
        )
        right = tuple(float(number % 2) if mine else 0.0 for mine in ours)
        rows.append(replace(row, id=f"t{number}#0", tokens=tokens, annotations={"right": right}))
    return rows


def test_outcomes_alone_teach_the_implicit_model_which_tokens_matter(model_path, make_batch):
    config = TrainConfig(learning_rate=3e-3, token_budget=64)
    trainer = LocalTrainer(
        load(model_path), config, [ImplicitReward(beta=0.5)], name="implicit", total_steps=20, threads=1
    )

    async def trained(trainer):
        rows = await TrainerQuantity(trainer.forward, "reference").annotate(spoken(make_batch))
        shown, held_out = rows[:32], rows[32:]
        taught, metrics = implicit_rows(shown), []
        batch = Batch(step=1, model="implicit", rows=tuple(taught), denominators=denominators(taught), publish=False)
        for _ in range(12):
            metrics.append(await trainer.forward_backward(batch))
            await trainer.step(ends_update=False)
        found = await TrainerQuantity(trainer.forward, "implicit").annotate(held_out)
        return metrics, found

    metrics, found = run(trainer, trained)
    first, last = metrics[0], metrics[-1]
    assert first["reward_chosen"] == first["reward_rejected"] == 0.0 and first["accuracy"] == 0.5
    assert first["loss_preference"] == pytest.approx(0.6931472)
    assert last["loss_preference"] < 0.5 * first["loss_preference"] and last["accuracy"] > 0.95
    assert not any(name.startswith("logprob") for name in last), "nobody sampled with its weights"
    rewards = {GOOD: [], BAD: [], NEITHER: []}
    for row in found:
        columns = (row.tokens, row.weights["policy"], row.annotations["implicit"], row.annotations["reference"])
        for token, weight, now, before in zip(*columns, strict=True):
            if weight:
                rewards[token].append(now - before)
    assert mean(rewards[GOOD]) > mean(rewards[NEITHER]) > mean(rewards[BAD]), "of rollouts that it has never seen"
