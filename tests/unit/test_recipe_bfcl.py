"""The world of recipes/bfcl on rows and a checker that are made up: what is held out, shown, refused and scored."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparring.envs.config import EnvConfig
from sparring.envs.registry import load_env
from sparring.errors import BadInput, EnvError
from sparring.render.hermes import parse_reply
from sparring.types import Message, Outcome, Segment, Task, ToolCall, Trajectory
from sparring.user_files.named import named

RECIPE = Path(__file__).parents[2] / "recipes/bfcl"
CHECKER = """
import os, signal
def ast_checker(functions, calls, answer, language, category, model):
    (name, given), = calls[0].items()
    if "end" in given:
        os._exit(7)
    if "hang" in given:
        signal.pause()
    if "odd" in given:
        raise AttributeError("no verdict")
    print("a library says something")
    right = [{n: {k: v[0] for k, v in a.items() if "" not in v} for n, a in c.items()} for c in answer]
    return {"valid": calls == right, "error_type": "other"}
"""
UTILS = """
def is_empty_output(calls): return not calls
def is_function_calling_format_output(calls): return isinstance(calls, list)
"""


def function(name: str) -> dict[str, Any]:
    number = {"type": "float", "description": "how many"}
    pair = {"type": "tuple", "items": {"type": "integer"}}
    properties = {"number": number, "pair": pair, "more": {"type": "dict", "properties": {"any": {"type": "any"}}}}
    parameters = {"type": "dict", "properties": properties, "required": ["number"]}
    return {"name": name, "description": f"Does {name}.", "parameters": parameters}


def rows(category: str, count: int) -> list[dict[str, Any]]:
    """Tasks of which every two that follow each other share a function, and every third a question."""
    made = []
    for n in range(count):
        names = [f"{category[:2]}.f{n // 2}"] + ([f"other{n // 4}"] if category == "multiple" else [])
        question = [[{"role": "user", "content": f"What of {n // 3 if n % 3 else n}?"}]]
        answer = [{names[0]: {"number": [n], "pair": [[n, 2], [2, n]], "more": ["", {"any": ["x"]}]}}]
        answer *= 2 if category == "parallel" else 1
        row = {"id": f"{category}_{n}", "question": question, "function": [function(name) for name in names]}
        made.append(row | ({} if category == "irrelevance" else {"ground_truth": answer}))
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in the form of .bfcl: an interpreter, the package's files, its version."""
    site = tmp_path / ".bfcl/lib/python3/site-packages"
    files = {
        "constants/enums.py": "class Language: PYTHON = 'python'\n",
        "eval_checker/ast_eval/ast_checker.py": CHECKER,
        "utils.py": UTILS,
    }
    for category in ("simple_python", "multiple", "parallel", "irrelevance"):
        made = rows(category, 24)
        files[f"data/BFCL_v4_{category}.json"] = "\n".join(map(json.dumps, made))
        files[f"data/possible_answer/BFCL_v4_{category}.json"] = "\n".join(map(json.dumps, made))
    for name, text in files.items():
        (site / "bfcl_eval" / name).parent.mkdir(parents=True, exist_ok=True)
        (site / "bfcl_eval" / name).write_text(text)
    (site / "bfcl_eval-2026.3.23.dist-info").mkdir()
    python = tmp_path / ".bfcl/bin/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return tmp_path / ".bfcl"


def world(folder: Path, **args: Any) -> Any:
    return load_env(EnvConfig(name=f"{RECIPE}/world.py:Calls", args={"folder": str(folder), **args}, demonstrations=10))


def drawn(factory: Any, split: str, count: int = 200) -> list[Task]:
    source = factory.tasks(split, 1)
    return [task for task in (source.next() for _ in range(count)) if task is not None]


def names(tasks: list[Task]) -> set[str]:
    return {function["name"] for task in tasks for function in task.data["functions"]}


def test_no_function_and_no_question_is_on_both_sides(folder: Path) -> None:
    factory = world(folder)
    train, held = drawn(factory, "train"), drawn(factory, "eval")
    assert not names(train) & names(held)
    assert not {task.messages[0].content for task in train} & {task.messages[0].content for task in held}
    different = {task.key for task in train}
    assert len(different) + len(held) == 96 and not different & {task.key for task in held}
    assert 12 <= len(held) <= 36 and all(Counter(task.tag for task in held)[c] for c in factory.args.categories)
    assert drawn(world(folder), "eval") == held and drawn(factory, "train", 8) == train[:8]
    shown = drawn(factory, "demonstration")
    assert len(shown) == 10 and {task.key for task in shown} <= different


def test_the_order_of_rows_deals_nothing_else(folder: Path) -> None:
    before = [task.key for task in drawn(world(folder), "eval")]
    for file in folder.rglob("BFCL_v4_*.json"):
        file.write_text("\n".join(reversed(file.read_text().splitlines())) + "\n")
    assert [task.key for task in drawn(world(folder), "eval")] == before


def test_long_tasks_are_left_out_and_counted(folder: Path) -> None:
    whole, factory = world(folder), world(folder, longest=400)
    assert whole.left_out == 0 and factory.left_out == 24
    assert "multiple" not in {task.tag for task in drawn(factory, "train") + drawn(factory, "eval")}


def test_functions_are_tools_of_their_task_with_types_of_json(folder: Path) -> None:
    async def tools() -> Any:
        factory = world(folder)
        env, (task, *_) = factory.make(), drawn(factory, "eval")
        assert env.tools == ()
        await env.open(Task(id="chat", env="bfcl", messages=()), None)
        assert env.tools == ()
        await env.open(task, None)
        return task, env.tools

    task, (tool, *_) = asyncio.run(tools())
    assert tool.name == task.data["functions"][0]["name"] and tool.parameters["required"] == ["number"]
    properties = tool.parameters["properties"]
    assert tool.parameters["type"] == properties["more"]["type"] == "object"
    assert properties["number"] == {"type": "number", "description": "how many"}
    assert properties["pair"] == {"type": "array", "items": {"type": "integer"}}
    assert properties["more"]["properties"] == {"any": {"type": "string"}}


def test_the_expert_writes_the_first_right_values_and_leaves_out_what_may_be() -> None:
    row, reply = named(f"{RECIPE}/package.py:Row", "row"), named(f"{RECIPE}/gold.py:reply", "reply")
    objects = [[{"from": ["a", "b"], "to": ["", "c"]}, {"from": ["d"], "to": ["e"]}]]
    answer = [{"f": {"of": objects, "mode": ["", "fast"], "number": ["", 3], "empty": [""]}}, {"f": {"of": [[]]}}]
    functions = [{"name": "f", "parameters": {"required": ["number", "empty"]}}]
    calls = reply(row("parallel_1", "parallel", "?", functions, answer)).tool_calls
    of = [{"from": "a"}, {"from": "d", "to": "e"}]
    assert [call.arguments for call in calls] == [{"of": of, "number": 3, "empty": ""}, {"of": []}]
    refused = reply(row("irrelevance_1", "irrelevance", "?", functions, ()))
    assert refused.content and not refused.tool_calls


def scores(folder: Path, category: str, *replies: Callable[[Task, Any], Message]) -> list[tuple[float, ...]]:
    """What BFCL's part, our success and the reward say of each reply."""

    async def score() -> list[tuple[float, ...]]:
        factory = world(folder)
        task = next(task for task in drawn(factory, "eval") if task.tag == category)
        found = [await factory.judged(task, reply(task, factory.expert(task)(()))) for reply in replies]
        factory.checker.close()
        return [(each.parts["bfcl"], float(each.success), each.reward) for each in found]

    return asyncio.run(score())


def said(text: str) -> Callable[[Task, Any], Message]:
    return lambda task, gold: parse_reply(text.replace("NAME", task.data["functions"][0]["name"]), thinking=False)


def called(count: int = 1, **given: Any) -> Callable[[Task, Any], Message]:
    """The first right calls, and one of another function for each argument that is given."""
    more = tuple(ToolCall(id=key, name="g", arguments={key: value}) for key, value in given.items())
    return lambda task, gold: Message(role="assistant", tool_calls=gold.tool_calls[:count] + more)


def test_the_checkers_verdict_is_the_reward(folder: Path) -> None:
    broken = said('<tool_call>\n{"name": "NAME", "arguments": {"number": }}\n</tool_call>')
    replies = (called(2), called(1), called(2, extra=1), called(0), broken, said("NAME(number=1)"), called(0, odd=1))
    assert scores(folder, "parallel", *replies) == [(1, 1, 1)] + [(0, 0, 0)] * 6


def test_where_no_function_fits_words_are_right_and_silence_is_not(folder: Path) -> None:
    broken = said('<tool_call>\n{"name": "NAME"\n</tool_call>')
    replies = (said("I cannot do that."), said(" \n "), broken, called(0, x=1))
    assert scores(folder, "irrelevance", *replies) == [(1, 1, 1), (1, 0, 0), (1, 0, 0), (0, 0, 0)]


def test_a_reply_that_a_limit_cuts_short_is_not_right(folder: Path) -> None:
    async def score() -> Any:
        factory = world(folder)
        env, task = factory.make(), drawn(factory, "eval")[0]
        reply = factory.expert(task)(())
        await env.open(task, None)
        assert (await env.step(reply)).done
        segment = Segment(index=0, parent=None, source="policy", tokens=(1,), message=reply)
        outcome = Outcome(kind="truncated", reason="max_tokens")
        return await env.score(Trajectory(id="t", task=task.id, role="policy", segments=(segment,), outcome=outcome))

    assert asyncio.run(score()).reward == 0.0


def test_no_verdict_is_no_reward_and_the_checker_starts_again(folder: Path) -> None:
    kind, package = named(f"{RECIPE}/checker.py:Checker", "checker"), named(f"{RECIPE}/package.py:installed", "package")

    async def asked() -> None:
        checker, hasty = kind(package(folder)), kind(package(folder), wall_s=0.1)

        async def ask(of: Any, given: dict[str, int]) -> Any:
            return await of.verdict("simple_python", [], [{"f": {"x": [1]}}], [{"f": given}])

        with pytest.raises(EnvError, match="status 7"):
            await ask(checker, {"end": 1})
        assert (await ask(checker, {"x": 1})).valid
        verdict = await ask(checker, {"odd": 1})
        assert (verdict.valid, verdict.error) == (False, "raised:AttributeError")
        with pytest.raises(EnvError, match="no answer"):
            await ask(hasty, {"hang": 1})
        checker.close()
        hasty.close()

    asyncio.run(asked())


def test_a_package_that_is_not_there_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    def refused(word: str, **args: Any) -> str:
        with pytest.raises(BadInput, match=word) as told:
            world(args.pop("folder", folder), **args)
        return str(told.value)

    assert "make bfcl" in refused("bfcl-eval 2026.3.23", folder=tmp_path / "none")
    refused("categories", categories=["sql"])
    refused("share", share=1.0)
    refused("tasks for both", longest=1)
    data = folder / "lib/python3/site-packages/bfcl_eval/data"
    answers = data / "possible_answer/BFCL_v4_multiple.json"
    kept = answers.read_text()
    answers.write_text(kept.replace("multiple_3", "multiple_33"))
    assert "make bfcl" in refused("multiple_3")
    answers.write_text("[")
    assert "make bfcl" in refused("BFCL_v4_multiple")
    answers.unlink()
    assert "make bfcl" in refused("BFCL_v4_multiple.json: expected a file of bfcl-eval")
    (folder / "bin/python").unlink()
    assert "make bfcl" in refused("interpreter")
    info = next(folder.rglob("*.dist-info"))
    info.rename(info.with_name("bfcl_eval-2025.1.1.dist-info"))
    assert "make bfcl" in refused("2025.1.1")
