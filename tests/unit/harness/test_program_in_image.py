"""Agent programs in boxes of an image of their own: mounted into it, started there before a run, and played."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folder import FolderWorld, folder_task
from image_files import SHELL, copy_programs, copy_python, empty_image, readable

from sparring.errors import BadInput, SpoiltFile
from sparring.gateway.server import open_door
from sparring.harness.by_environment import HarnessByEnvironment
from sparring.harness.find import INSIDE
from sparring.harness.load import load_harness
from sparring.harness.program import ProgramHarness
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.rollout.config import RetriesConfig, RolloutConfig
from sparring.rollout.journal import Journals
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.images.image import ImageConfig, UnpackedImage
from sparring.stages.preflight.harness import check_images
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer
from sparring.types import BoxSpec, Limits, Message, Task, ToolCall

RENDERER = toy_renderer()
SCRIPT = Path(__file__).with_name("agent_program.py")
TOML = """
command = ["agent", "works", "{prompt}"]
memory_bytes = 268435456
[environment]
URL = "{url}"
KEY = "{key}"
MODEL = "{model}"
"""
REPLIES = ("cat question.txt", "pwd; echo $KIND; which python3", "echo 42 > answer.txt", "Done.")


def shell_image(layer: Path) -> None:
    """No Python."""
    copy_programs(SHELL, layer)


def whole_image(layer: Path) -> None:
    """A shell, and the Python that the program's environment names."""
    copy_programs([*SHELL, "which"], layer)
    copy_python(layer)


def image_without_libraries(layer: Path) -> None:
    """Python's library without the C library that Python needs."""
    copy_programs([], layer)
    copy_python(layer)
    for library in layer.rglob("libm.so.6"):
        library.unlink()


def image_of_another_loader(layer: Path) -> None:
    """A Python whose loader is not there, as in an image of another C library."""
    copy_python(layer)
    for loader in layer.glob("lib64/ld-*"):
        loader.unlink()


def image_with_a_file_in_the_way(layer: Path) -> None:
    """A file where the program's files are shown."""
    whole_image(layer)
    (layer / "opt").write_text("no folder")


IMAGES: dict[str, Callable[[Path], None]] = {
    "whole": whole_image,
    "shell": shell_image,
    "no-libraries": image_without_libraries,
    "another-loader": image_of_another_loader,
    "in-the-way": image_with_a_file_in_the_way,
}


class Bench:
    """A program that is installed in a virtual environment, and boxes of images.

    Args:
        runner: runner of the bench's event loop.
        folder: folder of the program and the images.
    """

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        self.runner, self.folder = runner, folder
        programs = folder / "programs"
        subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", programs / "venv"], check=True)
        agent = programs / "venv/bin/agent"
        agent.write_text(f"#!{programs}/venv/bin/python\n{SCRIPT.read_text()}")
        agent.chmod(0o755)
        readable(programs)
        preset = folder / "mine.toml"
        preset.write_text(TOML)
        harness = load_harness(str(preset), ("policy",), open_door, programs)
        assert isinstance(harness, ProgramHarness)
        self.harness = harness
        self.boxes = BubblewrapBoxes(SandboxConfig(servers=1), harness.mounts, self.image_of)
        self.engine = ScriptedEngine(())

    def image_of(self, name: str) -> UnpackedImage:
        """Return an image, which is made when it is first asked for."""
        layer = self.folder / name / "layers/only"
        if not layer.exists():
            IMAGES[name](empty_image(self.folder / name))
            readable(self.folder / name)
        return UnpackedImage((layer,), ImageConfig(environment={"KIND": name, "PATH": "/opt/tools:/usr/bin"}))

    def run(self, work: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await work

        return self.runner.run(bounded())

    def task(self, image: str) -> Task:
        return replace(folder_task(limits=Limits(max_turns=9)), box=BoxSpec(timeout_s=60.0, image=image))

    def check(self, *images: str) -> list[str]:
        """What the preflight says of tasks with these images."""
        harness = HarnessByEnvironment({"folder": self.harness})
        return self.run(check_images(harness, FolderWorld(), self.boxes, [*map(self.task, images)]))

    def play(self, image: str) -> Finished:
        """Play a rollout in a box of an image."""
        left = [_reply(text) for text in REPLIES]
        self.engine = ScriptedEngine(lambda request: reply_tokens(RENDERER, left.pop(0)))
        config = RolloutConfig(retries=RetriesConfig(rebuilds=0))
        recorder = Recorder(self.engine, RENDERER, max_context=4000)
        runner = RolloutRunner(FolderWorld(), self.boxes, recorder, self.harness, config, log=Journals())
        return self.run(runner.run(self.task(image), rollout_id="rl/0/0", index=0, seed=1))


def _reply(text: str) -> Message:
    calls = (ToolCall(id="call_0", name="sh", arguments={"command": text}),)
    return (
        Message(role="assistant", content=text)
        if text == "Done."
        else Message(role="assistant", content="", tool_calls=calls)
    )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        bench = Bench(runner, tmp_path_factory.mktemp("bench"))
        yield bench
        runner.run(bench.boxes.close())


def test_a_program_plays_in_a_box_of_an_image_and_its_tokens_are_exact(bench: Bench) -> None:
    assert bench.check("whole") == ["harness: its program starts in 1 of 1 images of the first tasks"]
    finished = bench.play("whole")
    outcome = finished.rollout.outcome
    assert (outcome.kind, outcome.reason, outcome.failure) == ("completed", "answered", None)
    assert finished.score is not None and finished.score.reward == 1.0, "what it left in the image is scored"
    (trajectory,) = finished.rollout.trajectories
    assert [segment.parent for segment in trajectory.segments] == [None, 0, 1, 2, 3, 4, 5, 6], "one branch"
    ids = [token for segment in trajectory.segments for token in segment.tokens]
    last = bench.engine.requests[-1].tokens
    assert ids[: len(last)] == list(last), "the record is what the engine was asked, id by id"
    sampled = [list(segment.tokens) for segment in trajectory.segments if segment.model is not None]
    assert sampled == [list(reply_tokens(RENDERER, _reply(text))) for text in REPLIES]
    said = RENDERER.decode(last)
    assert f"/box\nwhole\n{INSIDE}/venv/bin/python3\n" in said, "the image's variables, its own PATH first"


def test_what_a_program_lacks_in_an_image_is_refused_before_the_run_in_its_loader_s_words(bench: Bench) -> None:
    with pytest.raises(BadInput) as refused:
        bench.check("shell")
    line = f"{INSIDE}/venv/bin/python {INSIDE}/venv/bin/agent --version"
    assert str(refused.value) == (
        f"box.image: expected an image in which the program of {bench.folder}/mine.toml runs, got 'shell', where "
        f"`{line}` ended with status 127: {INSIDE}/venv/bin/python: No such file or directory; do: add to the image "
        "what is missing (an interpreter, the C library that it was built for)"
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("no-libraries", "ended with status 127: .*libm.so.6: cannot open shared object file"),
        ("another-loader", "ended with status 127: .*python: No such file or directory"),
        ("in-the-way", "Not a directory: '/opt/harness/venv'"),
    ],
)
def test_images_in_which_a_program_cannot_run_are_refused_by_name(bench: Bench, image: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as refused:
        bench.check("whole", image)
    assert refused.value.where == "box.image" and repr(image) in str(refused.value)


@pytest.mark.full
def test_a_program_that_refuses_the_question_everywhere_is_not_refused_for_it(bench: Bench) -> None:
    """`--version` is asked of every program; one that knows no such word says so on the host as well."""
    agent = bench.folder / "programs/venv/bin/agent"
    before = agent.read_text()
    try:
        agent.write_text(before.replace("mode = sys.argv[1]", "sys.exit(2)"))
        assert bench.check("whole") == ["harness: its program starts in 1 of 1 images of the first tasks"]
    finally:
        agent.write_text(before)


@pytest.mark.full
def test_a_program_s_files_are_seen_by_no_box_that_runs_none(bench: Bench) -> None:
    async def work() -> None:
        box: Any = await bench.boxes.take(BoxSpec(timeout_s=20.0, image="whole"))
        assert (await box.exec(["ls", "/opt"])).exit_code != 0
        await box.snapshot()
        line = ["sh", "-c", f"ls {INSIDE}/venv; touch {INSIDE}/venv/new; rm -rf {INSIDE} 2>/dev/null; echo x > kept"]
        said = await run_program(box, line)
        assert "bin" in said.stdout and "new" not in said.stdout and "Read-only file system" in said.stderr
        verifier = await box.verifier(["kept"])
        assert (await verifier.exec(["ls", "/opt"])).exit_code != 0
        again = await run_program(box, line)
        assert "bin" in again.stdout, "they are shown once"
        fork = await box.fork(await box.snapshot())
        assert (await fork.exec(["ls", f"{INSIDE}/venv"])).stdout == "", "an empty folder is left"
        assert "bin" in (await run_program(fork, line)).stdout
        for one in (verifier, fork, box):
            await one.close()

    bench.run(work())


INNER = [
    f"rm -rf /opt; ln -s {place} /opt"
    for place in ("/proc/1/cwd", "/proc/1/root", "/proc/self/root", "/proc/1/fd/210/l/0/own/box", "/nowhere/at/all")
]
"""Links to what the box's own process has open, among it the frozen layers that verifiers are forks of."""


TRAPS = ["rm -rf /opt; echo x > /opt", "rm -rf /opt; ln -s /opt /opt", "mkfifo /opt", *INNER[:3], *INNER[4:]]


@pytest.mark.parametrize("trap", [INNER[3], *(pytest.param(trap, marks=pytest.mark.full) for trap in TRAPS)])
def test_what_a_command_left_in_the_way_of_a_program_is_the_policy_s(bench: Bench, trap: str) -> None:
    async def work() -> None:
        box: Any = await bench.boxes.take(BoxSpec(timeout_s=20.0, image="whole"))
        await box.snapshot()
        await box.exec(["sh", "-c", trap])
        with pytest.raises(SpoiltFile, match="/opt"):
            await run_program(box, ["true"])
        assert (await box.exec(["echo", "on"])).stdout == "on\n"
        verifier = await box.verifier([])
        assert await verifier.entries("/box") == {} and "opt" not in await verifier.entries("/")
        await verifier.close()
        await box.close()

    bench.run(work())


@pytest.mark.full
@pytest.mark.parametrize("place", ["/proc", "/dev", "/box", "/tmp", "../../../../../../mnt", "/usr/bin"])
def test_a_link_on_the_way_of_a_program_leads_nowhere_but_into_the_box(bench: Bench, place: str) -> None:
    """The box's own process shows a program's files: it follows what a command left as that command would."""

    async def work() -> None:
        box: Any = await bench.boxes.take(BoxSpec(timeout_s=20.0, image="whole"))
        await box.exec(["sh", "-c", f"rm -rf /opt; ln -s {place} /opt"])
        try:
            await run_program(box, ["true"])
        except SpoiltFile:
            pass  # /proc and /dev hold no folders
        assert (
            await box.exec(["sh", "-c", "ls -d /layers /mnt/l 2>/dev/null; echo $(ls /proc | head -1)"])
        ).stdout == "1\n"
        kept = await box.snapshot()
        fork = await box.fork(kept)
        assert (await fork.exec(["echo", "on"])).stdout == "on\n"
        other: Any = await bench.boxes.take(BoxSpec(timeout_s=20.0, image="whole"))
        assert "bin" in (await run_program(other, ["ls", f"{INSIDE}/venv"])).stdout
        for one in (other, fork, box):
            await one.close()

    bench.run(work())


async def run_program(box: Any, argv: list[str]) -> Any:
    """Run a program that asks nothing."""

    async def silent(listening: socket.socket) -> None:
        with listening:
            await asyncio.Event().wait()

    return await box.program(
        argv,
        environment={"PATH": "/usr/bin"},
        port=8700,
        timeout_s=20.0,
        output_bytes=4000,
        served=silent,
    )
