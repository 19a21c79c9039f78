"""`rollout.models`: an agent that names a vendor's model is answered as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparring.cli.main import main

AGENT = """
import json

from sparring.types import Message, ToolCall

async def agent(episode, openai_client):
    opened = await episode.env.open(episode.task, episode.box)
    messages = [{"role": m.role, "content": m.content} for m in (*episode.task.messages, *opened.messages)]
    tools = [
        {"type": "function", "function": {"name": t.name, "parameters": dict(t.parameters)}} for t in episode.env.tools
    ]
    done = False
    while not done:
        reply = await openai_client.chat.completions.create(model="gpt-large", messages=messages, tools=tools)
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        calls = tuple(
            ToolCall(id=call.id, name=call.function.name, arguments=json.loads(call.function.arguments))
            for call in said.tool_calls or ()
        )
        answer = await episode.env.step(Message(role="assistant", content=said.content or "", tool_calls=calls))
        messages += [{"role": m.role, "content": m.content, "tool_call_id": m.tool_call_id} for m in answer.messages]
        done = answer.done
"""


def test_names_of_models_are_those_of_the_recipe(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    words = ["check", str(given), "--set", f"rollout.harness={tmp_path / 'agent.py'}:agent"]
    assert main(words) == 2
    assert "expected one of policy" in (capsys.readouterr().err)
    assert main([*words, "--set", 'rollout.models={"gpt-*" = "policy", "gpt-mini" = "auxiliary"}']) == 0
    capsys.readouterr()
    assert main([*words, "--set", 'rollout.models={"gpt-*" = "teacher"}']) == 2
    assert "rollout.models" in capsys.readouterr().err
