"""The real package bfcl-eval, which `make test-real` brings: every demonstration is right by its own checker, and ways
to earn without calling what was asked earn nothing, on every held-out task."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparring.envs.config import EnvConfig
from sparring.envs.registry import load_env
from sparring.render.hermes import parse_reply
from sparring.types import Message, Score, Task, ToolCall

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
Attack = Callable[[Task, Message], Message | None]
"""A held-out task and its right reply -> a reply that must earn nothing; None where there is no such reply."""


@pytest.fixture(scope="module")
def factory() -> Iterator[Any]:
    with chdir(ROOT):  # without the package this is a refusal that names it
        made = load_env(EnvConfig(name="recipes/bfcl/world.py:Calls"))
        yield made
        made.checker.close()


def scored(factory: Any, replies: list[tuple[Task, Message]]) -> list[Score]:
    async def score() -> list[Score]:
        return [await factory.judged(task, reply) for task, reply in replies]

    return asyncio.run(score())


def calling(calls: Any) -> Message:
    return Message(role="assistant", tool_calls=tuple(calls))


def asks_for_calls(attack: Attack) -> Attack:
    return lambda task, gold: attack(task, gold) if gold.tool_calls else None


def where_none_fits(attack: Attack) -> Attack:
    return lambda task, gold: None if gold.tool_calls else attack(task, gold)


def written(gold: Message) -> str:
    of = [json.dumps({"name": call.name, "arguments": dict(call.arguments or {})}) for call in gold.tool_calls]
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in of)


def each_with(gold: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    return calling(replace(call, arguments=change(dict(call.arguments or {}))) for call in gold.tool_calls)


def all_candidates(task: Task, gold: Message) -> Message | None:
    """Every function once, those that are wanted with the right arguments."""
    wanted = {call.name: call for call in gold.tool_calls}
    others = [f["name"] for f in task.data["functions"] if f["name"] not in wanted]
    made = [ToolCall(id=name, name=name, arguments={}) for name in others]
    return calling([*gold.tool_calls, *made]) if others else None


def no_arguments(task: Task, gold: Message) -> Message | None:
    needed = {f["name"]: f["parameters"]["required"] for f in task.data["functions"]}
    return each_with(gold, lambda _: {}) if all(needed[call.name] for call in gold.tool_calls) else None


def numbers_as_words(task: Task, gold: Message) -> Message | None:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        return {key: str(value) if type(value) in (int, float) else value for key, value in given.items()}

    changed = each_with(gold, change)
    return changed if changed != gold else None


def all_values_at_once(task: Task, gold: Message) -> Message | None:
    """For each argument, the list of all values that are right."""
    calls = [(name, given) for call in task.data["answer"] for name, given in call.items()]
    return calling(ToolCall(id=name, name=name, arguments=dict(given)) for name, given in calls if given)


def first_of(task: Task) -> dict[str, Any]:
    return task.data["functions"][0]


def a_call(task: Task) -> str:
    return f'<tool_call>\n{{"name": "{first_of(task)["name"]}", "arguments": {{}}}}\n</tool_call>'


def parsed(text: str) -> Message:
    return parse_reply(text, thinking=False)


ATTACKS: dict[str, Attack] = {
    "all candidates": asks_for_calls(all_candidates),
    "the name without arguments": asks_for_calls(no_arguments),
    "calls as text": asks_for_calls(lambda task, gold: parsed(written(gold).replace("tool_call", "call"))),
    "calls that no tag closes": asks_for_calls(lambda task, gold: parsed(written(gold).replace("</tool_call>", ""))),
    "broken JSON": asks_for_calls(lambda task, gold: parsed(written(gold).replace("}}\n", "}\n"))),
    "right calls and a broken one": asks_for_calls(lambda task, gold: parsed(written(gold) + "<tool_call>\n{")),
    "one argument more": asks_for_calls(lambda task, gold: each_with(gold, lambda given: given | {"verbose": True})),
    "every call twice": asks_for_calls(lambda task, gold: calling(gold.tool_calls * 2)),
    "one call less": asks_for_calls(lambda task, gold: calling(gold.tool_calls[1:])),
    "numbers as words": asks_for_calls(numbers_as_words),
    "all right values at once": asks_for_calls(all_values_at_once),
    "the arguments as text": asks_for_calls(lambda task, gold: each_with(gold, lambda given: {"": json.dumps(given)})),
    "the name in capitals": asks_for_calls(
        lambda task, gold: parsed(
            written(gold).replace(
                f'"name": "{gold.tool_calls[0].name}"', f'"name": "{gold.tool_calls[0].name.swapcase()}"'
            )
        )
    ),
    "a refusal": asks_for_calls(lambda task, gold: parsed("None of these functions can do that.")),
    "nothing": lambda task, gold: parsed(" \n"),
    "a call where none fits": where_none_fits(lambda task, gold: parsed(a_call(task))),
    "words and a call": where_none_fits(lambda task, gold: parsed(f"{gold.content}\n{a_call(task)}")),
    "an unknown function": where_none_fits(lambda task, gold: calling([ToolCall(id="a", name="none", arguments={})])),
    "a broken call": where_none_fits(lambda task, gold: parsed(gold.content + a_call(task).replace("}}", "}"))),
}


def test_every_demonstration_is_right(factory: Any) -> None:
    tasks = [*factory.train, *factory.held_out]
    found = scored(factory, [(task, factory.expert(task)(task.messages)) for task in tasks])
    assert [task.data["id"] for task, score in zip(tasks, found, strict=True) if not score.success] == []
    assert Counter(task.tag for task in tasks) == {
        "simple_python": 400,
        "irrelevance": 240,
        "parallel": 200,
        "multiple": 177,
    }
    assert len(factory.held_out) == 254 and factory.left_out == 23


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_earns_nothing_on_any_held_out_task(factory: Any, attack: Attack) -> None:
    tried = [(task, attack(task, factory.expert(task)(task.messages))) for task in factory.held_out]
    replies = [(task, reply) for task, reply in tried if reply is not None]
    assert len(replies) >= 40
    earned = {
        task.data["id"] for (task, _), score in zip(replies, scored(factory, replies), strict=True) if score.reward
    }
    assert earned == set()
