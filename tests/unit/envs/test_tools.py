"""Tools that know the box's protocol alone: what a model reads of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sparring.envs.base import Env
from sparring.envs.tools.bash import BashTool
from sparring.envs.tools.editor import EditorTool
from sparring.envs.tools.python import PythonTool, output_text
from sparring.envs.tools.terminal import TerminalTool
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.types import BoxSpec, ExecResult, Message, Task, ToolCall


class Everything(PythonTool, BashTool, EditorTool, TerminalTool, Env):
    """Python, a shell, an editor and a terminal."""


def said(*calls: tuple[str, dict[str, Any]], **spec: Any) -> list[str]:
    """What the tools answer, one call after another in one world."""
    enabled = spec.pop("enabled", True)
    wanted = BoxSpec(**{"timeout_s": 20.0, "processes": 32} | spec)

    async def play() -> list[str]:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1, enabled=enabled))
        box = await boxes.take(wanted)
        world = Everything()
        await world.open(Task(id="t", env="w", messages=(), box=wanted), box)
        made = tuple(ToolCall(id=str(at), name=name, arguments=given) for at, (name, given) in enumerate(calls))
        seen = await world.step(Message(role="assistant", tool_calls=made))
        await boxes.close()
        return [message.content for message in seen.messages]

    return asyncio.run(play())


def bash(*commands: str, **spec: Any) -> list[str]:
    return said(*(("bash", {"command": command}) for command in commands), **spec)


def test_each_tool_has_a_schema() -> None:
    specs = {spec.name: spec for spec in Everything().tools}
    assert set(specs) == {"python", "bash", "view", "create", "replace", "insert", "type"}
    assert specs["python"].description == "Run Python code."
    code = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    assert specs["python"].parameters == code
    assert specs["bash"].parameters["required"] == ["command"]
    assert specs["type"].parameters["properties"]["keys"]["items"] == {"type": "string"}
    assert specs["view"].parameters["required"] == ["path"]


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
    found = said(*(("python", {"code": code}) for code in programs), timeout_s=1.0)
    assert found[:3] == ["42", "ZeroDivisionError: division by zero", "timed out after 1 s"]
    assert found[3] in ("out of memory", "MemoryError")
    assert found[4].endswith("a\noutput truncated")


def test_a_shell_lives_on_between_calls() -> None:
    answers = bash("cd /tmp; x=5", "pwd; echo $x; ls nothing", "exit 3", "echo $x.", "kill -9 $$", "if")
    assert answers[0] == "no output"
    assert answers[1].startswith("/tmp\n5\n") and answers[1].endswith("directory\nexit code 2")
    assert answers[2].endswith("exit code 3\nthe shell has ended; the next command starts another")
    assert answers[3] == "."
    assert answers[4] == "exit code 137\nthe shell has ended; the next command starts another"
    assert answers[5].endswith("exit code 2")


def test_limits_of_a_command_are_read_by_the_model() -> None:
    slow, long, after = bash("echo so far; sleep 3600", "seq 100000", "echo on", timeout_s=1.0, output_bytes=100)
    assert slow == "so far\ntimed out after 1 s"
    assert long.startswith("1\n2\n") and "bytes missing]" in long and long.endswith("100000")
    assert after == "on"


def test_memory_that_a_command_took_is_told() -> None:
    hog = "python3 -S -c 'x = []\nwhile True: x.append(b\"x\" * (1 << 20))'"
    answer, after = bash(hog, "echo on", memory_bytes=48 << 20)
    assert "out of memory" in answer or "MemoryError" in answer
    assert after == "on"


def test_the_editor_sees_and_changes_files() -> None:
    answers = said(
        ("create", {"path": "a/f.txt", "text": "one\ntwo\nthree\n"}),
        ("view", {"path": "a"}),
        ("replace", {"path": "a/f.txt", "old": "two", "new": "2"}),
        ("insert", {"path": "a/f.txt", "after_line": 0, "text": "zero\n"}),
        ("view", {"path": "a/f.txt"}),
        ("view", {"path": "a/f.txt", "first_line": 5}),
        ("bash", {"command": "cat a/f.txt"}),
    )
    assert answers[:2] == ["wrote 14 bytes", "f.txt"]
    assert answers[4] == "1\tzero\n2\tone\n3\t2\n4\tthree\n5\t"
    assert answers[5:] == ["5\t", "zero\none\n2\nthree"]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (("view", {"path": "gone"}), "error: gone: No such file or directory"),
        (("view", {"path": "pipe"}), "error: pipe: No such device or address"),
        (("view", {"path": "many", "first_line": 9}), "error: many has lines 1 to 4, not 9"),
        (("view", {"path": ""}), "error: a path has a name, and no NUL"),
        (("view", {"path": "bytes"}), "error: bytes: not UTF-8 text"),
        (("view", {"path": "large"}), "error: large: more than 1048576 bytes, which is most_bytes"),
        (("replace", {"path": "many", "old": "x", "new": "y"}), "error: the old text occurs 3 times in many; give one that occurs once"),
        (("replace", {"path": "many", "old": "", "new": "y"}), "error: the old text occurs 0 times in many; give one that occurs once"),
        (("insert", {"path": "many", "after_line": 5, "text": ""}), "error: many has lines 1 to 4, not 5"),
        (("create", {"path": "/usr/new", "text": ""}), "error: /usr/new: Read-only file system"),
        (("create", {"path": "many/f", "text": ""}), "error: many/f: "),
        (("create", {"path": "long", "text": "x" * (1 << 21)}), "error: long: more than 1048576 bytes"),
        (("type", {"keys": ["x" * 5000]}), "error: more than 4096 characters"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_read_by_the_model(call: tuple[str, dict[str, Any]], told: str) -> None:
    setting = "mkfifo pipe; printf 'x\\nx\\nx\\n' > many; printf '\\377' > bytes; truncate -s 2M large"
    answers = said(("bash", {"command": setting}), call)
    assert answers[1].startswith(told)


def test_a_terminal_shows_its_screen() -> None:
    answers = said(
        ("type", {"keys": ["stty size; printf '\\033[2J\\033[3;5Hdrawn'; read x", "Enter"]}),
        ("type", {"keys": ["C-c", "exit", "Enter"]}),
    )
    assert answers[0].split("\n")[2] == "    drawn"
    assert answers[1].endswith("the next keys start another")


def test_tools_of_a_host_that_is_off_say_so() -> None:
    shell, editor = said(
        ("bash", {"command": "true"}), ("replace", {"path": "f", "old": "a", "new": "b"}), enabled=False
    )
    assert shell.startswith("error: the tool host is switched off")
    assert editor == "error: f: the tool host is switched off"
