"""The `Env` base: tool calls, the policy's mistakes, the world's own, and scores."""

from __future__ import annotations

import asyncio
import math
from random import Random
from typing import Any

import msgspec
import pytest
from refusals import refused_at
from segments import answer, finished

from sparring.envs.base import Env, ToolError, tool
from sparring.envs.config import EnvConfig
from sparring.envs.factory import WorldFactory
from sparring.errors import BadInput, EnvError, SandboxError
from sparring.types import Message, Outcome, Score, Task, ToolCall

TASK = Task(id="t", env="shop", messages=(Message(role="user", content="Buy."),), data={"answer": "7"})


def double(x: int) -> int:
    """Double a number."""
    return 2 * x


class Shop(Env):
    """A world with every kind of tool."""

    functions = (double,)

    @tool
    def price(self, item: str) -> dict[str, int]:
        """Look up a price.

        Args:
            item: What to look up.
        """
        if item not in ("tea", "gold"):
            raise ToolError(f"no {item} here, only tea and gold")
        return {"price": 7}

    @tool(name="wait", description="Wait.")
    async def wait_a_bit(self, how: str = "patiently") -> str:
        await asyncio.sleep(0)
        return f"waited {how}"

    @tool
    def broken(self) -> str:
        """Break."""
        raise ZeroDivisionError("the world's own fault")

    @tool
    async def dead(self) -> str:
        """Lose the box."""
        raise SandboxError("box died")

    def reward(self, completion: str, task: Task) -> float:
        return float(completion == task.data["answer"])


def said(*calls: tuple[str, dict[str, Any] | None]) -> Message:
    made = tuple(ToolCall(id=f"c{i}", name=n, arguments=a, raw="{oops") for i, (n, a) in enumerate(calls))
    return Message(role="assistant", tool_calls=made)


def answers(*calls: tuple[str, dict[str, Any] | None]) -> list[str]:
    async def run() -> list[str]:
        world = Shop()
        await world.open(TASK, None)
        seen = await world.step(said(*calls))
        assert not seen.done
        assert [(m.role, m.tool_call_id, m.name) for m in seen.messages] == [
            ("tool", f"c{i}", name) for i, (name, _) in enumerate(calls)
        ]
        return [message.content for message in seen.messages]

    return asyncio.run(run())


def score(world: Env, text: str, **more: Any) -> Score | None:
    async def run() -> Score | None:
        await world.open(TASK, None)
        return await world.score(finished(*TASK.messages, answer(text), **more))

    return asyncio.run(run())


def test_functions_and_methods_are_tools() -> None:
    assert [(t.name, t.description) for t in Shop().tools] == [
        ("double", "Double a number."),
        ("price", "Look up a price."),
        ("wait", "Wait."),
        ("broken", "Break."),
        ("dead", "Lose the box."),
    ]


def test_calls_are_answered_in_order() -> None:
    assert answers(("double", {"x": 4}), ("wait", {}), ("price", {"item": "tea"})) == [
        "8",
        "waited patiently",
        '{"price":7}',
    ]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (("steal", {}), "error: no tool 'steal', there is double, price, wait, broken, dead"),
        (("price", None), "error: price: expected arguments that are a JSON object"),
        (("price", {"item": 3}), "error: price: item: expected a string, got 3"),
        (("price", {}), "error: price: item: expected a string, got nothing"),
        (("price", {"item": "tea", "colour": "red"}), "error: price: colour: expected one of item, got an unknown key"),
        (("price", {"item": "coal"}), "error: no coal here, only tea and gold"),
    ],
)
def test_the_models_mistakes_are_reported_to_the_model(call: tuple[str, Any], told: str) -> None:
    assert answers(call) == [told]


def test_a_tool_that_raises_is_the_worlds_failure() -> None:
    with pytest.raises(EnvError, match="Shop, tool broken: ZeroDivisionError: the world's own fault"):
        answers(("broken", {}))


def test_a_dead_box_stays_a_sandbox_error() -> None:
    with pytest.raises(SandboxError, match="box died"):
        answers(("dead", {}))


def test_a_reply_without_calls_ends_the_episode() -> None:
    assert asyncio.run(Shop().step(Message(role="assistant", content="7"))).done


def test_the_final_text_is_scored() -> None:
    assert score(Shop(), " 7\n") == Score(reward=1.0, success=True)
    assert score(Shop(), "8") == Score(reward=0.0, success=False)


def test_an_unfinished_answer_counts_as_empty() -> None:
    assert score(Shop(), "7", outcome=Outcome(kind="truncated", reason="max_tokens")) == Score(
        reward=0.0, success=False
    )


class Odd(Env):
    """Returns or raises what it is told to."""

    success_at = None

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    async def reward(self, completion: str, task: Task) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


@pytest.mark.parametrize("value", [math.nan, "1", [1.0], KeyError("x")])
def test_a_reward_that_is_no_number_is_the_worlds_failure(value: Any) -> None:
    with pytest.raises(EnvError, match="Odd.reward"):
        score(Odd(value), "7")


def test_valid_types_of_rewards() -> None:
    assert score(Odd(None), "7") is None
    assert score(Odd(0.25), "7") == Score(reward=0.25, success=None)
    whole = Score(reward=0.5, parts={"style": 0.5})
    assert score(Odd(whole), "7") is whole


class Twice(Env):
    """Two tools of one name."""

    functions = (double,)

    @tool(name="double")
    def other(self, x: int) -> int:
        return x


def test_two_tools_of_one_name_are_refused() -> None:
    with refused_at("Twice", "tools"):
        Twice()


class Sum(Env):
    """Generated tasks with settings."""

    class Args(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        largest: int = 3

    def generate(self, random: Random) -> dict[str, str]:
        a, b = random.randint(0, self.args.largest), random.randint(0, self.args.largest)
        return {"prompt": f"{a}+{b}", "answer": str(a + b)}

    def reward(self, completion: str, task: Task) -> bool:
        return completion == task.data["answer"]


def test_a_world_with_too_few_prompts_is_refused() -> None:
    # 16 prompts exist: 10 are held out, 6 are left.
    factory = WorldFactory("sum", Sum, EnvConfig(name="x", held_out=10, demonstrations=7), None)
    train = factory.tasks("train", 0)
    asked = {task.messages[0].content for _ in range(200) if (task := train.next()) is not None}
    assert len(asked) == 6
    with refused_at("env sum", "a new prompt for the demonstration split"):
        factory.tasks("demonstration", 0)
    with pytest.raises(BadInput, match="expected train"):
        factory.tasks("test", 0)


def test_a_world_without_tasks_is_refused() -> None:
    with refused_at("env shop", "tasks"):
        WorldFactory("shop", Shop, EnvConfig(name="x"), None)
