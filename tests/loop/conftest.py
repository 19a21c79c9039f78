"""What several tests of the whole path start from."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from forked import finished as ended
from suite import once

TINY = Path(__file__).parent / "tiny.toml"
WORLD = Path(__file__).parent / "tiny_world.py:Sums"


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_reaches_what_tests_start() -> None:
    """A script's background job ignores it, and so would every program that the job starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe's fresh model as a checkpoint folder; read-only."""
    from sparring.launch.run import opened
    from sparring.recipe.load import load
    from sparring.recipe.run_config import resolve
    from sparring.stages import init

    def make(folder: Path) -> None:
        config = load(TINY, [f"run.directory={folder}", f"env.name={WORLD}", "observe.progress=off"])

        async def made() -> None:
            async with opened(resolve(config)) as context:
                await init.run(context)

        asyncio.run(made())

    return once(tmp_path_factory, "checkpoint", make) / "tiny/init/model"


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user's own: the recipe and the world beside it, named relatively, and the finished run in its
    default place; read-only."""

    def make(folder: Path) -> None:
        shutil.copy(WORLD.with_name("tiny_world.py"), folder / "my world.py")
        text = TINY.read_text().replace("tests/loop/tiny_world.py", "my world.py")
        (folder / "first try.toml").write_text(text)
        done = ended(("run", "first try.toml", "--set", 'observe.sinks=["jsonl", "tensorboard"]'), cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "report: runs/tiny/report.html"

    return once(tmp_path_factory, "a user's folder", make)


@pytest.fixture
def run(home: Path) -> Path:
    """The finished run of `home`; read-only."""
    return home / "runs/tiny"


@pytest.fixture
def own_home(home: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of `home`, in which the tests' process stands."""
    copy = tmp_path / "a user's own folder"
    shutil.copytree(home, copy)
    with contextlib.chdir(copy):
        yield copy


@pytest.fixture
def given(checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny recipe on that checkpoint in place of a fresh model; its runs go to a folder beside it."""
    return on_checkpoint(checkpoint, tmp_path)


def on_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """The tiny recipe on a checkpoint in place of a fresh model; its runs go to a folder beside it."""
    head, rest = TINY.read_text().split("[models.policy.init]")
    recipe = folder / "given.toml"
    text = f'{head}[models.policy]\npath = "{checkpoint}"\n\n[env]{rest.partition("[env]")[2]}'
    text = text.replace("tests/loop/tiny_world.py:Sums", str(WORLD))
    recipe.write_text(text.replace('name = "tiny"\n', f'name = "tiny"\ndirectory = "{folder / "runs"}"\n'))
    return recipe


@pytest.fixture(scope="session")
def made_own(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run `own` of the tiny checkpoint, with the stages rl and eval; read-only."""
    from sparring.cli.main import main

    def make(folder: Path) -> None:
        recipe = on_checkpoint(checkpoint, folder)
        assert main(["run", str(recipe), "--name", "own", "--set", 'run.stages=["rl", "eval"]']) == 0

    return once(tmp_path_factory, "own", make) / "runs/own"


@pytest.fixture
def own(made_own: Path, given: Path) -> Path:
    """A copy of the run `own` among the runs of `given`."""
    return Path(shutil.copytree(made_own, given.parent / "runs/own"))


@pytest.fixture
def wait_for() -> Callable[[subprocess.Popen[str], str], None]:
    """Reads a run's output until a line begins with a text."""
    return _wait_for


def _wait_for(run: subprocess.Popen[str], text: str) -> None:
    assert run.stdout is not None
    seen = []
    for line in run.stdout:
        seen.append(line)
        if line.startswith(text):
            return
    raise AssertionError(f"the run ended without {text!r}: {''.join(seen)}")


@pytest.fixture
def killed_and_finished() -> Callable[[Sequence[str], Sequence[str]], None]:
    """Starts `sparring` with these words once per moment and kills it, -9, when a line of its output begins so; then
    lets it finish. Every start is a process of its own, which knows nothing of those before it."""

    def finished(words: Sequence[str], moments: Sequence[str]) -> None:
        for moment in moments:
            with Forked(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
                _wait_for(run, moment)
                run.kill()
                run.communicate()
            assert run.returncode == -signal.SIGKILL
        done = ended(words)
        assert done.returncode == 0, done.stdout + done.stderr

    return finished


@pytest.fixture
def whole_and_resumed(
    given: Path,
) -> Callable[..., tuple[list[tuple[dict[str, Any], list[str]]], list[dict[str, float]]]]:
    """Runs the rl stage of `given` with these settings and that many steps, then its last again from the checkpoint
    before it. Of each run: the stage's result without times and a digest of the weights of each model named; with them
    the metrics of all steps."""

    def ran(
        settings: Sequence[str], models: Sequence[str], steps: int = 2
    ) -> tuple[list[tuple[dict[str, Any], list[str]]], list[dict[str, float]]]:
        from sparring.launch.run import opened
        from sparring.recipe.load import load
        from sparring.recipe.run_config import resolve
        from sparring.stages import rl

        async def scenario() -> tuple[list[tuple[dict[str, Any], list[str]]], list[dict[str, float]]]:
            found = []
            async with opened(
                resolve(load(given, [*settings, f"rl.steps={steps}", "rl.train.save_every=1"]))
            ) as context:
                for _ in range(2):
                    result = await rl.run(context)
                    await context.cluster.close()
                    digests = [
                        hashlib.sha256((Path(result[name]) / "model.safetensors").read_bytes()).hexdigest()
                        for name in models
                    ]
                    found.append(({name: value for name, value in result.items() if not name.endswith("_s")}, digests))
                    shutil.rmtree(context.folder / "rl" / "checkpoints" / f"step-{steps:06d}")
                return found, [values for _, values in context.store.metrics("rl")]

        return asyncio.run(scenario())

    return ran


@pytest.fixture
def served() -> Callable[..., AbstractContextManager[tuple[subprocess.Popen[str], str]]]:
    """Starts `sparring serve` with these arguments, on a free port if none is given; the process and its address.
    Killed at the end if it still runs."""

    @contextmanager
    def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
        words = ("serve", "--port", "0", "--threads", "1", *map(str, arguments))
        with Forked(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None and process.stderr is not None
                line = process.stdout.readline()
                assert line.startswith("serving "), process.stderr.read()
                yield process, line.split()[-1]
            finally:
                process.kill()

    return started
