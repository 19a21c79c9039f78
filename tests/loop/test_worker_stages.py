"""Stages whose rollouts are played by workers with the world's tools: collecting from a teacher, training, evaluating."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, message
from forked import Forked
from virtual import on_event_loop

from sparring.launch.run import opened
from sparring.launch.run_server import answered_outside
from sparring.recipe.load import load
from sparring.recipe.run_config import resolve
from sparring.stages.context import renderer_of
from sparring.stages.data.demonstrations import demonstrations
from sparring.store.sqlite import SqliteStore
from sparring.types import Message, Task

WORKER = """
import http.client, json, sys

from sparring.workers import claim

(keys,) = sys.argv[1:]
keys = json.load(open(keys))


def post(rollout, path, body, **headers):
    connection = http.client.HTTPConnection(rollout.url.removeprefix("http://"))
    headers = {"Authorization": "Bearer " + rollout.key, "Accept": "application/json, text/event-stream", **headers}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read().decode()
    assert response.status in (200, 202), (response.status, text)
    return json.loads(text or "{}"), response.headers


def tools(rollout, id, method, headers, **parameters):
    body = {"jsonrpc": "2.0", "id": id, "method": method, "params": parameters}
    answer, sent = post(rollout, rollout.mcp.removeprefix(rollout.url), body, **headers)
    assert answer["id"] == id, answer
    return answer["result"], sent


for rollout in claim(keys["url"], keys["worker_key"]):
    about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "w", "version": "1"}}
    begun, sent = tools(rollout, 0, "initialize", {}, **about)
    session = {"Mcp-Session-Id": sent["Mcp-Session-Id"], "MCP-Protocol-Version": begun["protocolVersion"]}
    post(rollout, "/mcp", {"jsonrpc": "2.0", "method": "notifications/initialized"}, **session)
    listed, _ = tools(rollout, 1, "tools/list", session)
    assert [tool["name"] for tool in listed["tools"]] == [tool["function"]["name"] for tool in rollout.tools]
    code = "print(%s)" % rollout.messages[-1]["content"].removesuffix(" = ?")
    called, _ = tools(rollout, 2, "tools/call", session, name="python", arguments={"code": code})
    ask = {"model": "policy", "messages": rollout.messages, "tools": rollout.tools}
    answer, _ = post(rollout, "/v1/chat/completions", ask)
    print(json.dumps([rollout.rollout, code[6:-1], called["content"][0]["text"].strip()]), flush=True)
    rollout.finish(called["content"][0]["text"].strip())
"""


def total(question: str) -> int:
    return sum(map(int, question.removesuffix(" = ?").split(" + ")))


def settings(*each: str) -> list[str]:
    return [word for setting in each for word in ("--set", setting)]


@pytest.mark.slow
def test_workers_collect_train_and_evaluate_with_the_worlds_tools(given: Path) -> None:
    def adds(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return message("." if body["max_tokens"] == 1 else str(total(body["messages"][-1]["content"])))

    server = ChatServer(adds)
    recipe = given.with_name("workers.toml")
    served = f'[models.teacher]\nserved = {{ kind = "chat", url = "{server.url}", served_model = "big" }}\n'
    recipe.write_text(f"{given.read_text()}\n{served}[collect]\ntasks = 4\n")
    words = settings(
        'run.stages=["collect", "sft", "rl", "eval"]',
        "rollout.harness=workers",
        "rollout.calls_from_code=true",  # the workers compute before they ask
        "collect.attempts=2",
        "sft.steps=2",
        "rl.steps=2",
        "eval.no_tool_tasks=0",
        'eval.checkpoints=["rl"]',
    )
    keys = given.parent / "runs/tiny/keys.json"
    with Forked(["run", recipe, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        assert run.stdout is not None
        said = []
        for line in run.stdout:
            said.append(line)
            if line.startswith("run: programs elsewhere: "):
                break
        else:
            raise AssertionError("".join(said))
        worker = subprocess.Popen([sys.executable, "-c", WORKER, keys], stdout=subprocess.PIPE, text=True)
        try:
            output, _ = run.communicate(timeout=300)
            assert run.returncode == 0, output
            played, _ = worker.communicate(timeout=90)
        finally:
            worker.kill()
            server.stop()
    rows = [json.loads(line) for line in played.splitlines()]
    assert all(int(answer) == total(code) for _, code, answer in rows)
    stages = Counter(rollout.partition("/")[0] for rollout, _, _ in rows)
    with closing(SqliteStore(given.parent / "runs/tiny/store.sqlite", read_only=True)) as store:
        collected, evaluated = store.get("stage/collect"), store.get("stage/eval")
    assert stages == {"collect": 8, "rl": 12, "eval": 6}
    assert (collected["traces"], collected["rollouts"], collected["failed"]) == (4, 8, 0)
    assert (evaluated["rl"]["rollouts"], evaluated["rl"]["lost"]) == (6, [])
    for line in Path(collected["data"]).read_text().splitlines():
        shown, said_last = json.loads(line)["messages"][0], json.loads(line)["messages"][-1]
        assert int(said_last["content"]) == total(shown["content"]), "what sft imitates"


AGENT = """
import http.client, json, os, sys

from sparring.workers import claim

keys, name = sys.argv[1:]
keys = json.load(open(keys))


def post(rollout, path, body):
    connection = http.client.HTTPConnection(rollout.url.removeprefix("http://"))
    headers = {"Authorization": "Bearer " + rollout.key, "Accept": "application/json, text/event-stream"}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


for rollout in claim(keys["url"], keys["worker_key"], worker=name):
    messages = [{"role": "system", "content": "You are an agent."}, *rollout.messages]
    for _ in range(2):
        ask = {"model": "policy", "messages": messages, "tools": rollout.tools}
        status, answer = post(rollout, "/v1/chat/completions", ask)
        if status != 200:
            break
        messages.append(answer["choices"][0]["message"])
        if name == "dies":
            os._exit(9)
        for call in messages[-1].get("tool_calls", ()):
            asked = {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
            _, said = post(rollout, "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": asked})
            text = said["result"]["content"][0]["text"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        if messages[-1]["role"] == "assistant":
            break
    rollout.finish()
"""


def agent(keys: Path, name: str) -> subprocess.Popen[str]:
    """A worker whose agent has a prompt of its own."""
    return subprocess.Popen([sys.executable, "-c", AGENT, keys, name], text=True)


@pytest.mark.slow
@on_event_loop
async def test_the_expert_answers_workers_and_sft_is_shown_what_rl_shows(
    given: Path, wait_for: Callable[[subprocess.Popen[str], str], None]
) -> None:
    """A worker dies with a demonstration, which is played again; the wait for another one is said. What sft imitates
    begins with the very ids that the policy is shown in rl."""
    each = (
        'run.stages=["sft", "rl"]',
        "rollout.harness=workers",
        "rollout.gateway.lease_s=1",
        "rollout.timeouts.stalled_s=1",
        "sft.steps=1",
        "rl.steps=1",
        "env.demonstrations=4",
    )
    keys = given.parent / "runs/tiny/keys.json"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ExitStack() as stack:
        run = stack.enter_context(Forked(["run", given, *settings(*each)], **pipes))
        wait_for(run, "run: programs elsewhere: ")
        assert agent(keys, "dies").wait() == 9
        wait_for(run, "demonstrations: task Sums/demonstration/0 is played again: worker dies: its lease ran out")
        wait_for(run, "demonstrations: no rollout has finished for 1 s: demonstration/")
        playing = agent(keys, "plays")
        stack.callback(playing.kill)
        said, _ = run.communicate(timeout=300)
        assert run.returncode == 0, said
        assert playing.wait(timeout=90) == 0

    with closing(SqliteStore(given.parent / "runs/tiny/store.sqlite", read_only=True)) as store:
        rollouts = [rollout for group in store.groups(stage="rl") for rollout in group.rollouts]
        assert store.get("stage/sft")["rows"] == 4
    assert len(rollouts) == 6
    config = resolve(load(given, [*each, "run.name=again"]))
    async with opened(config) as context, answered_outside(config, context.folder, context.sink.event):
        renderer, tools = renderer_of(context.config, context.input("sft")), context.factory.make().tools
        with agent(context.folder / "keys.json", "plays") as playing:
            shown = await demonstrations(context, renderer, 512)
            playing.kill()

        def prompt(task: Task) -> tuple[int, ...]:
            system = Message(role="system", content="You are an agent.")
            return tuple(renderer.render((system, *task.messages), tools, generation=True).tokens)

        source = context.factory.tasks("demonstration", config.run.seed)
        for name, rendered in shown:
            task = source.next()
            assert task is not None and name == f"task {task.id}"
            begun = prompt(task)
            assert rendered.tokens[: len(begun)] == begun
        for rollout in rollouts:
            assert rollout.trajectories[0].segments[0].tokens == prompt(rollout.task)
