"""What no box can do is refused before it is asked, and the box serves on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from refusals import refused_at

from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.types import BoxSpec, TreeEntry

SPEC = BoxSpec(timeout_s=20.0)
NAN, INFINITE = float("nan"), float("inf")
COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bytes as a line": ("argv", {"argv": b"ls"}),
    "a number in a line": ("argv", {"argv": ["sleep", 1]}),
    "a folder's descriptor": ("cwd", {"cwd": 7}),
    "a name with a sign": ("environment", {"environment": {"A=B": "1"}}),
    "a number as a variable": ("environment", {"environment": {"A": 1}}),
    "a NUL in a variable": ("environment", {"environment": {"A": "\0"}}),
    "half a character": ("environment", {"environment": {"A": "\ud800"}}),
    "no time": ("timeout_s", {"timeout_s": NAN}),
    "time without end": ("timeout_s", {"timeout_s": INFINITE}),
    "time before": ("timeout_s", {"timeout_s": -1}),
    "time as a text": ("timeout_s", {"timeout_s": "5"}),
    "output before": ("output_bytes", {"output_bytes": -1}),
    "half a byte": ("output_bytes", {"output_bytes": 1.5}),
    "a number as input": ("input", {"stdin": 5}),
}
SPECS = {
    "image": 5,
    "timeout_s": "2",
    "memory_bytes": 1 << 70,
    "disk_bytes": 0,  # without a limit, for tmpfs
    "processes": 0,
    "output_bytes": -1,
}


def test_arguments_that_no_command_can_have_are_refused(bench: Any) -> None:
    async def work(box: Any) -> None:
        for where, arguments in COMMANDS.values():
            with refused_at(where, "got "):
                await box.exec(**{"argv": ["true"]} | arguments)
        for where, wrong in (
            ("path", box.read(5)),
            ("path", box.entries(b"x")),
            ("most_bytes", box.read("x", -1)),
            ("write", box.write("x", "text")),
            ("upload: 'x'", box.upload({"x": "text"})),
            ("upload", box.upload([("x", b"")])),
            ("upload: 'x'", box.upload({"x": TreeEntry(data="text")})),
            ("verifier", box.verifier(None)),
            ("port", box.connect("80")),
            ("timeout_s", box.start(["true"], timeout_s=NAN)),
            ("terminal.columns", box.terminal(["sh"], columns=80.5)),
        ):
            with refused_at(where, "got "):
                await wrong
        for misspelt in (box.exec(["true"], timout_s=1), box.start(["true"], stdin=""), box.shell(timeout_s=1)):
            with pytest.raises(TypeError, match="unexpected keyword '(timout_s|stdin|timeout_s)'; it has .*cwd"):
                await misspelt
        shell = await box.shell()
        with refused_at("shell", "a text"):
            await shell.run(b"echo")
        assert (await shell.run("echo \ud800")).exit_code == 126  # a model may write that
        assert (await shell.run("echo on")).stdout == "on\n"
        assert (await box.exec(["echo", "on"])).stdout == "on\n"

    bench.box(work)


def test_a_folder_that_no_name_can_be_is_not_there(bench: Any) -> None:
    async def work(box: Any) -> str:
        for cwd in ("\0", "\ud800"):
            with pytest.raises(FileNotFoundError):
                await box.exec("pwd", cwd=cwd)
        with pytest.raises(OSError, match="File name too long"):
            await box.exec("pwd", cwd="x" * 5000)
        return (await box.exec("pwd")).stdout

    assert bench.box(work) == "/box\n"


@pytest.mark.parametrize("limit", SPECS)
def test_a_spec_that_no_box_can_have_is_refused(bench: Any, limit: str) -> None:
    async def work(boxes: BubblewrapBoxes) -> None:
        with refused_at(f"box.{limit}", repr(SPECS[limit])):
            await boxes.take(replace(SPEC, **{limit: SPECS[limit]}))

    bench.run(work)


def test_a_box_with_larger_files_than_this_process_may_have_is_refused() -> None:
    script = """
import resource
from sparring.errors import BadInput
from sparring.sandbox.requests import check_file_size
from sparring.types import BoxSpec
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
check_file_size(BoxSpec(disk_bytes=1 << 20))
try:
    check_file_size(BoxSpec())
except BadInput as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("box.disk_bytes: expected files of 16.8 MB, got a limit of 1.0 MB")
    assert "ulimit -f" in done.stdout
