"""`sparring.run` from Python: what the command line does, to the bit; in a notebook too."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import httpx
import msgspec
import pytest

import sparring
from sparring.cli.main import main
from sparring.errors import BadInput, EngineError
from sparring.launch.checkpoint_engine import Generation
from sparring.recipe.load import from_data, load
from sparring.recipe.run_config import RunConfig

TINY = Path(__file__).parent / "tiny.toml"
WORLD = Path(__file__).parent / "tiny_world.py:Sums"
SHORT = ("sft.steps=2", "rl.steps=2")


def config(folder: Path, *overrides: str) -> RunConfig:
    return load(TINY, [f"run.directory={folder}", f"env.name={WORLD}", "observe.progress=off", *overrides])


def weights(folder: Path) -> bytes:
    return (folder / "tiny/rl/model/model.safetensors").read_bytes()


@pytest.mark.full
def test_a_run_from_python_is_the_command_lines_to_the_bit(tmp_path: Path) -> None:
    overrides = (f"run.directory={tmp_path / 'command'}", f"env.name={WORLD}", "observe.progress=off", *SHORT)
    assert main(["run", str(TINY), *(word for override in overrides for word in ("--set", override))]) == 0
    assert sparring.run(config(tmp_path / "python", *SHORT)) == tmp_path / "python/tiny"
    data = tomllib.loads(TINY.read_text())
    data["run"]["directory"], data["env"]["name"] = str(tmp_path / "notebook"), str(WORLD)
    data["sft"]["steps"] = data["rl"]["steps"] = 2

    async def cell() -> Path:
        """Plain code in a loop that is running, on the thread that it runs on."""
        return sparring.run(from_data(data, "a dictionary"))

    assert asyncio.run(cell()) == tmp_path / "notebook/tiny"
    assert weights(tmp_path / "command") == weights(tmp_path / "python") == weights(tmp_path / "notebook")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("sparring")]


@pytest.mark.parametrize("given", [str(TINY), TINY, {"run": {"name": "a"}}, None])
def test_what_is_no_config_is_refused(given: object) -> None:
    with pytest.raises(BadInput, match=r"sparring.run: expected a recipe"):
        sparring.run(given)  # type: ignore[arg-type]


def test_a_struct_with_wrong_types_in_it_is_refused(tmp_path: Path) -> None:
    whole = config(tmp_path)
    wrong = msgspec.structs.replace(whole, rl=msgspec.structs.replace(whole.rl, steps=2.5))
    with pytest.raises(BadInput, match="sparring.run: rl.steps: expected an integer"):
        sparring.run(wrong)
    assert list(tmp_path.iterdir()) == []


NOTEBOOK = """
import asyncio, signal, sys
import sparring
from sparring.recipe.load import load
async def cell():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a notebook's kernel does: not the loop's own
    try:
        sparring.run(load(sys.argv[1], sys.argv[2:]))
    except KeyboardInterrupt:
        print("stopped", flush=True)
    print(sparring.run(load(sys.argv[1], sys.argv[2:])))
asyncio.run(cell())
"""


@pytest.mark.full
def test_a_notebook_that_is_interrupted_goes_on_with_the_next_call(tmp_path: Path) -> None:
    """As a kernel does it: a KeyboardInterrupt in the cell, which the loop around it does not see."""
    overrides = (f"run.directory={tmp_path}", f"env.name={WORLD}", "observe.lines_every_s=0")
    words = [sys.executable, "-c", NOTEBOOK, str(TINY), *overrides]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert any(line.startswith("rl 2/6") for line in process.stdout), process.stderr.read()
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert "stopped\n" in out and out.endswith(f"{tmp_path / 'tiny'}\n")
    assert sum(line.startswith("init") for line in out.splitlines()) == 0


def test_an_engine_is_opened_generates_and_closes(checkpoint: Path) -> None:
    with sparring.Engine(checkpoint, threads=1) as engine:
        both = engine.generate("1 + 2 = ?", "3 + 4 = ?", samples=2, max_tokens=5, seed=3)
        assert [len(reply.completion.tokens) for reply in both] == [len(r.completion.logprobs) for r in both]
        assert len({reply.completion.tokens for reply in both}) == 4 and both[0].prompt_tokens == both[1].prompt_tokens
        conversation = [sparring.Message(role="user", content="1 + 2 = ?")]

        async def cell() -> list[Generation]:
            return engine.generate(conversation, max_tokens=5, seed=3)

        [again] = asyncio.run(cell())
        assert (again.message, again.completion.logprobs) == (both[0].message, both[0].completion.logprobs)
        assert both[0].text == both[0].message.content
        for wrong, words in ((("hi", {"top": 1}), "one of temperature, top_p"), (((), {}), "a prompt and samples")):
            with pytest.raises(BadInput, match=f"sparring.Engine.generate: expected {words}"):
                engine.generate(*wrong[0], **wrong[1])
        for wrong, got in (([{"role": "user"}], "one of dict"), ([], "an empty one")):
            with pytest.raises(BadInput, match=f"expected a text or a conversation, got {got}"):
                engine.generate(wrong)
        with pytest.raises(EngineError):
            engine.generate("one " * 600)
    with pytest.raises(BadInput, match="expected an open engine"):
        engine.generate("hi")
    engine.close()


SERVED = """
import sys
from sparring import Engine
Engine(sys.argv[1], threads=1).serve(port=0)
"""


@pytest.mark.full
def test_an_engine_serves_until_it_is_interrupted(checkpoint: Path) -> None:
    words = [sys.executable, "-c", SERVED, str(checkpoint)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip().removeprefix("serving on ")
        answer = httpx.post(f"{url}/v1/generate", json={"tokens": [1, 2, 3], "sampling": {"max_tokens": 2}})
        assert answer.status_code == 200 and answer.json()["tokens"]
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert error.rstrip().endswith("KeyboardInterrupt")


def test_run_check_and_evaluate_from_the_public_names(tmp_path: Path) -> None:
    config = sparring.load_recipe(
        TINY, {"run.directory": tmp_path, "env.name": WORLD, "observe.progress": "off", "rl.steps": 1, "sft.steps": 1}
    )
    assert any("stages" in fact for fact in sparring.check(config)) and list(tmp_path.iterdir()) == []
    folder = sparring.run(config)
    assert "</html>" in (folder / "report.html").read_text()
    result = sparring.evaluate(config, folder / "init/model", folder, tasks=4, samples=2, ks=[2])
    assert [len(e.evaluation.tasks) for e in result.evaluations] == [4, 4] and result.evaluation.samples == 2
    assert result.evaluation is result.evaluations[1].evaluation and set(result.evaluation.pass_at) >= {"2"}
    assert result.comparison is not None and result.comparison.tasks == 4
    assert sparring.evaluate(config, folder, tasks=4, samples=2, ks=[2]).comparison is None
