"""A reward model served: the bits that training finds, in any company, and what cannot be scored is refused."""

import asyncio
import random

import pytest
import torch

from sparring.batch.preference import CHOSEN, whole_text
from sparring.engine.reward import RewardModel
from sparring.errors import EngineError
from sparring.model.load import load
from sparring.model.save import save
from sparring.rollout.scorers.reward_scorer import RewardScorer
from sparring.testing.tiny_models import VOCABULARY
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Outcome, Rollout, Score, Segment, Task, Trajectory

pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths(portable=False)]


@pytest.fixture(scope="module")
def scalar_path(model_path, tmp_path_factory):
    """The tiny model with a scalar head of random weights."""
    model = load(model_path, head="new scalar")
    with torch.no_grad():
        model.state()["score.weight"].normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    return save(model.state(), model_path, tmp_path_factory.mktemp("reward") / "scalar")


def on_reward_engine(path, work, **settings):
    async def main():
        model = RewardModel(load(path, head="scalar"), **settings)
        try:
            return await work(model)
        finally:
            await model.close()

    return asyncio.run(main())


def texts():
    draw = random.Random(3)
    prompt = [draw.randrange(VOCABULARY) for _ in range(9)]
    return [[*prompt, *(draw.randrange(VOCABULARY) for _ in range(length))] for length in (1, 20, 4, 7, 7)] + [[5]]


def test_the_bits_are_the_trainers_in_any_company(scalar_path):
    rows = [whole_text(text, id=str(n), group=str(n), label=CHOSEN) for n, text in enumerate(texts())]

    async def trained():
        trainer = LocalTrainer(
            load(scalar_path, head="scalar"), TrainConfig(token_budget=30), [], name="policy", total_steps=1
        )
        found = await trainer.forward(rows, frozenset({"value"}))
        await trainer.close()
        return [values["value"][-1] for values in found]

    expected = asyncio.run(trained())
    assert len(set(expected)) == len(expected)
    assert on_reward_engine(scalar_path, lambda model: model.values(texts())) == expected

    async def one_by_one(model):
        return [(await model.values([text]))[0] for text in texts()]

    assert on_reward_engine(scalar_path, one_by_one, token_budget=7, threads=2) == expected


def test_texts_that_cannot_be_scored_are_refused(scalar_path):
    for text in ([], [1] * 257):
        with pytest.raises(EngineError, match=f"a text of 1 to 256 tokens, got {len(text)}"):
            on_reward_engine(scalar_path, lambda model, text=text: model.values([[1], text]))


def test_a_group_is_scored_by_what_was_sampled(scalar_path):
    """The whole of the last branch, added to the world's reward where there is one."""
    done, task = Outcome(kind="completed", reason="answered"), Task(id="t", env="e", messages=())

    def rollout(index, answers):
        segments = [Segment(index=0, parent=None, source="prompt", tokens=(1, 2, 3))]
        segments += [Segment(index=n, parent=0, source="tool", tokens=answer) for n, answer in enumerate(answers, 1)]
        trajectory = Trajectory(id=str(index), task="t", role="policy", segments=tuple(segments), outcome=done)
        return Rollout(id=str(index), task=task, index=index, attempt=0, purpose="train", trajectories=(trajectory,))

    rollouts = [rollout(0, [(4, 5)]), rollout(1, [(9,), (6,)])]
    scores = [Score(reward=None), Score(reward=1.0, parts={"format": 1.0}, success=True)]

    async def scored(model):
        return await model.values([[1, 2, 3, 4, 5], [1, 2, 3, 6]]), await RewardScorer(model, weight=0.5).score(
            task, rollouts, scores
        )

    (first, second), found = on_reward_engine(scalar_path, scored)
    assert found[0] == Score(reward=0.5 * first, parts={"reward_model": first})
    assert found[1] == Score(reward=1.0 + 0.5 * second, parts={"format": 1.0, "reward_model": second}, success=True)
