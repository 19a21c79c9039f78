"""An evaluation beside a training that fills the engine: neither starves."""

from __future__ import annotations

import asyncio
import math

from loaded_engine import LoadedEngine
from talk import TURNS, Training, words

from sparring.rollout.evaluate import EvalPlan, evaluate
from sparring.rollout.load import EvalShare, Places
from sparring.testing.clock import run_virtual
from sparring.testing.toy import toy_task

SLOTS, MOST, SHARE = 8, 32, 0.2
TASKS = [toy_task(number, split="eval") for number in range(24)]
WARM_S = 60.0


def beside(share: float | None, lasts_s: float = math.inf) -> tuple[float, float]:
    """Training on an engine of a quarter of its requests, and an evaluation that begins when it is in full swing.

    Returns:
        The seconds that the evaluation, or `lasts_s`, took, and the replies that training got in each of them.
    """
    engine = LoadedEngine(words, pages=4000, slots=SLOTS)
    training = Training(engine, most=MOST, follows=True)
    plan = EvalPlan(tasks=TASKS, run_seed=5)

    async def main() -> tuple[float, float]:
        clock = asyncio.get_running_loop().time
        sampling = asyncio.create_task(training.sample(lambda groups: False))
        await asyncio.sleep(WARM_S)
        begun = clock()
        if share is None:
            await asyncio.sleep(lasts_s)
        else:
            part = EvalShare(training.scheduler.places, share, 128, lambda: training.window.next_index)
            findings = await evaluate(training.runner, plan, max_concurrent_rollouts=part.most, share=part)
            assert all(finding.success for finding in findings.values())
        took = clock() - begun
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await training.scheduler.close()
        replies = [at for at, request in engine.served if begun <= at < begun + took and request.id.startswith("rl/")]
        return took, len(replies) / took

    return run_virtual(main())[0]


def test_neither_starves() -> None:
    took, rate = beside(SHARE)
    _, alone = beside(None, took)
    service = len(TASKS) * TURNS / (took * alone)
    assert 0.6 * SHARE < service < 1.2 * SHARE, "evaluation has had its share of the service, within a bounded time"
    assert rate > 0.95 * (1 - SHARE) * alone, "and training has lost no more"


def test_its_places_follow_those_of_training() -> None:
    places = Places(40)
    assert EvalShare(places, 0.2, 128, lambda: 0).limit == 10
    assert EvalShare(places, 0.5, 128, lambda: 0).limit == 40
    assert EvalShare(places, 0.5, 16, lambda: 0).limit == 16
    assert EvalShare(Places(1), 0.01, 128, lambda: 0).limit == 1, "never none"
