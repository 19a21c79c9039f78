"""Agent programs in boxes, on a scripted policy: a tiny one that does what programs do at their worst."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folder import FolderWorld, folder_task

from sparring.errors import BadInput
from sparring.gateway.handover import behind_gateway
from sparring.gateway.server import open_door
from sparring.generation import GenerateRequest
from sparring.harness.by_environment import mounts_of
from sparring.harness.load import load_harness
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.rollout.config import RetriesConfig, RolloutConfig
from sparring.rollout.journal import Journals
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer
from sparring.types import Limits, Message, ToolCall

RENDERER, LIMITS = toy_renderer(), Limits(max_turns=9)
SCRIPT = Path(__file__).with_name("agent_program.py")
TOML = """
command = ["python3", "/agent/agent.py", "{mode}", "{{prompt}}"]
script = "agent.py"
memory_bytes = 268435456
disk_bytes = 4194304
processes = 16
output_bytes = 2000
{settings}
[environment]
URL = "{{url}}"
KEY = "{{key}}"
MODEL = "{{model}}"
"""


def calls(command: str) -> Message:
    call = ToolCall(id="call_0", name="sh", arguments={"command": command})
    return Message(role="assistant", content="", tool_calls=(call,))


def says(content: str) -> Message:
    return Message(role="assistant", content=content)


class Bench:
    """Plays programs in boxes of one pool."""

    def __init__(self, runner: asyncio.Runner, boxes: BubblewrapBoxes, folder: Path) -> None:
        self.runner, self.boxes, self.folder = runner, boxes, folder
        self.engine = ScriptedEngine(())
        self.notes: list[dict[str, Any]] = []

    def preset(self, mode: str, settings: str = "") -> str:
        (self.folder / "agent.py").write_text(SCRIPT.read_text())
        path = self.folder / "mine.toml"
        path.write_text(TOML.format(mode=mode, settings=settings))
        return str(path)

    def play(
        self, mode: str, *replies: Message, settings: str = "", limits: Limits = LIMITS, prompt: str = ""
    ) -> Finished:
        """Play one rollout; the last reply comes again for as long as it is asked for."""
        harness = load_harness(self.preset(mode, settings), ("policy",), open_door, self.folder / "none")
        left = list(replies)

        def script(request: GenerateRequest) -> Sequence[int]:
            return reply_tokens(RENDERER, left.pop(0) if len(left) > 1 else left[0])

        self.engine, self.notes = ScriptedEngine(script), []
        log = Journals(recorded=lambda kind, name, data: self.notes.append(dict(data) if kind == "program" else {}))
        config = RolloutConfig(retries=RetriesConfig(rebuilds=0))
        recorder = Recorder(self.engine, RENDERER, max_context=4000)
        runner = RolloutRunner(FolderWorld(), self.boxes, recorder, harness, config, log=log)

        task = folder_task(limits=limits)
        if prompt:
            task = replace(task, messages=(Message(role="user", content=prompt),))

        async def bounded() -> Finished:
            async with asyncio.timeout(60):
                return await runner.run(task, rollout_id="rl/0/0", index=0, seed=1)

        return self.runner.run(bounded())


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1), {})
        yield Bench(runner, boxes, tmp_path_factory.mktemp("presets"))
        runner.run(boxes.close())


def ending(finished: Finished) -> tuple[str, str]:
    outcome = finished.rollout.outcome
    return outcome.kind, outcome.reason


def test_a_program_works_in_the_folder_that_the_world_fills_and_reads(bench: Bench) -> None:
    finished = bench.play("works", calls("cat question.txt"), calls("echo 42 > answer.txt"), says("Done."))
    assert (ending(finished), finished.score and finished.score.reward) == (("completed", "answered"), 1.0)
    (trajectory,) = finished.rollout.trajectories
    assert [segment.parent for segment in trajectory.segments] == [None, 0, 1, 2, 3, 4], "one branch"
    assert "Write 42 into answer.txt." in RENDERER.decode(bench.engine.requests[1].tokens)
    (note,) = bench.notes
    assert (note["exit_code"], note["requests"], note["stdout"]) == (0, 3, "Done.\n")


def test_a_program_in_a_box_reaches_a_gateway_in_another_process(bench: Bench, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    held = AsyncExitStack()
    bench.runner.run(held.enter_async_context(behind_gateway(tmp_path, f"http://127.0.0.1:{port}")))
    words = (sys.executable, "-m", "sparring.cli.main", "gateway", str(tmp_path), "--port", port)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begun = bench.runner.run(asyncio.to_thread(process.stdout.readline))
        try:
            finished = bench.play("works", calls("cat question.txt"), calls("echo 42 > answer.txt"), says("Done."))
            refused = bench.play("is refused", says("Never said.")).rollout.outcome.failure
        finally:
            bench.runner.run(held.aclose())
        ended = process.communicate()[0]  # read to its end: it speaks last
        assert begun == f"gateway of {tmp_path} on http://127.0.0.1:{port}\n"
        assert ended == f"{tmp_path}: the run is over\n"
    assert (ending(finished), finished.score and finished.score.reward) == (("completed", "answered"), 1.0)
    assert process.returncode == 0
    assert refused is not None and "refused every request, the last for: n: expected" in refused.message


def test_a_program_sees_its_own_folders_its_own_environment_and_no_network(bench: Bench) -> None:
    os.environ["SECRET_OF_THE_RUN"] = "1"
    bench.play("looks around", says("Done."))
    environment, folders, network, answer = bench.notes[0]["stdout"].splitlines()
    expected = ["HOME", "KEY", "LANG", "LC_CTYPE", "MODEL", "PATH", "TMPDIR", "TZ", "URL"]
    assert [name for name in eval(environment) if name != "LC_CTYPE"] == [n for n in expected if n != "LC_CTYPE"]
    assert folders == "/box ['question.txt'] /agent False"
    assert (network, answer) == ("OSError", "Done.")


def test_a_script_is_copied_unchanged_without_the_prompt(bench: Bench) -> None:
    """So nobody who writes a task writes the program's source, or reads its key."""
    prompt = 'Say "{key}", {model} and {system}.'
    finished = bench.play("shows its prompt", says("Done."), prompt=prompt)
    assert ending(finished) == ("completed", "answered")
    assert bench.notes[0]["stdout"] == f"{{prompt}} {{system}}\n{prompt}\ndone\n"


def test_a_program_that_requests_nothing_is_a_failure_with_its_last_words(bench: Bench) -> None:
    finished = bench.play("silent", says("Never said."))
    assert (ending(finished), finished.score) == (("infra_failed", "failure"), None)
    failure = finished.rollout.outcome.failure
    assert failure is not None and "status 3 and requested no reply: I have nothing to ask." in failure.message


def test_a_program_that_is_only_refused_fails_with_the_refusals(bench: Bench) -> None:
    finished = bench.play("is refused", says("Never said."))
    assert (ending(finished), finished.score) == (("infra_failed", "failure"), None)
    failure = finished.rollout.outcome.failure
    assert failure is not None and (failure.error, failure.where) == ("Unanswered", f"harness {bench.folder}/mine.toml")
    assert "status 1 and was refused every request, the last for: n: expected" in failure.message
    assert "HTTP Error 400" in failure.message, "its own last words"


def test_a_first_prompt_that_does_not_fit_truncates_a_program_and_there_is_nothing_to_score(bench: Bench) -> None:
    finished = bench.play("says too much", says("Never said."))
    assert (ending(finished), finished.score) == (("truncated", "context_length"), None)


def test_a_program_that_runs_for_too_long_is_truncated(bench: Bench) -> None:
    finished = bench.play("sleeps", says("Go on."), settings="timeout_s = 0.8")
    assert ending(finished) == ("truncated", "timeout")


def test_a_program_that_asks_forever_ends_by_the_limit_that_it_hit(bench: Bench) -> None:
    finished = bench.play("never ends", says("Again."), settings="grace_s = 0.3", limits=Limits(max_turns=3))
    assert ending(finished) == ("truncated", "max_turns")
    assert len(bench.engine.requests) == 3


def test_a_program_that_writes_without_end_fills_its_own_disk_and_its_output_is_cut(bench: Bench) -> None:
    finished = bench.play("floods", says("Go on."))
    assert ending(finished) == ("completed", "answered"), "its exit status, which is 5, decides nothing"
    assert bench.notes[0]["exit_code"] == 5
    assert bench.notes[0]["stdout"].count("x") in range(1500, 2001)


def test_nothing_that_a_program_started_outlives_it(bench: Bench) -> None:
    finished = bench.play("leaves children", says("Go on."))
    assert ending(finished) == ("completed", "answered")


def test_a_missing_program_is_refused_with_the_way_to_install_it(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('command = ["no-such-program"]\ninstall = "npm:@some/agent"\n')
    with pytest.raises(BadInput, match="the program no-such-program, .* npm install --prefix .* @some/agent"):
        load_harness(str(path), ("policy",), open_door, tmp_path)


def test_only_programs_have_mounts(bench: Bench) -> None:
    assert mounts_of(load_harness("chat", ("policy",))) is None
    assert mounts_of(load_harness(bench.preset("works"), ("policy",), open_door, bench.folder)) is not None
