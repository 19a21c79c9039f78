"""A teacher that is collected from through an agent program: sft sees the program's own prompts."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, message
from forked import Forked, finished

from sparring.cli.main import main
from sparring.launch.run import opened
from sparring.recipe.load import load
from sparring.recipe.run_config import resolve
from sparring.stages.context import renderer_of
from sparring.stages.data.demonstrations import demonstrations
from sparring.store.sqlite import SqliteStore

HERE = Path(__file__).parent
PROGRAM = (
    f"env.name={HERE / 'clerk_world.py'}:Errands",
    f"rollout.harness={HERE / 'clerk.toml'}",
    "rollout.sampling.max_turn_tokens=48",
    "rollout.retries.delay_s=0.0",
    "env.limits.max_turns=3",
    "env.limits.max_tokens=120",
    "observe.progress=off",
)


def words(recipe: Path, *settings: str) -> list[str]:
    return [str(recipe), *(word for setting in (*PROGRAM, *settings) for word in ("--set", setting))]


@pytest.fixture
def teacher(given: Path) -> Path:
    """The tiny model, taught by the world's expert through the program."""
    settings = ('run.stages=["sft"]', "run.name=teacher", "sft.steps=60", "sft.rows_per_step=8")
    train = "sft.train={learning_rate=1e-2, save_every=0}"
    assert main(["run", *words(given, *settings, train)]) == 0
    return given.parent / "runs/teacher/sft/model"


@pytest.mark.slow
def test_a_native_teacher_is_collected_from_through_a_program(given: Path, teacher: Path) -> None:
    """What sft imitates begins with the very ids that the policy is shown in rl."""
    settings = (
        f'models.teacher.path="{teacher}"',
        'run.stages=["collect", "sft", "rl"]',
        "collect.tasks=6",
        "collect.attempts=2",
        "sft.steps=2",
        "rl.steps=2",
    )
    assert main(["run", *words(given, *settings)]) == 0
    run = given.parent / "runs/tiny"
    rows = [json.loads(line) for line in (run / "collect/traces.jsonl").read_text().splitlines()]
    assert len(rows) > 3 and all(row["reward"] == 1.0 for row in rows)
    for row in rows:
        assert row["messages"][0] == {"role": "system", "content": "You are a clerk."}
        assert [tool["function"]["name"] for tool in row["tools"]] == ["sh"]
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["system", "user", "assistant", "tool", "assistant"]

    async def imitated() -> dict[str, tuple[int, ...]]:
        async with opened(resolve(load(given, [*PROGRAM, *settings]))) as context:
            shown = await demonstrations(context, renderer_of(context.config, context.input("sft")), 512)
        return {row["messages"][1]["content"]: each.tokens for row, (_, each) in zip(rows, shown, strict=True)}

    begun = asyncio.run(imitated())
    with closing(SqliteStore(run / "store.sqlite", read_only=True)) as store:
        rollouts = [rollout for group in store.groups(stage="rl") for rollout in group.rollouts]
    compared = 0
    for rollout in rollouts:
        first = rollout.trajectories[0].segments[0]
        prompt = rollout.task.messages[-1].content
        if prompt in begun:
            assert begun[prompt][: len(first.tokens)] == first.tokens
            compared += 1
    assert compared > 0


def teaches(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Write the note by the program's tool, after a thought."""
    if body["max_tokens"] == 1:  # whether anybody answers
        return message(".")
    if body["messages"][-1]["role"] == "tool":
        return message("Done.", reasoning_content="it is there")
    call = {"name": "sh", "arguments": json.dumps({"command": "echo ok > note"})}
    return message(tool_calls=[{"id": "c1", "type": "function", "function": call}], reasoning_content="I write it")


def collected(given: Path, server: ChatServer, *settings: str) -> tuple[int, list[dict[str, Any]]]:
    """Collect from a served chat model through the program and imitate it; the exit status, and the traces."""
    served = f'models.teacher.served={{kind="chat",url="{server.url}",served_model="big"}}'
    stages = ('run.stages=["collect", "sft"]', "models.policy.thinking=true", "sft.steps=1", "collect.tasks=6")
    status = main(["run", *words(given, served, *stages, *settings)])
    path = given.parent / "runs/tiny/collect/traces.jsonl"
    return status, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_served_chat_model_is_collected_from_through_a_program(given: Path) -> None:
    server = ChatServer(teaches)
    try:
        status, rows = collected(given, server)
    finally:
        server.stop()
    assert status == 0 and len(rows) == 6
    asked = [body for body in server.bodies if body["max_tokens"] != 1]
    assert len(asked) == 12 and all(body["tools"] == rows[0]["tools"] for body in asked)
    for row in rows:
        assert row["messages"][0] == {"role": "system", "content": "You are a clerk."}
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
        assert row["messages"][2]["reasoning_content"] == "I write it" and row["reward"] == 1.0


@pytest.mark.slow
def test_a_reply_for_which_the_policys_context_has_no_room_ends_the_rollout_and_is_counted(
    given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The teacher's context is larger, and the program does not begin anew. Where most end so, the recipe is wrong."""
    talkative: set[str] = set()
    most = 1

    def talks(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, answer = teaches(body)
        asked = body["messages"][1:2]
        if asked and len(talkative) < most:
            talkative.add(asked[0]["content"])
        if body["messages"][-1]["role"] == "tool" and asked[0]["content"] in talkative:
            answer["choices"][0]["message"]["content"] = "word " * 900
        return status, answer

    server = ChatServer(talks)
    try:
        status, rows = collected(given, server, "collect.tasks=10")
        assert status == 0 and len(rows) == 9
        most = 10
        assert collected(given, server, "run.name=all")[0] == 2
    finally:
        server.stop()
    said = capsys.readouterr().err
    assert "6 were cut short (6 of these at the end of the context, of the policy or of the teacher)" in said
    with closing(SqliteStore(given.parent / "runs/tiny/store.sqlite")) as store:
        found = store.get("stage/collect")
    assert (found["unfinished"], found["full"], found["unsaid"], found["traces"]) == (1, 1, 0, 9)


def test_a_collection_that_is_interrupted_keeps_what_it_has(given: Path) -> None:
    """Ctrl-C comes while the program of the second task waits for its first reply; only the first is done."""
    asked: list[str] = []
    runs: list[Forked] = []

    def stops(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if len(body["messages"]) == 2:
            asked.append(body["messages"][1]["content"])
            if len(asked) == 2:
                runs[0].send_signal(signal.SIGINT)
                runs[0].wait()
        return teaches(body)

    server = ChatServer(stops)
    served = f'models.teacher.served={{kind="chat",url="{server.url}",served_model="big"}}'
    more = ('run.stages=["collect"]', "collect.tasks=3", "collect.max_concurrent_rollouts=1")
    try:
        with Forked(["run", *words(given, served, *more)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
            runs.append(run)
            run.communicate()
        assert run.returncode == 130 and len(asked) == 2
        before = asked[:1]
        asked.clear()
        assert finished(["run", *words(given, served, *more)]).returncode == 0
    finally:
        server.stop()
    assert len(asked) == 2 and not set(asked) & set(before)
    rows = (given.parent / "runs/tiny/collect/traces.jsonl").read_text().splitlines()
    assert [json.loads(row)["messages"][1]["content"] for row in rows] == [*before, *asked]


def test_a_teacher_that_refuses_is_named_with_what_it_said(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is asked once for each rollout. Where some are kept, the run goes on and says so."""
    refused = 99

    def refuses(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        nonlocal refused
        if body["max_tokens"] == 1 or refused == 0:
            return teaches(body)
        refused -= 1
        return 400, {"error": "out of credit"}

    server = ChatServer(refuses)
    more = ("collect.tasks=4", "observe.progress=plain")
    try:
        status, rows = collected(given, server, *more)
        assert (status, rows) == (2, [])
        assert len([body for body in server.bodies if body["max_tokens"] != 1]) == 4
        refused = 2
        status, rows = collected(given, server, *more)
        assert status == 0 and len(rows) == 2
    finally:
        server.stop()
    said = capsys.readouterr()
    assert "got none among 4 rollouts: 4 failed, 0 had no reward, 0 were cut short; chat endpoint " in said.err
    assert ': 400: {"error":"out of credit"}; lower it, or take another teacher' in said.err
    assert "2 of 4 rollouts failed; chat endpoint " in said.out + said.err


COMPACTING = (
    f"env.name={HERE / 'clerk_world.py'}:Readings",
    f"rollout.harness={HERE / 'compacting_clerk.toml'}",
    "env.limits.max_turns=12",
    "env.limits.max_tokens=600",
    "env.limits.max_tool_calls=12",
    "models.policy.thinking=false",
)


def reads(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """What the expert of `Readings` says, by a chat server."""
    said = body["messages"][-1]
    if body["max_tokens"] == 1 or said["role"] == "tool" and said["content"] == "nothing":
        return message("Done.")
    command = "echo ok > note" if said["content"].startswith("It was too long.") else "seq 11 40"
    call = {"name": "sh", "arguments": json.dumps({"command": command})}
    return message(tool_calls=[{"id": "c1", "type": "function", "function": call}])


@pytest.mark.full
def test_an_experts_program_is_told_that_its_prompt_is_too_long_for_the_policy(given: Path) -> None:
    """It begins anew, and sft sees both branches, each within the policy's context."""
    settings = (*COMPACTING, 'run.stages=["sft"]', "sft.steps=1", "env.demonstrations=3")
    assert main(["run", *words(given, *settings)]) == 0

    async def imitated() -> list[tuple[str, int]]:
        async with opened(resolve(load(given, [*PROGRAM, *settings]))) as context:
            shown = await demonstrations(context, renderer_of(context.config, context.input("sft")), 512)
        return [(name, len(each.tokens)) for name, each in shown]

    shown = asyncio.run(imitated())
    assert len(shown) == 6 and all("branch" in name for name, _ in shown)
    assert all(length <= 512 for _, length in shown)


@pytest.mark.parametrize("own", [None, pytest.param(100, marks=pytest.mark.full)], ids=["the policy's", "its own"])
def test_a_teachers_program_is_told_that_its_prompt_is_too_long(given: Path, own: int | None) -> None:
    """For the policy, or for the teacher, whose context of so many characters is shorter: nothing is left out."""
    refused = []

    def answers(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        length = sum(len(each["content"]) for each in body["messages"])
        if own is not None and length > own:
            refused.append(length)
            text = f"The input ({length} tokens) is longer than the model's context length ({own} tokens)."
            return 400, {"error": {"message": text}}
        return reads(body)

    server = ChatServer(answers)
    try:
        status, rows = collected(given, server, *COMPACTING, "collect.tasks=3")
    finally:
        server.stop()
    assert status == 0 and [row["reward"] for row in rows] == [1.0] * 6
    begun = [row["messages"][1]["content"] for row in rows]
    assert sum(text.startswith("It was too long.") for text in begun) == 3
    assert len(refused) == (0 if own is None else 3), "each was asked once"
    with closing(SqliteStore(given.parent / "runs/tiny/store.sqlite", read_only=True)) as store:
        found = store.get("stage/collect")
    assert (found["unsaid"], found["unfinished"], found["failed"]) == (0, 0, 0)
