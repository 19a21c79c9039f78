"""The whole path on real parts: init, sft, rl, eval, export; stopped and continued; refused where it must be."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from forked import Forked, finished
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparring.cli.main import main
from sparring.launch.interrupts import STATUS
from sparring.recipe.load import load
from sparring.stages.preflight.metric_names import names_of
from sparring.store.sqlite import SqliteStore

TINY = Path(__file__).parent / "tiny.toml"
WORLD = Path(__file__).parent / "tiny_world.py:Sums"
STAGES = ("init", "sft", "rl", "eval", "export")


def arguments(folder: Path, *more: str, recipe: Path = TINY) -> list[str]:
    settings = (f"run.directory={folder}", f"env.name={WORLD}", "observe.lines_every_s=0", *more)
    return ["run", str(recipe), *(part for setting in settings for part in ("--set", setting))]


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "sparring.cli.main", *arguments(folder)]


def finish(folder: Path) -> None:
    """In a process of its own, which knows nothing of the runs before it."""
    done = finished(arguments(folder))
    assert done.returncode == 0, done.stdout + done.stderr


def weights(folder: Path, stage: str = "rl/model") -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in load_file(folder / "tiny" / stage / "model.safetensors").items()}


@pytest.fixture
def whole(home: Path) -> Path:
    """The folder of an uninterrupted run."""
    return home / "runs"


def test_a_run_leaves_its_figures(whole: Path) -> None:
    summary = json.loads((whole / "tiny" / "summary.json").read_text())
    assert summary["logprob_max_abs_diff"] == 0.0
    assert summary["tokens_sampled"] > 0
    assert summary["tokens"]["sampled"] == sum(n for name, n in summary["tokens"].items() if name != "sampled")
    assert set(summary["wall_s"]) == set(STAGES)
    assert summary["eval_tasks"] == 6
    assert sum(entry["tasks"] for entry in summary["by_dataset"].values()) == 6
    assert weights(whole, "sft/model") != weights(whole, "init/model")
    assert weights(whole) != weights(whole, "sft/model")


def test_a_step_shows_what_it_was_trained_on(whole: Path) -> None:
    events = EventAccumulator(str(whole / "tiny" / "tensorboard"))
    events.Reload()
    [shown] = events.Tensors("rl/samples")  # of the first step; the run has fewer than samples_every
    cells = make_ndarray(shown.tensor_proto)
    names = [cell.decode().strip() for cell in cells[1:, 0]]
    assert shown.step == 1 and names == ["rl/0/0", "rl/0/1", "rl/0/2", "rl/1/0"]  # groups of three
    assert all(b"user:" in cell and b"assistant" in cell for cell in cells[1:, 2])


def test_every_step_was_exact(whole: Path) -> None:
    lines = [json.loads(line) for line in (whole / "tiny" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if line["stage"] == "rl" and "step" in line]
    assert len(steps) == 6
    assert [values.get("logprob_max_abs_diff") for values in steps if values["tokens_trained"]] == [0.0] * 6


def test_every_step_says_what_the_engine_did_for_it(whole: Path) -> None:
    lines = [json.loads(line) for line in (whole / "tiny" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if line["stage"] == "rl" and "step" in line]
    assert (
        sum(values["engine/generated_tokens"] for values in steps)
        >= sum(values["tokens_trained"] for values in steps)
        > 0
    )
    saved = [f"engine/kv_{source}_tokens" for source in ("kept", "shared", "restored")]
    assert (
        sum(values["engine/cached_tokens"] for values in steps)
        == sum(values[name] for values in steps for name in saved)
        > 0
    )
    assert [values["engine/updates"] for values in steps] == [1.0] * 6
    assert all(0 < values["engine/max_kv_bytes"] >= values["engine/kv_bytes_now"] for values in steps)


def test_the_export_is_a_checkpoint_of_the_library(whole: Path) -> None:
    folder = str(whole / "tiny" / "export")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1 ="}], tokenize=False, add_generation_prompt=True
    )
    out = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=3)
    assert out.shape[0] == 1 and "<|im_start|>user" in text


@pytest.mark.full
def test_the_export_loads_anywhere(whole: Path) -> None:
    """In a process that has nothing of ours."""
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]); tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "text = tokenizer.apply_chat_template([{'role': 'user', 'content': '1 + 1 ='}], tokenize=False, add_generation_prompt=True)\n"
        "out = model.generate(**tokenizer(text, return_tensors='pt'), max_new_tokens=3)\n"
        "assert out.shape[0] == 1 and '<|im_start|>user' in text\n"
    )
    subprocess.run([sys.executable, "-c", code, str(whole / "tiny" / "export")], check=True, timeout=120)


def test_a_finished_run_runs_again_in_no_time_and_with_another_config_not_at_all(
    own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = own_home / "runs/tiny/export/model.safetensors"
    before = export.stat().st_mtime_ns
    words = ["run", "first try.toml", "--set", 'observe.sinks=["jsonl", "tensorboard"]']
    assert main(words) == 0
    assert export.stat().st_mtime_ns == before
    assert main([*words, "--set", "sft.steps=7"]) == 2
    assert "sft.steps (6 -> 7)" in capsys.readouterr().err


def test_every_metric_of_a_run_can_be_named(whole: Path) -> None:
    """In `train.best_metric` and `rl.stop.metric`, which are checked against these names."""
    config = load(whole / "tiny/config.toml")
    with closing(SqliteStore(whole / "tiny/store.sqlite", read_only=True)) as store:
        for stage in ("sft", "rl"):
            names = {name for _, values in store.metrics(stage) for name in values}
            assert {n for n in names if not any(fnmatchcase(n, known) for known in names_of(config, stage))} == set()


@pytest.mark.full
def test_a_signal_of_the_system_ends_a_run_which_goes_on(whole: Path, tmp_path: Path, wait_for) -> None:
    """As SLURM and Kubernetes send it."""
    with Forked(arguments(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        wait_for(run, "rl 3/6")
        threads = Path(f"/proc/{run.pid}/task").glob("*/children")
        children = [pid for thread in threads for pid in thread.read_text().split()]
        run.send_signal(signal.SIGTERM)
        _, error = run.communicate(timeout=60)
    assert run.returncode == STATUS
    assert "ended by SIGTERM; the same command goes on" in error
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert not list(Path("/dev/shm").glob(f"*-{run.pid}-*"))
    finish(tmp_path)
    assert weights(tmp_path) == weights(whole)
    assert account(tmp_path) == account(whole)


def test_the_dumped_config_killed_and_interrupted_ends_with_the_same_bits(
    whole: Path, tmp_path: Path, wait_for, killed_and_finished, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed in imitation and in reinforcement, and told by control-C how to go on."""
    words = arguments(tmp_path, recipe=whole / "tiny/config.toml")
    with Forked(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        wait_for(run, "sft 1/6")
        run.kill()
        run.communicate()
    with Forked(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        wait_for(run, "rl 1/6")
        run.send_signal(signal.SIGINT)
        _, error = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "the same command goes on" in error
    killed_and_finished(words, ["rl 5/6"])
    assert weights(tmp_path) == weights(whole)
    assert account(tmp_path) == account(whole)
    assert checkpoints(tmp_path) == checkpoints(whole)
    assert main(["diff", str(whole / "tiny"), str(tmp_path / "tiny")]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "the same: init, sft, rl, eval, export",
        "equal, bit for bit",
    ]


@pytest.mark.kills
@pytest.mark.slow
def test_a_hundred_kills_at_random_moments(whole: Path, tmp_path: Path) -> None:
    moments = random.Random(7)
    for number in range(20):
        folder = tmp_path / str(number)
        for _ in range(5):
            with subprocess.Popen(command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
                deadline = time.monotonic() + moments.uniform(3, 25)
                while run.poll() is None and time.monotonic() < deadline:
                    os.sched_yield()
                    try:
                        run.wait(0.01)
                    except subprocess.TimeoutExpired:
                        continue
                run.kill()
        finish(folder)
        assert weights(folder) == weights(whole)
        assert account(folder) == account(whole)


def account(folder: Path) -> dict[str, int]:
    return json.loads((folder / "tiny" / "summary.json").read_text())["tokens"]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "tiny/rl/checkpoints").iterdir())
