"""Functions of a row, called by name; and the numbers that they may return."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from refusals import refused_at

from sparring.envs.answers import finite, observed, rated
from sparring.envs.base import Env
from sparring.envs.reward_calls import ByName, name_of
from sparring.envs.reward_function import RewardFunction
from sparring.errors import EnvError, boundary
from sparring.generation import Runs
from sparring.types import Message, Observation, Outcome, Score, Segment, Task, ToolCall, Trajectory

if TYPE_CHECKING:
    from nowhere import Row

QUESTION = (Message(role="system", content="s"), Message(role="user", content="q"))
TASK = Task(id="t", env="e", messages=QUESTION, data={"prompt": "q", "answer": 7, "id": "1"})
TALK = Task(id="t", env="e", messages=QUESTION, data={"answer": 7})


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, completion: str, answer: str) -> float:
        return self.by * (completion == answer)


class Later(Scale):
    async def __call__(self, completion: str, answer: str) -> float:  # type: ignore[override]
        return super().__call__(completion, answer)


def hinted(completion: str, answer: str, row: Row | None = None) -> float:
    return float(completion == answer)


def trl(prompts: list[str], completions: list[str], answer: list[int], **kwargs: Any) -> list[float]:
    assert prompts == ["q"] and kwargs == {"id": ["1"], "prompt": ["q"], "completion_ids": [[4, 5]]}
    return [float(c == str(a)) for c, a in zip(completions, answer, strict=True)]


def talked(completions: list[list[dict[str, str]]], prompts: Any, answer: list[int], trainer_state: Any = None) -> Any:
    assert prompts == [[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]]
    return numpy.array([c[0]["content"] == str(a) for c, a in zip(completions, answer, strict=True)])


async def trl_later(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(completions[0] == str(kwargs["answer"][0]))]


def positional(completion: str, answer: str, /, *more: Any, **columns: Any) -> float:
    assert more == () and columns == {"id": "1", "prompt": "q"}
    return float(completion == answer)


FUNCTIONS: list[tuple[Callable[..., Any], Task]] = [
    (lambda completion, answer, **_: completion == str(answer), TASK),
    (lambda completion, answer, scale=1.0, *args: scale * (completion == str(answer)), TASK),
    (functools.partial(lambda completion, answer, k: k * (completion == str(answer)), k=1), TASK),
    (functools.partial(lambda k, completion, answer: k * (completion == str(answer)), 1), TASK),
    (Scale(1.0), TASK),
    (Later(1.0), TASK),
    (Scale(1.0).__call__, TASK),
    (hinted, TASK),
    (positional, TASK),
    (trl, TASK),
    (talked, TALK),
    (trl_later, TASK),
    (lambda completion, answer: numpy.float64(completion == str(answer)), TASK),
    (lambda completion, answer: numpy.float32(completion == str(answer)), TASK),
    (lambda completion, answer: numpy.array(completion == str(answer)), TASK),
]


@pytest.mark.parametrize(("function", "task"), FUNCTIONS, ids=[name_of(function) for function, _ in FUNCTIONS])
def test_a_reward_function_of_any_kind(function: Callable[..., Any], task: Task) -> None:
    assert score_of(function, task, "7") == Score(reward=1.0, success=True)
    assert score_of(function, task, "8") == Score(reward=0.0, success=False)


ANSWERED = Outcome(kind="completed", reason="answered")


def score_of(
    function: Callable[..., Any], task: Task, said: str | Message, outcome: Outcome = ANSWERED
) -> Score | None:
    async def run() -> Score | None:
        world: Env = RewardFunction(ByName(function, "env.reward"))
        world.check(task)
        await world.open(task, None)
        reply = Message(role="assistant", content=said) if isinstance(said, str) else said
        turn = Segment(index=0, parent=None, source="expert", tokens=(4, 5), message=reply)
        if outcome.kind == "truncated":
            sampled: dict[str, Any] = {"logprobs": (-1.0, -2.0), "versions": Runs.of(0, 2), "finish_reason": "length"}
            turn = replace(turn, source="policy", model="policy", **sampled)
        return await world.score(Trajectory(id="r", task="t", role="policy", segments=(turn,), outcome=outcome))

    return asyncio.run(run())


def test_an_uncallable_reward_function_is_refused() -> None:
    with refused_at("task t", "a column"):
        ByName(lambda completion, gold: 0, "env.reward").check(TASK)
    with refused_at("env.reward", "a reward"):
        ByName(lambda completions, trainer_state: [0], "env.reward")
    with refused_at("env.reward", "a function whose parameters can be read"):
        ByName(min, "env.reward")
    for wrong in (0.0, [0.0, 1.0], []):
        with pytest.raises(EnvError, match="expected a list of one reward"):
            score_of(lambda completions: wrong, TASK, "7")


def exits(completion: str) -> float:
    raise SystemExit(3)


@pytest.mark.parametrize(
    "function",
    [lambda completion: float("nan"), lambda completion: "0", lambda completion: [], lambda completions: [0, 1], exits],
)
def test_an_error_names_the_function_as_the_recipe_does(function: Callable[..., Any]) -> None:
    async def run() -> None:
        world = RewardFunction(ByName(function, "env.reward", "r_len.py:reward"))
        await world.open(TASK, None)
        await world.score(Trajectory(id="r", task="t", role="policy", segments=(), outcome=ANSWERED))

    with pytest.raises(EnvError, match=r"^r_len\.py:reward: "):
        asyncio.run(run())


def test_an_error_names_the_innermost_line_of_the_users() -> None:
    def broken() -> None:
        json.loads("{")

    with pytest.raises(EnvError, match=r"^w\.py:reward: JSONDecodeError: .* \(test_reward_calls\.py:\d+, in broken\)$"):
        with boundary(EnvError, "w.py:reward"):
            broken()


def test_a_mapped_column_is_known_by_its_new_name() -> None:
    with refused_at("task t", "name it as the columns are called here, behind env.columns"):
        ByName(lambda completion, question: 0, "env.reward").check(TASK)


@pytest.mark.parametrize(
    ("content", "calls"),
    [("It is 2, sin", ()), ("", ()), ("Let me", (ToolCall(id="c", name="python", arguments=None, raw='{"co'),))],
)
def test_a_reply_that_a_limit_cut_is_handed_to_a_function_of_trl_and_to_no_other(
    content: str, calls: tuple[ToolCall, ...]
) -> None:
    """With its ids, whatever is in it; functions of one answer and rubrics get an empty text."""
    got: list[object] = []

    def of_trl(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
        got.append((completions, completion_ids))
        return [0.5]

    def of_one(completion: str) -> float:
        got.append(completion)
        return 0.25

    reply = Message(role="assistant", content=content, tool_calls=calls)
    for function in (of_trl, of_one):
        score_of(function, TASK, reply, Outcome(kind="truncated", reason="max_tokens"))
    assert got == [([content], [[4, 5]]), ""]


NUMBERS = [
    1,
    True,
    1.0,
    Fraction(1),
    numpy.float64(1),
    numpy.float32(1),
    numpy.int64(1),
    numpy.bool_(True),
    numpy.array(1.0),
]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_numbers_of_any_library_are_accepted_everywhere(number: Any) -> None:
    score = rated(Score(reward=number, parts={"a": number}, per_role={"p": number}, success=numpy.bool_(True)), ["p"])
    assert score is not None and score.success is True
    values = [finite("x", number), observed(Observation(reward=number)).reward, score.reward, score.parts["a"]]
    assert [(type(value), value) for value in values] == [(float, 1.0)] * 4


@pytest.mark.parametrize(
    "number", ["1.0", None, 1j, [1.0], numpy.ones(1), numpy.float32("nan"), 10**400, float("inf")], ids=repr
)
def test_a_value_that_is_no_finite_number_is_refused(number: Any) -> None:
    with pytest.raises(ValueError, match="expected a finite number as reward"):
        finite("reward", number)
