"""Text of programs, policies and worlds reaches the terminal without escapes, through every door that writes there."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from suite import short_of

import sparring
from sparring.observe.progress import LiveProgress
from sparring.observe.sinks.console import ConsoleSink

HOSTILE = "\x1b]52;c;aGk=\x07\x1b]0;title\x07\x1b[2J\x9b2J\r"
WRITTEN = "\\x1b]52;c;aGk=\\x07\\x1b]0;title\\x07\\x1b[2J\\x9b2J\\r"
DOORS = {
    "a failure": f"""
from sparring.cli.main import guarded
from sparring.errors import EnvError
def verb(): raise EnvError("harness x: the program ended: " + {HOSTILE!r})
guarded(verb, "sparring check x")
""",
    "a refusal": f"""
from sparring.cli.main import guarded
from sparring.errors import BadInput
def verb(): raise BadInput({HOSTILE!r})
guarded(verb, "sparring check x")
""",
    "an argument": f"from sparring.cli.main import main; main(['run', 'x', {HOSTILE!r}])",
    "a traceback": f"""
from sparring.observe.terminal import guard_terminal
guard_terminal()
raise ValueError({HOSTILE!r})
""",
    "a log": f"""
import logging
from sparring.observe.terminal import guard_terminal
guard_terminal()
try: raise ValueError({HOSTILE!r})
except ValueError: logging.getLogger("asyncio").exception("Task exception was never retrieved " + {HOSTILE!r})
""",
    "a task that nobody waits for": f"""
import asyncio
from sparring.observe.terminal import guard_terminal
guard_terminal()
async def fails(): raise ValueError({HOSTILE!r})
async def main():
    asyncio.create_task(fails())
    await asyncio.sleep(0)
asyncio.run(main())
""",
}
WRITERS = ("__main__.py", "testing/", "kernels/compiled/build.py", "observe/terminal.py")
"""Parts that write what no program said: what is missing, golden vectors, the compiler's result; and the one door."""

INSIDE = (
    "sandbox/inner/",
    "harness/presets/",
    "envs/rubrics/code.py",
    "envs/rubrics/worker.py",
)
"""Programs whose standard output is a pipe of ours."""


@pytest.mark.parametrize("door", short_of(DOORS, ["a refusal", "a traceback", "a log"]))
def test_a_door_writes_escapes_out(door: str) -> None:
    done = subprocess.run([sys.executable, "-c", DOORS[door]], capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode()
    assert WRITTEN in said or repr(HOSTILE)[1:-1] in said or "\\\\x1b" in said
    assert not set(said) & {"\x1b", "\x07", "\x9b", "\r"}


def test_progress_writes_escapes_out() -> None:
    lines, live = io.StringIO(), io.StringIO()
    ConsoleSink(lines).event("rl", HOSTILE)
    progress = LiveProgress(Console(file=live, force_terminal=False, width=200))
    progress.event("rl", HOSTILE)
    progress.close()
    assert lines.getvalue() == f"rl: {WRITTEN}\n"
    assert WRITTEN in live.getvalue().replace("\n", "") and "\x1b]" not in live.getvalue()


def test_nothing_else_writes_to_the_terminal() -> None:
    source, others = Path(sparring.__file__).parent, []
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).as_posix()
        if name.startswith((*WRITERS, *INSIDE)):
            continue
        text = path.read_text(encoding="utf-8")
        if "print(" not in text and "sys.std" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            is_write = (
                isinstance(node, ast.Attribute)
                and node.attr == "write"
                and ast.unparse(node.value) in ("sys.stdout", "sys.stderr")
            )
            others += [f"{name}:{node.lineno}"] if is_print or is_write else []
    assert not others
