"""Stages whose rollouts are played by workers with the world's tools: collecting from a teacher, training, evaluating."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from forked import Forked

from sparring.store.sqlite import SqliteStore
from sparring.testing.chat_server import ChatServer, message

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
