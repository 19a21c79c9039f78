"""`sparring eval` on a tiny model: several samples, comparison, gate, endpoints, files; and evaluation beside a real
training."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from completions_server import CompletionsServer
from safetensors.numpy import load_file

from sparring.cli.main import main
from sparring.engine.config import BatchConfig, EngineConfig
from sparring.engine.native import NativeEngine
from sparring.model.load import load
from sparring.store.sqlite import SqliteStore

COMMAND = (sys.executable, "-m", "sparring.cli.main")


def output_of_eval(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> str:
    """What `sparring eval` prints, run in this process."""
    capsys.readouterr()
    assert main(["eval", *map(str, words)]) == code
    out, error = capsys.readouterr()
    return error if code == 2 else out


def folder_of(given: Path) -> Path:
    """The one evaluation's folder."""
    [folder] = (given.parent / "runs/tiny/evaluations").iterdir()
    return folder


def test_a_checkpoint_against_itself(given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = given.parent / "results.json"
    words = (given, checkpoint, checkpoint, "--samples", "3", "--k", "1,3", "--gate", "0.5", "--json", file)
    out = output_of_eval(capsys, *words)
    results = json.loads(file.read_text())
    one, other = (evaluated["evaluation"] for evaluated in results["evaluations"])
    assert (
        one == other and one["rollouts"] == 18 and one["success"]["tasks"] == 6 and list(one["pass_hat"]) == ["1", "3"]
    )
    assert all(len(task["rewards"]) == 3 for task in one["tasks"].values())
    [compared] = results["comparisons"]
    assert compared["verdict"] == "held" and compared["comparison"]["changes"]["pass^3"]["value"] == 0.0
    assert "gate: success may fall by 50.0 %: held" in out
    assert re.search(r"^pass\^3 +\+0\.0 % ", out, re.MULTILINE)
    report = re.search(r"^report: (.*)$", out, re.MULTILINE)
    assert report is not None and "</html>" in Path(report[1]).read_text()
    assert json.loads((folder_of(given) / "evaluation.json").read_text())["evaluations"] == results["evaluations"][:1]


def test_more_samples_go_on_from_fewer_and_an_earlier_file_is_a_baseline(
    given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_of_eval(capsys, given, checkpoint)
    before = folder_of(given) / "evaluation.json"
    kept = given.parent / "kept.json"
    kept.write_text(before.read_text())
    store = SqliteStore(folder_of(given) / "store.sqlite", read_only=True)
    first = {group.id: group.rollouts[0].trajectories[0].timing for group in store.groups(stage="eval")}
    out = output_of_eval(
        capsys, given, kept, checkpoint, "--samples", "2", "--gate", "0.02", "--figure", "reward", "--strict", code=1
    )
    assert "12 rollouts, 2 of each task" in out and "gate: reward may fall by 0.02: undecided" in out
    second = {group.id: group.rollouts[0].trajectories[0].timing for group in store.groups(stage="eval")}
    store.close()
    assert len(first) == 6 and len(second) == 12 and {name: second[name] for name in first} == first


def test_its_rollouts_can_be_replayed(given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output_of_eval(capsys, given, checkpoint, "--samples", "2")
    assert main(["replay", str(folder_of(given)), "eval/8"]) == 0
    assert capsys.readouterr().out.endswith("identical, bit for bit\n")


def test_a_regression_closes_the_gate(given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output_of_eval(capsys, given, checkpoint)
    better = json.loads((folder_of(given) / "evaluation.json").read_text())
    for task in better["evaluations"][0]["evaluation"]["tasks"].values():
        task["solved"], task["rewards"] = [True], [1.0]
    file = given.parent / "better.json"
    file.write_text(json.dumps(better))
    out = output_of_eval(capsys, given, file, checkpoint, "--gate", "0.01", code=1)
    assert "gate: success may fall by 1.0 %: REGRESSED" in out
    assert "gate: success may fall by 1.0 %: held" in output_of_eval(capsys, given, checkpoint, file, "--gate", "0.01")


def test_an_endpoint_scores_like_its_weights(given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = NativeEngine(load(checkpoint), EngineConfig(batch=BatchConfig(max_running=8, max_tokens=256)), threads=1)
    server = CompletionsServer(engine)
    file = given.parent / "results.json"
    try:
        output_of_eval(capsys, given, server.url, checkpoint, "--set", "rollout.sampling.temperature=0", "--json", file)
    finally:
        server.stop()
    theirs, ours = json.loads(file.read_text())["evaluations"]
    assert theirs["name"] == server.url
    assert theirs["evaluation"]["tasks"] == ours["evaluation"]["tasks"]


def test_another_environment(given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = given.parent / "other.py"
    world.write_text(
        "from sparring.envs.base import Env\n"
        "class Echo(Env):\n"
        "    def generate(self, random): return {'prompt': str(random.randint(0, 10**6)), 'answer': ''}\n"
        "    def reward(self, completion, task): return len(completion) / 100\n"
    )
    out = output_of_eval(capsys, given, checkpoint, "--env", f"{world}:Echo", "--set", "env.held_out=4", "--tasks", "4")
    assert " on Echo" in out and re.search(r"^reward +0.* 4$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{c}", "--gate", "0.1"), "--gate: expected two checkpoints"),
        (("{c}", "{c}", "--gate", "-1"), "--gate: expected a margin"),
        (("{c}", "{c}", "--gate", "nan"), "--gate: expected a margin"),
        (("{c}", "{c}", "--strict"), "--gate: expected a margin"),
        (("{c}", "{c}", "--gate", "0", "--figure", "joy"), "--figure: expected one of success"),
        (("{c}", "--k", "2"), "eval: expected ks"),
        (("{c}", "--k", "0"), "--k 0: eval: expected ks"),
        (("{c}", "--tasks", "-3"), "--tasks -3: eval: expected tasks"),
        (("ftp://x/y",), "ftp://x/y: expected a folder, or an endpoint's URL"),
        (("{c}", "--samples", "0"), "eval: expected samples"),
        (("{c}", "--k", "many"), "eval.ks: expected a list"),
        (("{c}", "--tasks", "13"), "eval.tasks: expected at most 12"),
        (("no/such",), "no/such: expected a Hugging Face checkpoint"),
        (("no/such.json",), "no/such.json: expected a result"),
        (("http://127.0.0.1:9/v1",), "engine at http://127.0.0.1:9/v1: expected "),
        (("{c}", "--env", "nowhere"), "env.name: expected one of reasoning_gym, package.module:Name, or path"),
        (
            ("{c}", "--json", "/no/such/folder/r.json"),
            "/no/such/folder/r.json: expected a file",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    error = output_of_eval(capsys, given, *(word.format(c=checkpoint) for word in words), code=2)
    assert message in error and "; " in error


@pytest.mark.parametrize("figure", ["joy", "pass@4", "pass^2"])
def test_a_figure_that_will_not_come_out_is_refused_before_anything_is_sampled(
    given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], figure: str
) -> None:
    words = (given, checkpoint, checkpoint, "--samples", "3", "--k", "1,3", "--gate", "0", "--figure", figure)
    expected = "--figure: expected one of success, reward, pass@1, pass@3, pass^1, pass^3"
    assert expected in output_of_eval(capsys, *words, code=2)
    assert not (given.parent / "runs/tiny/evaluations").exists()


def test_a_figure_that_the_baseline_lacks_is_refused(
    given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_of_eval(capsys, given, checkpoint)
    [before] = (given.parent / "runs/tiny/evaluations").glob("*/evaluation.json")
    kept = given.parent / "kept.json"
    before.rename(kept)
    words = (given, kept, checkpoint, "--samples", "2", "--k", "1,2", "--gate", "0", "--figure", "pass@2")
    assert "--figure: expected one of success" in output_of_eval(capsys, *words, code=2)
    assert not before.exists(), "nothing was sampled"


def test_evaluations_of_other_tasks_are_not_compared(
    given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_of_eval(capsys, given, checkpoint)
    file = folder_of(given) / "evaluation.json"
    error = output_of_eval(capsys, given, file, checkpoint, "--set", "run.seed=4", code=2)
    assert error.startswith("comparison: expected two evaluations")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            'engine.update.live_kv="drain"',
            "eval.every: expected 0",
        ),
        (
            'run.stages=["sft", "eval"]',
            "eval.every: expected 0",
        ),
        ("eval.every_tasks=13", "eval.every_tasks: expected at most 12"),
        ("eval.every=-1", "tasks, no_tool_tasks, every and every_tasks must be 0 or more"),
        ("eval.max_lost=1.5", "max_lost must be a share"),
        ("eval.share=1.0", "share must be above 0"),
    ],
)
def test_invalid_settings_of_evaluation_during_training_are_refused(
    given: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert main(["check", str(given), "--set", "eval.every=3", "--set", override]) == 2
    error = capsys.readouterr().err
    assert message in error and ": expected " in error and ", got " in error and "; " in error


BROKEN = (
    "from sparring.envs.base import Env\n"
    "from sparring.errors import JudgeError\n"
    "class Judged(Env):\n"
    "    def generate(self, random): return {'prompt': str(random.randint(0, 10**6)), 'answer': ''}\n"
    "    async def score(self, trajectory): raise JudgeError('judge: 503')\n"
)


def test_too_many_lost_rollouts_fail_it(given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = given.parent / "judged.py"
    world.write_text(BROKEN)
    words = (
        "--env",
        f"{world}:Judged",
        "--set",
        "env.held_out=4",
        "--tasks",
        "4",
        "--set",
        "rollout.retries.rebuilds=0",
    )
    assert main(["eval", str(given), str(checkpoint), *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "EvaluationFailed: eval: expected at most 5.0% of rollouts broken by infrastructure or judge"
    )
    assert "got 4 of 4: eval/0 (JudgeError: judge: 503); " in error
    out = output_of_eval(capsys, given, checkpoint, *words, "--set", "eval.max_lost=1.0")
    assert "lost to infrastructure or judge, and in no figure: 4 of 4: eval/0 (JudgeError: judge: 503)" in out


@pytest.mark.slow
def test_killed_and_interrupted_it_goes_on(given: Path, checkpoint: Path) -> None:
    settings = ("--set", "observe.lines_every_s=0", "--set", "observe.progress=plain")
    words = [*COMMAND, "eval", str(given), str(checkpoint), *settings, "--samples"]
    recorded: list[set[int]] = []
    for stop in (signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen([*words, "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [line for line, _ in zip(process.stdout, range(50), strict=False)]
            second = subprocess.run([*words, "100000"], capture_output=True, text=True, timeout=120)
            process.send_signal(stop)
            _, error = process.communicate(timeout=60)
        assert second.returncode == 2 and f"got pid {process.pid}; " in second.stderr
        assert process.returncode == (-9 if stop == signal.SIGKILL else 130), error
        assert stop == signal.SIGKILL or "the same command goes on where it stopped: sparring eval " in error
        first = int(lines[1].removeprefix("eval ").partition("/")[0])
        assert first == len(recorded[0] if recorded else ()) + 1
        store = SqliteStore(folder_of(given) / "store.sqlite", read_only=True)
        recorded.append({group.index for group in store.groups(stage="eval")})
        store.close()
    assert 40 < len(recorded[0]) < len(recorded[1]) and recorded[0] < recorded[1]
    samples = max(recorded[1]) // 6 + 2
    done = subprocess.run([*words, str(samples)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"/{6 * samples}  eta ") == 6 * samples - len(recorded[1]) > 0


@pytest.mark.slow
def test_an_endpoint_of_ours_keeps_its_weights(
    given: Path,
    checkpoint: Path,
    served: Callable[..., AbstractContextManager[tuple[subprocess.Popen[str], str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = given.parent / "results.json"
    with served(checkpoint) as (_, url):
        output_of_eval(capsys, given, url, checkpoint, "--json", file)
    theirs, ours = json.loads(file.read_text())["evaluations"]
    assert theirs["evaluation"] == ours["evaluation"]


@pytest.mark.slow
def test_a_killed_training_evaluates_beside_itself_what_is_due(given: Path, killed_and_finished) -> None:
    settings = ("rl.steps=12", "rl.train.save_every=2", "eval.every=4", "eval.every_tasks=12", "run.stages=['rl']")
    words = ["run", str(given), *(word for s in (*settings, "observe.lines_every_s=0") for word in ("--set", s))]
    killed_and_finished(words, ["rl 4/12", "rl/eval: after step 4", "rl 9/12"])
    store = SqliteStore(given.parent / "runs/tiny/store.sqlite", read_only=True)
    found = dict(store.metrics("rl/eval"))
    rows = {step: [group.index for group in store.groups(stage=f"rl/eval/{step}")] for step in found}
    store.close()
    assert set(found) >= {4, 12} and all(row == list(range(12)) for row in rows.values())


@pytest.mark.slow
def test_training_has_the_same_bits_with_evaluation_beside_it(given: Path) -> None:
    weights, tokens = [], []
    for name, every in (("with", 2), ("without", 0)):
        settings = (f"eval.every={every}", "eval.every_tasks=12", "run.stages=['rl']", "observe.progress=off")
        assert main(["run", str(given), "--name", name, *(word for s in settings for word in ("--set", s))]) == 0
        folder = given.parent / "runs" / name
        weights.append(load_file(folder / "rl/model/model.safetensors"))
        tokens.append(json.loads((folder / "summary.json").read_text())["tokens"])
    assert tokens[0] == tokens[1]
    assert all(weights[0][key].tobytes() == weights[1][key].tobytes() for key in weights[0] | weights[1])
    store = SqliteStore(given.parent / "runs/with/store.sqlite", read_only=True)
    found = dict(store.metrics("rl/eval"))
    groups = {f"rl/eval/{step}": list(store.groups(stage=f"rl/eval/{step}")) for step in found}
    trained = [rollout for group in store.groups(stage="rl") for rollout in group.rollouts]
    store.close()
    assert found and all(values["tasks"] == 12 and values["version_low"] >= step for step, values in found.items())
    assert all(values["nothing_to_train"] == 0.0 for values in found.values())
    assert all(len(rows) == 12 for rows in groups.values()) and {rollout.purpose for rollout in trained} == {"train"}
