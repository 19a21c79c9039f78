"""The collect stage: a teacher's traces become what sft imitates; what is done is not asked for again."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from chat_server import ChatServer, message

from sparring.cli.main import main
from sparring.errors import BadInput
from sparring.launch.run import opened
from sparring.recipe.load import load
from sparring.recipe.run_config import resolve
from sparring.stages.models.teacher import TeacherUse
from sparring.store.sqlite import SqliteStore


def solves(body: dict) -> tuple[int, dict]:
    """Adds with the tool, after a thought; gets every task wrong whose sum ends in 3."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        total = last["content"].strip()
        return message("none" if total.endswith("3") else total, reasoning_content="it says so")
    call = {"name": "python", "arguments": json.dumps({"code": f"print({last['content'].removesuffix(' = ?')})"})}
    return message(tool_calls=[{"id": "c1", "type": "function", "function": call}], reasoning_content="let me add")


def asked_to_teach(server: ChatServer) -> list[dict]:
    """What was asked but for the check's question, whether anybody answers."""
    return [body for body in server.bodies if body["max_tokens"] != 1]


def collecting(given: Path, server: ChatServer, stages: str, *settings: str) -> int:
    reply = server.reply
    server.reply = lambda body: message(".") if body["max_tokens"] == 1 else reply(body)
    recipe = given.with_name("collect.toml")
    served = f'\n[models.teacher]\nserved = {{ kind = "chat", url = "{server.url}", served_model = "big" }}\n'
    text = given.read_text().replace("[models.policy]\n", "[models.policy]\nthinking = true\n")
    recipe.write_text(text + served + "\n[collect]\ntasks = 12\nattempts = 2\n")
    words = [
        word for setting in (f"run.stages={stages}", "observe.progress=off", *settings) for word in ("--set", setting)
    ]
    return main(["run", str(recipe), *words])


@pytest.mark.slow
def test_traces_become_demonstrations(given: Path) -> None:
    server = ChatServer(solves)
    try:
        assert collecting(given, server, '["collect", "sft"]', "sft.steps=2") == 0
        asked = len(server.bodies)
        assert collecting(given, server, '["collect", "sft"]', "sft.steps=2") == 0
    finally:
        server.stop()
    rows = [json.loads(line) for line in (given.parent / "runs/tiny/collect/traces.jsonl").read_text().splitlines()]
    assert len(asked_to_teach(server)) == 12 * 2 * 2 and asked == len(server.bodies), (
        "a finished stage asks nobody again"
    )
    answers = [row["messages"][-1]["content"] for row in rows]
    assert 0 < len(rows) <= 12 and not any(answer.endswith("3") or answer == "none" for answer in answers)
    roles = [[entry["role"] for entry in row["messages"]] for row in rows]
    assert all(found == ["user", "assistant", "tool", "assistant"] for found in roles)
    assert all(row["messages"][1]["reasoning_content"] == "let me add" and row["reward"] == 1.0 for row in rows)


@pytest.mark.slow
def test_a_collection_goes_on_where_it_broke_off(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A teacher that is wrong in what it does, and then out of credit: only what it did not do is asked for again."""
    answered: Counter[str] = Counter()

    def breaks(body: dict) -> tuple[int, dict]:
        if answered.total() == 16:
            return 400, {"error": "out of credit"}
        answered[body["messages"][0]["content"]] += 1
        return message("none")

    settings = ("rollout.retries.delay_s=0.0", "collect.max_concurrent_rollouts=4")
    server = ChatServer(breaks)
    try:
        assert collecting(given, server, '["collect"]', *settings) == 2
        assert "collect.min_reward" in capsys.readouterr().err
        server.bodies.clear()
        server.reply = solves
        assert collecting(given, server, '["collect"]', *settings) == 0
    finally:
        server.stop()
    again = {body["messages"][0]["content"] for body in asked_to_teach(server)}
    done = {prompt for prompt, count in answered.items() if count == 2}
    assert len(again) + len(done) == 12 and not again & done and done


def test_a_teacher_that_never_ends_is_told_from_one_that_earns_nothing(
    given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def calls(body: dict) -> tuple[int, dict]:
        return solves({**body, "messages": body["messages"][:1]})

    server = ChatServer(calls)
    try:
        assert collecting(given, server, '["collect"]', "collect.min_reward=0.0") == 2
    finally:
        server.stop()
    assert "got none among 24 rollouts: 0 failed, 0 had no reward, 24 were cut short" in capsys.readouterr().err


def test_what_nobody_scored_is_counted_and_not_kept(given: Path) -> None:
    """It neither failed nor earned anything: None is not 0."""

    def adds(body: dict) -> tuple[int, dict]:
        first, second = body["messages"][-1]["content"].removesuffix(" = ?").split(" + ")
        return message(str(int(first) + int(second)))

    server = ChatServer(adds)
    world = Path(__file__).parent / "tiny_world.py:SomeUnscored"
    try:
        assert collecting(given, server, '["collect"]', f"env.name={world}", "collect.min_reward=0.0") == 0
    finally:
        server.stop()
    with closing(SqliteStore(given.parent / "runs/tiny/store.sqlite")) as store:
        found = store.get("stage/collect")
    rows = [json.loads(line) for line in Path(found["data"]).read_text().splitlines()]
    assert found["rollouts"] == 24 and found["failed"] == 0 and 0 < found["unscored"] < 24
    assert found["traces"] == len(rows) == 12 - found["unscored"] // 2
    assert all(row["reward"] == 1.0 and int(row["messages"][-1]["content"]) % 2 == 0 for row in rows)


def test_what_the_policy_cannot_say_is_left_out_and_counted(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One conversation in twelve has a thought, and the policy thinks not; where all have one, the recipe is wrong."""
    thinking: set[str] = set()

    def thinks(body: dict) -> tuple[int, dict]:
        question = body["messages"][0]["content"]
        if not thinking:
            thinking.add(question)
        status, reply = solves(body)
        if question not in thinking:
            reply["choices"][0]["message"].pop("reasoning_content", None)
        return status, reply

    server = ChatServer(thinks)
    settings = (
        "sft.steps=1",
        "models.policy.thinking=false",
        "collect.min_reward=0.0",
        "collect.max_concurrent_rollouts=1",
    )
    try:
        assert collecting(given, server, '["collect", "sft"]', *settings) == 0
        server.reply = solves
        assert collecting(given, server, '["collect", "sft"]', *settings, "run.name=all") == 2
    finally:
        server.stop()
    assert "trace 1: demonstration: expected a reply that continues the generation prompt" in capsys.readouterr().err
    with closing(SqliteStore(given.parent / "runs/tiny/store.sqlite")) as store:
        found = store.get("stage/collect")
    assert (found["unsaid"], found["traces"], len(Path(found["data"]).read_text().splitlines())) == (1, 11, 11)


def test_a_key_that_is_not_there_is_refused_before_anything_starts(
    given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = 'models.teacher.served={kind="chat", url="http://127.0.0.1:1/v1", served_model="big", api_key_env="NO_SUCH_KEY"}'
    words = ("--set", served, "--set", "collect.model=teacher", "--set", 'run.stages=["collect", "sft"]')
    assert main(["check", str(given), *words]) == 2
    assert "environment variable NO_SUCH_KEY: expected an API key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stages", "more"),
    [
        ('["collect", "sft"]', ("collect.model=teacher",)),
        ('["rl", "distill"]', ('models.teacher.path="CHECKPOINT"', 'distill.teachers={"*"="teacher"}')),
    ],
)
def test_a_teacher_that_does_not_answer_is_refused_before_anything_starts(
    stages: str, more: tuple[str, ...], given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = 'kind="chat", served_model="big"' if "collect" in stages else 'kind="remote"'
    served = f'models.teacher.served={{{kind}, url="http://127.0.0.1:1/v1"}}'
    settings = (served, f"run.stages={stages}", *(setting.replace("CHECKPOINT", str(checkpoint)) for setting in more))
    assert main(["run", str(given), *(word for setting in settings for word in ("--set", setting))]) == 2
    said = capsys.readouterr().err
    assert "models.teacher: expected a teacher" in said and "start its server, or correct models.teacher.served" in said
    assert not (given.parent / "runs/tiny/config.toml").exists()


def test_who_has_taught_already_need_not_answer(given: Path) -> None:
    async def checked() -> list[list[str]]:
        served = 'models.teacher.served={kind="chat", url="http://127.0.0.1:1/v1", served_model="big"}'
        settings = [served, "collect.model=teacher", 'run.stages=["collect", "sft"]', "observe.progress=off"]
        async with opened(resolve(load(given, settings))) as context:
            with pytest.raises(BadInput, match="a teacher that answers"):
                await TeacherUse().ask(context)
            context.store.put("stage/collect", {})
            return [await TeacherUse().ask(context)]

    assert asyncio.run(checked()) == [[]]


@pytest.mark.slow
def test_each_domain_is_collected_from_its_teacher(given: Path) -> None:
    server = ChatServer(solves)
    other = f'models.other.served={{kind="chat",url="{server.url}",served_model="small"}}'
    try:
        assert collecting(given, server, '["collect"]', other, 'collect.teachers={even="teacher",odd="other"}') == 0
        assert (
            collecting(given, server, '["collect"]', "run.name=two", 'collect.teachers={even="teacher",odd="nobody"}')
            == 2
        )
    finally:
        server.stop()
    questions = {body["messages"][0]["content"]: body["model"] for body in asked_to_teach(server)}
    sums = {sum(map(int, text.removesuffix(" = ?").split(" + "))): name for text, name in questions.items()}
    assert len(sums) > 4 and set(sums.values()) == {"big", "small"}
    assert all(name == ("small" if total % 2 else "big") for total, name in sums.items())


def test_every_agent_of_a_program_is_collected_with_its_own_tools(given: Path) -> None:
    """The sub-agent speaks last: neither is its conversation the only one, nor its reply the rollout's answer."""

    def speaks(body: dict) -> tuple[int, dict]:
        if body["messages"][0]["content"].startswith("Search"):
            return message("nothing", reasoning_content="I search")
        return solves(body)

    server = ChatServer(speaks)
    harness = f"rollout.harness={Path(__file__).parent / 'branching_client.py'}:agent"
    settings = (
        harness,
        "collect.min_reward=0.0",
        "collect.tasks=3",
        "sft.steps=1",
        "rollout.retries.rebuilds=0",
        "env.limits.max_turns=4",
    )
    try:
        assert collecting(given, server, '["collect", "sft"]', *settings) == 0
    finally:
        server.stop()
    rows = [json.loads(line) for line in (given.parent / "runs/tiny/collect/traces.jsonl").read_text().splitlines()]
    assert [[entry["role"] for entry in row["messages"]] for row in rows] == [
        ["user", "assistant", "tool", "assistant"],
        ["user", "assistant"],
    ] * 3
    assert [list(row) for row in rows] == [["messages", "task", "reward"], ["messages", "tools", "task", "reward"]] * 3
    assert [tool["function"]["name"] for tool in rows[1]["tools"]] == ["search"]
    with closing(SqliteStore(given.parent / "runs/tiny/store.sqlite")) as store:
        assert store.get("stage/sft")["rows"] == 6, "each conversation is a row"
