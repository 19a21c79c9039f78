"""`sparring check` of a run whose rollouts workers will play: one of the check's own plays, or one that is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from refusals import without_waits
from virtual import on_event_loop

from sparring.cli.main import main
from sparring.errors import BadInput
from sparring.launch.run import opened
from sparring.recipe.load import load
from sparring.recipe.run_config import resolve
from sparring.stages.preflight.environment import first_tasks
from sparring.stages.preflight.workers import Rehearsal, check_idle

HERE = Path(__file__).parent

SHOP = """
from sparring import Env
from sparring.types import Message, Score, ToolCall


class Shop(Env):
    def generate(self, random):
        n = random.randint(0, 99)
        return {"prompt": f"Price of {n}?", "answer": str(2 * n)}

    async def score(self, trajectory):
        said = [s.message.content for s in trajectory.segments if s.message and s.message.role == "assistant"]
        return Score(reward=float(said[-1:] == [self.task.data["answer"]]))

    def expert(self, task):
        def reply(messages):
            if messages[-1].role == "tool":
                return Message(role="assistant", content=str(int(messages[-1].content)))
            call = ToolCall(id="call_0", name="price", arguments={"of": int(task.data["answer"]) // 2})
            return Message(role="assistant", tool_calls=(call,))

        return reply
"""

WORKER = """
import json, os, sys

from sparring.rewards import post
from sparring.workers import claim

how, keys = sys.argv[1], json.load(open(sys.argv[2]))
TOOL = {"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {
    "of": {"type": "integer"}}, "required": ["of"]}}}
if how == "ends":
    sys.exit(3)
for rollout in claim(keys["url"], keys["worker_key"]):
    messages = list(rollout.messages)
    while how == "plays":
        body = {"model": "policy", "messages": messages, "tools": [TOOL]}
        status, answer = post(rollout.url, "/v1/chat/completions", rollout.key, body)
        messages.append(json.loads(answer)["choices"][0]["message"])
        calls = messages[-1].get("tool_calls") or ()
        for call in calls:
            price = 2 * json.loads(call["function"]["arguments"])["of"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(price)})
        if not calls:
            break
    rollout.finish("0" if how == "idles" else None)
"""


def checked(recipe: Path, *more: str, **settings: str) -> int:
    words = [f"rollout.harness={settings.pop('harness', 'workers')}", "env.limits.max_turns=3"]
    words += [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
    return main(["check", str(recipe), *(word for each in words for word in ("--set", each)), *more])


@pytest.fixture
def shop(tmp_path: Path) -> str:
    (tmp_path / "shop.py").write_text(SHOP)
    return f"{tmp_path / 'shop.py'}:Shop"


def test_the_checks_own_worker_plays_with_the_tools_of_the_world(
    given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The expert's calls run at `/mcp`, so that it earns what it earns of a worker in the run."""
    assert checked(given, env__name=f"{HERE / 'tiny_world.py'}:Sums") == 0
    said = capsys.readouterr().out
    assert "harness: workers will play; a worker of this check played task Sums/" in said
    assert "expert 1, empty answer 0" in said
    assert not (given.parent / "runs").exists(), "a check leaves nothing"


def test_a_tool_of_the_workers_own_is_told_and_no_refusal(
    given: Path, shop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(given, env__name=shop) == 0
    assert "its expert calls price, which is no tool of the world" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "status", "told"),
    [
        ("plays", 0, "expert 1, empty answer 0"),
        ("idles", 2, "requested no reply"),
        ("ends", 2, "--worker: expected a worker"),
    ],
)
def test_the_users_worker_plays_and_one_that_does_nothing_is_refused(
    given: Path, shop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, status: int, told: str
) -> None:
    """Its tools are its own; it is told where to claim."""
    (tmp_path / "worker.py").write_text(WORKER)
    command = (sys.executable, str(tmp_path / "worker.py"), how, "{keys}")
    assert checked(given, "--worker", *command, env__name=shop) == status
    told_at = capsys.readouterr()
    assert told in (told_at.err if status else told_at.out)


@on_event_loop
async def test_a_rollout_in_which_a_worker_asked_for_nothing_may_not_count(given: Path) -> None:
    """No harness of ours lets it: here a chat stands in its place, which asks."""
    async with opened(resolve(load(given))) as context:
        with pytest.raises(BadInput, match="expected no rollout of a worker that asks for nothing"):
            await check_idle(context, first_tasks(context.config, context.factory)[0], Rehearsal())


def test_a_worker_for_a_run_without_workers_is_refused(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(given, "--worker", sys.executable, harness="chat") == 2
    assert without_waits(capsys.readouterr().err).startswith("--worker: expected a recipe that workers play")
