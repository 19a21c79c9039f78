"""The reasoning-gym adapter: all datasets, the same items in every process, splits that never meet, clear refusals."""

from __future__ import annotations

import asyncio
import decimal
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
from reasoning_gym.factory import DATASETS
from segments import answer, finished

from sparring.envs.config import EnvConfig
from sparring.envs.executor import InlineExecutor
from sparring.envs.reasoning_gym import HASH_DEPENDENT, ReasoningGym, entry_of, item
from sparring.envs.splits import overlap
from sparring.errors import BadInput
from sparring.rollout.guarded_env import GuardedEnv
from sparring.types import Task

WITHOUT_ANSWER = {"boxnet", "rush_hour"}
"""The library neither solves these nor gives an example of a right answer."""

LENIENT = {"game_of_life_halting"}
"""The library takes any text but "true" for "false"."""


def factory(*datasets: dict[str, Any], held_out: int = 40, **args: Any) -> ReasoningGym:
    return ReasoningGym(EnvConfig(name="reasoning_gym", args={"datasets": list(datasets), **args}, held_out=held_out))


def sharing(seed: int, share: float) -> tuple[list[Task], list[Task]]:
    """What a world of products with this share holds out, and what it trains on first."""
    args = {"datasets": [{"name": "products", "params": {"min_digits": 2, "max_digits": 2}}]}
    world = ReasoningGym(EnvConfig(name="reasoning_gym", args=args, held_out=60, held_out_share=share))
    return drain(world.tasks("eval", seed)), drain(world.tasks("train", seed), 600)


def test_with_a_share_no_seed_trains_on_what_another_holds_out() -> None:
    assert overlap(sharing(1, 0.0)[0], sharing(2, 0.0)[1]), "without it seeds meet"
    assert not overlap(sharing(1, 0.2)[0], sharing(2, 0.2)[1])


def drain(source: Any, count: int = 10**9) -> list[Task]:
    return [task for _, task in zip(range(count), iter(source.next, None), strict=False)]


def draw_all(hash_seed: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("draw_all.py")
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.full
def test_all_datasets_serve_score_their_own_answer_and_repeat_in_another_process() -> None:
    first, second = (json.loads(process.communicate()[0]) for process in (draw_all("1"), draw_all("2")))
    assert len(first) == 106
    assert {name for name, found in first.items() if found["oracle"] != 1.0} == WITHOUT_ANSWER
    assert {name for name, found in first.items() if found["nonsense"] >= 1.0} <= LENIENT
    differing = {name for name in first if first[name] != second[name]}
    assert differing <= HASH_DEPENDENT, "a dataset follows the hash seed and is not known to"
    assert len(differing) >= 3, "the control: the hash seeds do differ"


def test_items_depend_on_nothing_but_their_seed() -> None:
    before = random.getstate(), numpy.random.get_state()[1].tolist(), decimal.getcontext().prec
    params = {"min_terms": 6, "max_terms": 6, "min_digits": 12, "max_digits": 12}
    alone = item("decimal_chain_sum", params, 5)["answer"]
    item("decimal_arithmetic", {}, 1)
    item("pool_matrix", {}, 1)
    item.__globals__["_item"].cache_clear()
    assert item("decimal_chain_sum", params, 5)["answer"] == alone
    assert (random.getstate(), numpy.random.get_state()[1].tolist(), decimal.getcontext().prec) == before


@pytest.mark.full
def test_items_are_the_same_whichever_threads_draw_and_verify_others_meanwhile() -> None:
    drawn = {seed: item("pool_matrix", {}, seed) for seed in range(1000)}
    item.__globals__["_item"].cache_clear()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            again = dict(zip(drawn, pool.map(lambda seed: item("pool_matrix", {}, seed), drawn), strict=True))
    finally:
        sys.setswitchinterval(before)
    assert [seed for seed in drawn if again[seed]["question"] != drawn[seed]["question"]] == []


@pytest.mark.parametrize("name", ["chain_sum", "fraction_simplification", "products", "gcd", "lcm", "count_bits"])
def test_a_comparing_verifier_runs_on_the_event_loop_and_agrees_with_the_library(name: str) -> None:
    world = factory({"name": name}, binary=False)
    (task,) = drain(world.tasks("train", 0), 1)
    right = entry_of(task)["answer"]
    for text in (right, f"{right}0", "1/0", "1e9999", "no"):
        state = random.getstate()
        reward, num_away = guarded(world, task, text)
        assert random.getstate() == state
        assert (reward, num_away) == (DATASETS[name][0](DATASETS[name][1]()).score_answer(text, entry_of(task)), 0)


def test_a_computing_verifier_runs_in_the_executor() -> None:
    world = factory({"name": "countdown"})
    (task,) = drain(world.tasks("train", 0), 1)
    assert guarded(world, task, entry_of(task)["answer"]) == (1.0, 1)


def guarded(world: ReasoningGym, task: Task, text: str) -> tuple[float | None, int]:
    """Return the reward of an answer, and how many calls were handed to the environment's executor."""

    class Counting(InlineExecutor):
        calls = 0

        async def run(self, function: Any, *arguments: Any, **named: Any) -> Any:
            self.calls += 1
            return await super().run(function, *arguments, **named)

    async def run() -> tuple[float | None, int]:
        executor = Counting()
        env = GuardedEnv(world.make, executor, at_once=world.makes_at_once)
        await env.make()
        await env.open(task, None)
        score = await env.score([finished(answer(text), task=task.id)])
        assert score is not None
        return score.reward, executor.calls

    return asyncio.run(run())


def test_no_eval_prompt_is_ever_trained_or_demonstrated() -> None:
    # 5 to 9 give 25 products: without the rule, every prompt would meet.
    small = {"name": "products", "params": {"min_digits": 1, "max_digits": 1}, "demonstrations": 20}
    world = factory(small, {"name": "gcd", "params": {"max_value": 12}, "demonstrations": 10})
    held_out, shown = drain(world.tasks("eval", 3)), drain(world.tasks("demonstration", 3))
    train = drain(world.tasks("train", 3), 400)
    assert (len(held_out), len(shown)) == (40, 30)
    assert overlap(held_out, train) == overlap(held_out, shown) == set()
    assert len({t.messages for t in held_out}) == 40 and len({t.messages for t in shown}) == 30
    assert overlap(train, shown), "the control: train and demonstrations may meet, and do in so small a world"


def test_mix_follows_the_weights_and_eval_is_even() -> None:
    world = factory(
        {"name": "gcd", "weight": 3}, {"name": "lcm"}, {"name": "chain_sum", "weight": 0, "demonstrations": 2}
    )
    tags = [t.tag for t in drain(world.tasks("train", 0), 1000)]
    assert set(tags) == {"gcd", "lcm"}
    assert 0.70 < tags.count("gcd") / 1000 < 0.80
    assert [t.tag for t in drain(world.tasks("eval", 0), 6)] == ["gcd", "lcm", "chain_sum"] * 2
    assert {t.tag for t in drain(world.tasks("demonstration", 0))} == {"chain_sum"}
    assert world.coverage == {"gcd": "well", "lcm": "well", "chain_sum": "well"}


def test_a_task_is_a_question_and_four_plain_values() -> None:
    task = drain(factory({"name": "gcd", "params": {"max_value": 50}}).tasks("train", 7), 3)[2]
    assert task.id == "gcd/train/2" and task.tag == "gcd" and task.box is not None
    assert [m.content for m in task.messages] == [entry_of(task)["question"]]
    assert json.loads(json.dumps(task.data)) == task.data
    assert drain(factory({"name": "gcd"}).tasks("train", 8), 3)[2].messages != task.messages


def score_of(world: ReasoningGym, task: Task, text: str) -> tuple[float | None, bool | None]:
    async def run() -> tuple[float | None, bool | None]:
        env = world.make()
        await env.open(task, None)
        score = await env.score(finished(answer(text), task=task.id))
        assert score is not None
        return score.reward, score.success

    return asyncio.run(run())


def test_scores_are_binary_or_the_librarys_own() -> None:
    binary = factory({"name": "fraction_simplification"})
    task = drain(binary.tasks("train", 0), 1)[0]
    right = entry_of(task)["answer"]
    assert score_of(binary, task, right) == (1.0, True)
    assert score_of(binary, task, f"It is <answer> {right}</answer>, I think.") == (1.0, True)
    assert score_of(binary, task, "1/0") == (0.0, False)
    partial = factory({"name": "fraction_simplification"}, binary=False)
    assert score_of(partial, task, "1/0") == (0.05, False)
    assert score_of(partial, task, "") == (0.0, False)


def test_without_the_tool_there_is_neither_tool_nor_box_nor_expert() -> None:
    world = factory({"name": "gcd", "demonstrations": 1}, tool=False)
    task = drain(world.tasks("train", 0), 1)[0]
    assert (world.make().tools, task.box, world.expert(task)) == ((), None, None)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({"name": "gdc"}, r"env.args.datasets.0.name: expected one of ab"),
        ({"name": "gcd", "params": {"max": 3}}, "datasets.0.params: expected parameters of gcd"),
        ({"name": "gcd", "params": {"min_value": -1}}, "datasets.0.params: expected parameters"),
        ({"name": "gcd", "params": {"seed": 1}}, "datasets.0.params.seed: expected no such key"),
        ({"name": "sudoku", "demonstrations": 3}, "datasets.0.demonstrations: expected 0"),
        ({"name": "gcd", "coverage": "full"}, "env.args: .* got datasets.0.coverage: expected one of"),
        ({"name": "gcd", "weight": 0}, "at least one dataset must have a weight above 0"),
        ({"name": "gcd", "tool_share": 1.5}, "tool_share must be between 0 and 1"),
    ],
)
def test_bad_settings_are_refused(dataset: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        factory(dataset)


def test_too_few_prompts_are_refused() -> None:
    world = factory({"name": "products", "params": {"min_digits": 1, "max_digits": 1}}, held_out=101)
    with pytest.raises(BadInput, match="a new prompt for the eval split at task 100 of products"):
        world.tasks("eval", 0)


@pytest.mark.full
def test_a_dataset_that_follows_the_hash_seed_needs_a_fixed_one() -> None:
    code = (
        "from sparring.envs.config import EnvConfig; from sparring.envs.registry import load_env\n"
        "load_env(EnvConfig(name='reasoning_gym', args={'datasets': [{'name': 'word_ladder'}]}))"
    )
    free = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=free)
    assert "PYTHONHASHSEED in the environment" in ran.stderr


def test_the_expert_uses_its_tool_as_often_as_the_dataset_says() -> None:
    world = factory({"name": "lcm", "demonstrations": 200, "tool_share": 0.25}, {"name": "gcd", "demonstrations": 20})
    env, used = world.make(), {"lcm": 0, "gcd": 0}
    for task in drain(world.tasks("demonstration", 0)):
        expert = world.expert(task)
        assert expert is not None
        reply = expert(task.messages)
        used[task.tag] += bool(reply.tool_calls)
        assert reply.tool_calls or asyncio.run(env.reward(reply.content, task)).success
    assert used["gcd"] == 20 and 30 <= used["lcm"] <= 70
