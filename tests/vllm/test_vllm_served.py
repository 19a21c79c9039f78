"""vLLM behind our server: two of them are a fleet, whose replies begin again elsewhere when one dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from common.served import ServerThread
from real_vllm import PYTHON
from served import Weights, published, turn
from test_vllm_process import check_ended, children, processes, watched

from sparring.cli.main import main
from sparring.engine.adapters.remote import RemoteEngine
from sparring.engine.config import EngineConfig
from sparring.engine.fleet import Fleet
from sparring.engine.native import NativeEngine
from sparring.errors import BadInput
from sparring.generation import Completion, Delta, GenerateRequest, ScoreRequest
from sparring.model.load import load

pytestmark = pytest.mark.vllm

LOOP = Path(__file__).parents[1] / "loop"
KEY = "SPARRING_TEST_KEY"
ALONE = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=256m none /dev/shm && exec "$@"', "alone")
"""Words that give a program a /dev/shm of its own, as on another machine."""
SPARRING = (sys.executable, "-m", "sparring.cli.main")
STALLED = "engine.vllm.stalled_s=15"
VLLM = (
    "engine.kind=vllm",
    f"engine.vllm.python={PYTHON}",
    'engine.vllm.arguments=["--enforce-eager"]',
    "engine.kv.bytes=67108864",
)


def words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


class Served:
    """A `sparring serve` of vLLM at an address of its own, which may be started again; `before` are words before it."""

    process: subprocess.Popen[str]

    def __init__(self, model: Path, socket: Path, *before: str) -> None:
        self.url = f"unix:{socket}"
        words_ = ("serve", str(model), "--unix", str(socket), "--threads", "1", "--api-key-env", KEY)
        self._command = (*before, *SPARRING, *words_, "--until-input-ends", *words(*VLLM, STALLED))
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._serves = False

    def wait(self) -> None:
        assert self.process.stdout is not None
        if not self._serves:
            assert self.process.stdout.readline().startswith("serving ")
        self._serves = True

    @property
    def vllm(self) -> int:
        """Process id of its vLLM."""
        [vllm] = children(self.process.pid)
        return vllm

    def workers(self) -> list[int]:
        """Open descriptors of its vLLM's processes, which are in a group of their own."""
        members = processes(self.vllm)
        assert len(members) >= 3
        return watched(members)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        self.process.communicate(timeout=60)


def recipe(folder: Path, *settings: str) -> list[str]:
    """The tiny recipe with heads as large as vLLM's attention on a CPU wants them."""
    said = (f"run.directory={folder}", f"env.name={LOOP}/tiny_world.py:Sums", "models.policy.init.head_dim=32")
    return [str(LOOP / "tiny.toml"), *words(*said, *settings)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, Weights]:
    """Two fresh models of the tiny recipe, of which the first is served."""
    folder = tmp_path_factory.mktemp("models")
    made = []
    for seed in (3, 4):
        assert main(["run", *recipe(folder, f"run.seed={seed}", 'run.stages=["init"]'), "--name", f"m{seed}"]) == 0
        made.append(published(folder / f"m{seed}/init/model"))
    return made[0], made[1]


@pytest.fixture(scope="module")
def servers(models: tuple[Weights, Weights], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    os.environ[KEY] = "secret"
    folder = tmp_path_factory.mktemp("sockets")
    started = [Served(models[0].path, folder / "one"), Served(models[0].path, folder / "other", *ALONE)]
    yield started
    for server in started:
        server.close()
    del os.environ[KEY]


@pytest.fixture
def both(servers: list[Served]) -> list[Served]:
    """The two servers, which answer."""
    for server in servers:
        if server.process.poll() is not None:
            server.start()
    for server in servers:
        server.wait()
    return servers


def on(
    servers: list[Served], model: Weights, scenario: Callable[[Fleet[RemoteEngine], asyncio.Event], Awaitable[Any]]
) -> Any:
    """Play a scenario with a fleet that serves a model as version 0; the event is set when a server comes back."""

    async def main_() -> Any:
        back = asyncio.Event()
        state = model.model().state()
        links = list[str]()

        def join(engine: RemoteEngine) -> None:
            engine.check("float32", "", EngineConfig(kind="vllm"))
            engine.begin(state)

        engines = [RemoteEngine(server.url, api_key="secret", join=join) for server in servers]
        for engine in engines:
            links.append(await asyncio.to_thread(engine.choose_link))
            await asyncio.to_thread(join, engine)
        assert links == ["shared memory", "HTTP"]
        fleet = Fleet(engines, silent_s=5.0, report=lambda said, facts: back.set() if "again" in said else None)
        try:
            return await scenario(fleet, back)
        finally:
            await fleet.close()

    return asyncio.run(main_())


def check_probabilities(model: Weights, turns: Iterable[tuple[GenerateRequest, Completion]]) -> None:
    """Check that each token has its probability under a model, after the tokens of its own reply."""

    async def scored() -> None:
        engine = NativeEngine(load(model.path), EngineConfig(), threads=1)
        for request, answer in turns:
            whole, first = (*request.tokens, *answer.tokens), len(request.tokens)
            scores = await engine.score(ScoreRequest(id="s", tokens=whole, first=first))
            assert answer.logprobs == pytest.approx(scores.logprobs, abs=1e-4)
            assert len(answer.versions) == len(answer.tokens) == request.sampling.max_tokens
        await engine.close()

    asyncio.run(scored())


def test_a_reply_that_is_cut_begins_again_and_who_was_lost_catches_up(
    both: list[Served], models: tuple[Weights, Weights]
) -> None:
    asks = [turn(f"w{n}", (5, 6, 7, 8 + n), max_tokens=400, seed=n) for n in range(8)]
    first, second = models

    async def scenario(fleet: Fleet[RemoteEngine], back: asyncio.Event) -> tuple[list[Completion], list[Completion]]:
        streams = [fleet.stream(turn(f"s{n}", (9, 9, 9, n), max_tokens=400)) for n in range(4)]
        whole = asyncio.gather(*map(fleet.generate, asks))
        read = [await anext(stream) for stream in streams]
        workers = both[0].workers()
        both[0].kill()
        rest = await asyncio.gather(*map(ended, streams), return_exceptions=True)
        cut = [error for error in rest if isinstance(error, BaseException)]
        assert len(read) == 4 and len(cut) == 2 and all("begin again" in str(error) for error in cut)
        answers = await whole
        assert fleet.metrics["engines_now"] == 1 and fleet.metrics["moved"] >= 1
        await fleet.pull(second.at(1))
        assert fleet.version == 1
        check_ended(workers)

        both[0].start()
        await back.wait()
        assert fleet.metrics["engines_now"] == 2 and [engine.version for engine in fleet.engines] == [1, 1]
        later = await asyncio.gather(*(engine.generate(ask) for engine in fleet.engines for ask in asks[:2]))

        back.clear()
        core = [process for process in processes(both[1].vllm) if process != both[1].vllm]
        halted = asyncio.gather(*map(fleet.generate, asks))
        for process in core:  # its server goes on
            os.kill(process, signal.SIGSTOP)
        later += await halted
        assert fleet.metrics["engines_now"] == 1 and fleet.metrics["moved"] >= 2
        for process in core:
            os.kill(process, signal.SIGCONT)
        await back.wait()
        await fleet.pull(first.at(2))
        assert [engine.version for engine in fleet.engines] == [2, 2]
        return answers, later

    answers, later = on(both, first, scenario)
    assert {answer.versions.values for answer in answers} == {(0,)}
    check_probabilities(first, zip(asks, answers, strict=True))
    assert {answer.versions.values for answer in later} == {(1,)} == {answer.kv_versions.values for answer in later}
    check_probabilities(second, zip([*asks[:2], *asks[:2], *asks], later, strict=True))


async def ended(stream: AsyncIterator[Delta | Completion]) -> Delta | Completion:
    return [piece async for piece in stream][-1]


def test_a_fleet_of_two_kinds_is_refused_before_work_starts(
    both: list[Served], models: tuple[Weights, Weights], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    native = ServerThread(
        NativeEngine(load(models[0].path), EngineConfig(), threads=1), models[0].path, api_key="secret"
    )
    try:
        urls = f"engine.urls=['{native.url}', '{both[0].url}']"
        for kind, place, got in (("remote", both[0].url, "vllm"), ("vllm", native.url, "native")):
            settings = (f"engine.kind={kind}", urls, f"engine.api_key_env={KEY}")
            assert main(["run", *recipe(tmp_path, *settings)]) == 2
            error = capsys.readouterr().err
            assert f"engine at {place}: expected a " in error and f"got {got};" in error
        assert not (tmp_path / "tiny/rl").exists()
        with pytest.raises(BadInput, match="API key"):
            RemoteEngine(both[0].url)
    finally:
        native.stop()


def test_a_run_on_two_servers_outlives_one(both: list[Served], tmp_path: Path) -> None:
    urls = f"engine.urls=['{both[0].url}', '{both[1].url}']"
    settings = ("engine.kind=vllm", urls, f"engine.api_key_env={KEY}", 'run.stages=["init", "rl", "eval"]')
    settings += ("observe.lines_every_s=0", "rl.steps=8", "rl.train.learning_rate=0.01")
    command = (*SPARRING, "run", *recipe(tmp_path, *settings))
    output = list[str]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            output.append(line)
            if line.startswith("rl 2/") and both[0].process.poll() is None:
                both[0].kill()
        assert run.wait() == 0, "".join(output)
    assert f"engine at {both[0].url} is left out" in "".join(output)
    lines = [json.loads(line) for line in (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if line["stage"] == "rl" and "step" in line]
    assert len(steps) == 8
    for values in steps:
        assert values["tokens_trained"] > 0 and values["logprob_stale_share"] == 0.0
        assert 0 < values["logprob_max_abs_diff"] < 1e-3 and 0.999 < values["mismatch_ess"] <= 1.0


def test_a_server_ends_with_its_vllm(servers: list[Served]) -> None:
    server = servers[1]
    server.wait()
    workers = server.workers()
    os.killpg(server.vllm, signal.SIGKILL)
    assert server.process.wait(60) == 128 + signal.SIGTERM
    check_ended(workers)
