"""The contracts of `TaskSource`, `EnvFactory` and `World`, for every implementation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from recipe_files import RECIPES

from sparring.envs.config import EnvConfig
from sparring.envs.domains import Domains
from sparring.envs.registry import load_env
from sparring.envs.splits import Stream, identity, listed, overlap
from sparring.protocols import AnyEnv, EnvFactory, TaskSource
from sparring.tasks.files import read_rows
from sparring.tasks.mix import Mix
from sparring.tasks.repetition import LostTasksAgain
from sparring.types import Group, Message, Outcome, Score, Segment, Task, ToolCall, Trajectory

WORLD = '''
from sparring.envs.base import Env, tool
from sparring.types import Message, ToolCall

class Multiply(Env):
    def generate(self, random):
        a, b = random.randint(2, 99), random.randint(2, 99)
        return {"prompt": f"{a} * {b} = ?", "answer": str(a * b), "pair": [a, b]}

    @tool
    async def times(self, a: int, b: int) -> int:
        """Multiply."""
        return a * b

    def reward(self, completion, task):
        return completion == task.data["answer"]

    def expert(self, task):
        a, b = task.data["pair"]
        def reply(messages):
            if messages[-1].role == "tool":
                return Message(role="assistant", content=messages[-1].content)
            call = ToolCall(id="c", name="times", arguments={"a": a, "b": b})
            return Message(role="assistant", tool_calls=(call,))
        return reply

class Nim(Env):
    """One move, behind one prompt: to leave a multiple of four sticks, or to take one of such, is worth 0; all else loses 1."""

    success_at = 0.0

    def generate(self, random):
        return {"prompt": "Take 1, 2 or 3.", "sticks": random.randint(4, 1003)}

    def key(self, task):
        return str(task.data["sticks"])

    def reward(self, completion, task):
        rest = task.data["sticks"] % 4
        return 0.0 if completion == str(rest or 1) else -1.0

    def expert(self, task):
        return lambda messages: Message(role="assistant", content=str(task.data["sticks"] % 4 or 1))

def reward(completion: str, answer: str) -> float:
    return float(completion == answer)
'''


def write(folder: Path) -> None:
    (folder / "world.py").write_text(WORLD)
    rows = (json.dumps({"q": f"What is {i} + {i}?", "a": str(2 * i)}) for i in range(300))
    (folder / "data.jsonl").write_text("\n".join(rows))


def gym(folder: Path) -> EnvFactory:
    datasets = [{"name": "gcd", "demonstrations": 5}, {"name": "chain_sum", "weight": 2, "demonstrations": 5}]
    return load_env(EnvConfig(name="reasoning_gym", args={"datasets": datasets}, held_out=30))


def instructions(folder: Path) -> EnvFactory:
    return load_env(EnvConfig(name=f"{RECIPES}/instructions/world.py:Instructions", held_out=30, demonstrations=10))


def generated(folder: Path) -> EnvFactory:
    return load_env(EnvConfig(name=f"{folder}/world.py:Multiply", held_out=30, demonstrations=10))


def game(folder: Path) -> EnvFactory:
    return load_env(EnvConfig(name=f"{folder}/world.py:Nim", held_out=30, demonstrations=10))


def function(folder: Path) -> EnvFactory:
    columns = {"prompt": "q", "answer": "a"}
    settings = {"reward": f"{folder}/world.py:reward", "data": f"{folder}/data.jsonl", "columns": columns}
    return load_env(msgspec.convert(settings, EnvConfig), read_rows)


def rubric(folder: Path) -> EnvFactory:
    columns, parts = {"prompt": "q", "answer": "a"}, {"right": {"kind": "number"}}
    return load_env(
        msgspec.convert({"rubric": parts, "data": f"{folder}/data.jsonl", "columns": columns}, EnvConfig), read_rows
    )


def named(env: str, count: int) -> Stream:
    return listed([Task(id=f"{env}/{number}", env=env, messages=()) for number in range(count)])


def domains(folder: Path) -> Domains:
    return Domains({"one": generated(folder), "two": function(folder)})


FACTORIES: dict[str, Callable[[Path], EnvFactory]] = {
    "reasoning_gym": gym,
    "instructions": instructions,
    "generated": generated,
    "game": game,
    "reward_function": function,
    "rubric": rubric,
    "domains": domains,
}
SOURCES: dict[str, Callable[[Path], TaskSource]] = {
    "generated train": lambda folder: generated(folder).tasks("train", 1),
    "generated eval": lambda folder: generated(folder).tasks("eval", 1),
    "reasoning_gym train": lambda folder: gym(folder).tasks("train", 1),
    "file train": lambda folder: function(folder).tasks("train", 1),
    "in order": lambda folder: named("e", 8),
    "mix": lambda folder: Mix(
        {
            "a": named("a", 8),
            "b": named("b", 20),
            "c": Stream(lambda place: Task(id=f"c/{place % 9}", env="c", messages=())),
        },
        {"a": 2, "b": 1, "c": 1},
    ),
    "domains": lambda folder: domains(folder).tasks("eval", 1),
    "lost tasks again": lambda folder: LostTasksAgain(function(folder).tasks("train", 1), 2),
}
FINITE = {"generated eval", "in order", "domains"}


@pytest.fixture(params=FACTORIES)
def factory(request: pytest.FixtureRequest, tmp_path: Path) -> EnvFactory:
    write(tmp_path)
    return FACTORIES[request.param](tmp_path)


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], TaskSource]:
    write(tmp_path)
    return lambda: SOURCES[request.param](tmp_path)


def take(source: TaskSource, count: int) -> list[Task]:
    return [task for _, task in zip(range(count), iter(source.next, None), strict=False)]


def test_a_source_resumes_at_the_exact_task(source: Callable[[], TaskSource]) -> None:
    whole = source()
    states, tasks = [], []
    for _ in range(40):
        states.append(json.loads(json.dumps(whole.state())))
        tasks += take(whole, 1)
    for at in (0, 1, 7, 8, 9, 39):
        again = source()
        take(again, 3)  # wherever it stood
        again.restore(states[at])
        assert take(again, 40 - at) == tasks[at:]


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_is_observed_and_ends_for_good_or_never(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    seen = SOURCES[name](tmp_path)
    for task in take(seen, 3):
        seen.observe(Group(id=task.id, index=0, task=task, rollouts=(), scores=()))
    ended = [len(take(seen, 500)) < 500, seen.next() is None, seen.next() is None]
    assert ended == [name in FINITE] * 3


def test_a_factory_has_all_that_is_asked_of_one(factory: EnvFactory) -> None:
    asked = {*EnvFactory.__annotations__, *(name for name in vars(EnvFactory) if not name.startswith("_"))}
    assert {"name", "scorer", "make", "tasks", "expert"} <= asked
    assert [name for name in asked if not hasattr(factory, name)] == []


def test_streams_are_functions_of_the_seed(factory: EnvFactory) -> None:
    first, again, other = (take(factory.tasks("train", seed), 60) for seed in (1, 1, 2))
    assert first == again
    assert [identity(t) for t in first] != [identity(t) for t in other]
    assert len(take(factory.tasks("train", 1), 700)) == 700, "train is endless"


def test_splits_are_finite_distinct_and_never_meet_eval(factory: EnvFactory) -> None:
    held_out, shown = take(factory.tasks("eval", 1), 10**4), take(factory.tasks("demonstration", 1), 10**4)
    assert 0 < len(held_out) < 10**4 and 0 < len(shown) < 10**4
    assert len({identity(t) for t in held_out}) == len(held_out) == len({t.id for t in held_out})
    assert overlap(held_out, take(factory.tasks("train", 1), 400)) == overlap(held_out, shown) == set()


def conversation(factory: EnvFactory, task: Task, replies: list[Message]) -> tuple[list[Message], Score | None]:
    """Hold it as a harness would, with a box that is never needed."""

    async def run() -> tuple[list[Message], Score | None]:
        env: AnyEnv = factory.make()
        seen = await env.open(task, None)
        messages = [*task.messages, *seen.messages]
        for reply in replies:
            seen = await env.step(reply)
            messages += [reply, *seen.messages]
        segments = tuple(
            Segment(index=i, parent=i - 1 if i else None, source="expert", tokens=(), message=m)
            for i, m in enumerate(messages)
        )
        outcome = Outcome(kind="completed", reason="answered")
        score = await env.score(Trajectory(id="r", task=task.id, role="policy", segments=segments, outcome=outcome))
        await env.close()
        return messages, score

    return asyncio.run(run())


def test_a_task_survives_being_written_down(factory: EnvFactory) -> None:
    tasks = take(factory.tasks("train", 1), 3)
    assert len(tasks) == 3
    for task in tasks:
        assert task.env in factory.name.split(", ") and task.messages[-1].role == "user"
        assert json.loads(json.dumps(task.data)) == task.data


def test_an_empty_answer_is_scored_and_is_no_success(factory: EnvFactory) -> None:
    (task,) = take(factory.tasks("train", 1), 1)
    _, score = conversation(factory, task, [Message(role="assistant", content="")])
    assert score is not None and score.reward is not None and score.reward <= 0.0 and not score.success


def test_an_unknown_tool_is_answered_and_not_raised(factory: EnvFactory) -> None:
    (task,) = take(factory.tasks("train", 1), 1)
    calls = tuple(ToolCall(id=i, name="no_such_tool", arguments=None, raw="{") for i in "ab")
    messages, _ = conversation(factory, task, [Message(role="assistant", tool_calls=calls)])
    assert [(m.role, m.tool_call_id) for m in messages[-2:]] == [("tool", "a"), ("tool", "b")]
    assert all("no_such_tool" in m.content for m in messages[-2:])


def test_the_expert_is_rewarded(tmp_path: Path) -> None:
    write(tmp_path)
    world = generated(tmp_path)
    tasks = take(world.tasks("demonstration", 1), 5)
    assert len(tasks) == 5
    for task in tasks:
        expert = world.expert(task)
        assert expert is not None
        call = expert(task.messages)
        messages, _ = conversation(world, task, [call])
        _, score = conversation(world, task, [call, expert(messages)])
        assert score == Score(reward=1.0, success=True)
