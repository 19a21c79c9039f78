"""What the model reads of a command."""

from __future__ import annotations

import asyncio

import pytest

from sparring.envs.base import Env
from sparring.envs.tools.python import PythonTool, output_text
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.types import BoxSpec, ExecResult, Message, Task, ToolCall


class World(PythonTool, Env):
    """Nothing but the tool."""


def test_the_schema_is_short() -> None:
    (spec,) = World().tools
    assert (spec.name, spec.description) == ("python", "Run Python code.")
    assert spec.parameters == {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ExecResult(exit_code=0, stdout="4\n", stderr="a warning", wall_s=0), "4"),
        (ExecResult(exit_code=0, stdout="", stderr="", wall_s=0), "no output"),
        (ExecResult(exit_code=1, stdout="", stderr="Traceback\n  ...\nNameError: x\n", wall_s=0), "NameError: x"),
        (ExecResult(exit_code=1, stdout="4\n", stderr="NameError: x", wall_s=0), "4\nNameError: x"),
        (ExecResult(exit_code=3, stdout="", stderr="", wall_s=0), "exit code 3"),
        (ExecResult(exit_code=-9, stdout="1\n", stderr="", wall_s=2, timed_out=True), "1\ntimed out after 2 s"),
        (ExecResult(exit_code=-9, stdout="", stderr="", wall_s=0, out_of_memory=True), "out of memory"),
        (ExecResult(exit_code=0, stdout="aaa", stderr="", wall_s=0, truncated=True), "aaa\noutput truncated"),
    ],
)
def test_output_is_one_short_text(result: ExecResult, text: str) -> None:
    assert output_text(result, limit_s=2.0) == text


def test_code_runs_in_the_box() -> None:
    programs = ("print(6*7)", "1/0", "while True: pass", "x='a'*10**10", "print('a'*9000)")
    spec = BoxSpec(timeout_s=1.0)

    async def run() -> list[str]:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1))
        box = await boxes.take(spec)
        world = World()
        await world.open(Task(id="t", env="w", messages=(), box=spec), box)
        calls = tuple(ToolCall(id=str(i), name="python", arguments={"code": code}) for i, code in enumerate(programs))
        seen = await world.step(Message(role="assistant", tool_calls=calls))
        await box.close()
        await boxes.close()
        return [m.content for m in seen.messages]

    found = asyncio.run(run())
    assert found[:3] == ["42", "ZeroDivisionError: division by zero", "timed out after 1 s"]
    assert found[3] in ("out of memory", "MemoryError")
    assert found[4].endswith("a\noutput truncated")
