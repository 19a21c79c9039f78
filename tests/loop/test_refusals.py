"""Bad input, through the real command line: refused as *where: expected X, got Y; do Z*, status 2, before any work
starts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from forked import finished
from refusals import without_waits
from suite import short_of

from sparring.cli.main import main
from sparring.dashboard.page_data import GROUP_STAGES
from sparring.launch.run import opened
from sparring.recipe.load import load
from sparring.recipe.run_config import resolve
from sparring.stages.runtime.evaluation import held_out
from sparring.store.sqlite import SqliteStore

REFUSAL = re.compile(r"(?P<where>.+?): expected (?P<expected>.+), got (?P<got>.+?); (?P<do>.+)", re.DOTALL)
COMMAND = (sys.executable, "-m", "sparring.cli.main")


@pytest.fixture
def refused(given: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Callable[..., str]:
    """Refuses the tiny recipe with some overrides, by `check` and, in the full suite, by `run`; the message without where
    it was set. In the short suite `run` refuses what tests of its own give it."""
    verbs = ("check", "run") if request.config.getoption("--full") else ("check",)

    def said(*overrides: str, text: Callable[[str], str] = str, verbs: Sequence[str] = verbs) -> str:
        given.write_text(text(given.read_text()))
        arguments = [str(given), *(word for override in overrides for word in ("--set", override))]
        messages = []
        for verb in verbs:
            capsys.readouterr()
            assert main([verb, *arguments]) == 2
            out, error = capsys.readouterr()
            assert out == ""
            messages.append(without_waits(error).strip())
        assert len(set(messages)) == 1
        assert REFUSAL.fullmatch(messages[0]), messages[0]
        assert nothing_done(given.parent / "runs")
        for source in (f"{given}: ", *(f"--set {override}: " for override in overrides)):
            messages[0] = messages[0].removeprefix(source)
        return messages[0]

    return said


def nothing_done(runs: Path) -> bool:
    """No stage's folder, no config that the next run would be held to, and an empty store if any."""
    for folder in runs.iterdir() if runs.exists() else ():
        if {entry.name for entry in folder.iterdir()} & {"init", "sft", "rl", "export", "config.toml", "summary.json"}:
            return False
        store = SqliteStore(folder / "store.sqlite", read_only=True)
        groups = [group for stage in GROUP_STAGES for group in store.groups(stage=stage)]
        rows = [*groups, *store.events(), *store.metrics("sft"), *store.metrics("rl"), store.get("stage/init")]
        store.close()
        if rows != [None]:
            return False
    return True


WORLDS = """from sparring.envs.base import Env
from sparring.types import Message, Observation, Score


class Silent(Env):
    def generate(self, random):
        return {"prompt": f"Say {random.randint(1, 1 << 40)}.", "answer": "1"}

    async def score(self, trajectory):
        return Score(reward=0.0, success=False)


class Broken(Env):
    def generate(self, random):
        return {"prompt": str(random.random())}

    def reward(self, completion, task):
        return 1 / 0


class Generous(Broken):
    def reward(self, completion, task):
        return 1


class Endless(Broken):
    def reward(self, completion, task):
        return completion == "right"

    def expert(self, task):
        return lambda messages: Message(role="assistant", content="right")

    async def step(self, reply):
        return Observation(messages=(Message(role="user", content="go on"),))


class Tires(Broken):
    def reward(self, completion, task):
        return completion == "right"

    def expert(self, task):
        said = "right" if int(task.id.rpartition("/")[2]) < 10 else "wrong"
        return lambda messages: Message(role="assistant", content=said)
"""
"""Of the last, an expert that is right for the first task, which alone would not tell, and for no other after the
tenth."""


@pytest.fixture
def worlds(tmp_path: Path) -> Path:
    """The file of WORLDS."""
    file = tmp_path / "worlds_of_a_user.py"
    file.write_text(WORLDS)
    return file


@pytest.mark.parametrize(
    ("world", "settings", "where", "said"),
    [
        ("Broken", ('run.stages=["rl"]',), "task Broken/train/0: expected an environment", "reward: ZeroDivisionError"),
        ("Generous", ('run.stages=["rl"]',), "task Generous/train/0: expected no reward", ""),
        ("Endless", (), "task Endless/demonstration/0: expected an expert", ""),
        ("Tires", ("env.demonstrations=40",), "[env]: expected an expert that solves nine in ten tasks", ""),
    ],
)
def test_a_wrong_world(
    refused: Callable[..., str], worlds: Path, world: str, settings: Sequence[str], where: str, said: str
) -> None:
    message = refused(f"env.name={worlds}:{world}", *settings)
    assert message.startswith(where) and said in message


def test_what_is_wrong_with_recipe_and_model_comes_in_one_answer(
    given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("rollout.sampling.temperature=0", "train.best_metric=joy")
    assert main(["check", str(given), *(word for setting in settings for word in ("--set", setting))]) == 2
    lines = without_waits(capsys.readouterr().err).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["train.best_metric", "rollout.sampling.temperature"]


def test_a_reward_that_never_ends_is_refused_by_its_name(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (given.parent / "hangs.py").write_text("import threading\ndef reward(completion): threading.Event().wait()\n")
    (given.parent / "rows.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    world = f"{{reward = '{given.parent}/hangs.py:reward', data = '{given.parent}/rows.jsonl'}}"
    settings = (f"env={world}", "rollout.timeouts.score_s=0.05", 'run.stages=["rl"]')
    assert main(["check", str(given), *(word for setting in settings for word in ("--set", setting))]) == 2
    assert "/hangs.py:reward: no score after 0.05 s (rollout.timeouts.score_s)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stages", "do"),
    [
        (["init", "rl"], "start from a checkpoint (models.policy.path)"),
        (["init", "sft", "rl"], "leave this kind of task out of the demonstrations"),
    ],
)
def test_the_refusal_of_a_world_without_an_expert_names_the_ways_out(
    stages: list[str], do: str, worlds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fresh model's tokenizer, or what the sft stage imitates."""
    settings = (f"env.name={worlds}:Silent", f"run.stages={json.dumps(stages)}")
    folder = f"run.directory={tmp_path}"
    words = [word for setting in (*settings, folder) for word in ("--set", setting)]
    assert main(["check", str(Path(__file__).parent / "tiny.toml"), *words]) == 2
    error = capsys.readouterr().err
    assert "expected an expert" in error and f"write expert(self, task), or {do}, or" in error


@pytest.mark.parametrize(
    ("override", "where", "said"),
    [
        ("rl.stepps=3", "rl.stepps", "do you mean rl.steps?"),
        ("rl.train.learning_rate=-1.0", "rl.train", "learning_rate must be above 0"),
        ("eval.tasks=-1", "eval", "tasks, no_tool_tasks, every and every_tasks must be 0 or more"),
        ("run.name=..", "run", "name must be one folder name"),
        ("run.name=", "run", "name must be one folder name"),
        ("models.policy.init.digits=2", "models.policy", "expected exactly one of `path`"),
        ("env.name=no_such_package:World", "env.name", "expected an installed module"),
        ("env.name=reasoning_gim", "env.name", "expected one of reasoning_gym, package.module:Name, or path"),
        ("env.name=worlds.py:Sums", "env.name", "expected a Python file"),
        ("env.args.colour=red", "env.args", "got colour: expected "),
        ("env.held_out=20000", "env Sums", "lower held_out and demonstrations"),
        ("eval.tasks=13", "eval.tasks", "expected at most 12"),
        ("eval.no_tool_tasks=7", "eval.no_tool_tasks", "expected at most 6"),
        ("rollout.group_size=1", "rollout.group_size", "expected at least 2"),
        ("rollout.group_size=1000000000", "rollout.group_size", "GiB or more; lower rollout.group_size"),
        ("rl.groups_per_step=1000000000", "rl.groups_per_step", "groups of 3 rollouts, which take"),
        (
            "rollout.sampling.max_turn_tokens=100000000",
            "rollout.sampling.max_turn_tokens",
            "expected at most 512, the positions",
        ),
        ("train.best_metric=nonsense", "train.best_metric", ", rollout/reward, rollout/"),
        ("rl.train.best_metric=rl/eval/success", "rl.train.best_metric", "set eval.every"),
        ('sft.train={best_metric="rollout/reward"}', "sft.train.best_metric", "expected a metric of the run: loss_*"),
        ('rl.stop={metric="rollout/rewards", patience=2}', "rl.stop.metric", "expected a metric of the run"),
        ("rl.stop={min_delta=0.1}", "rl.stop", "patience or target must be set"),
        ("rollout.sampling.temperature=0", "rollout.sampling.temperature", "expected above 0 while the run trains"),
        ("rollout.sampling.top_k=1", "rollout.sampling.top_k", "expected 0, or 2 and more, while the run trains"),
        ("rollout.sampling.min_p=1", "rollout.sampling.min_p", "expected below 1 while the run trains"),
        ("rollout.sampling.min_p=1.5", "rollout.sampling", "0 <= min_p <= 1"),
        ("rollout.sampling.top_p=0", "rollout.sampling", "0 < top_p <= 1"),
        ("engine.kv.tokens=256", "engine", "expected a cache of at least 512 tokens"),
        ("engine.kv.bytes=1000", "engine.kv.bytes", "expected prompts"),
        ("env.demonstrations=0", "[env]", "expected tasks to demonstrate"),
        ('run.stages=["rl", "sft"]', "run.stages", "expected sft"),
        ('run.stages=["init", "eval"]', "eval.checkpoints", "expected one of the run's stages"),
        ("sandbox.bwrap=bubblewrapp", "sandbox.bwrap", "do: apt-get install bubblewrap"),
        ("models.policy.path=/no/such/model", "model /no/such/model", "got no such folder"),
        ("models.policy.renderer=qwen33", "renderer", "correct the name"),
    ],
)
def test_a_wrong_setting(refused: Callable[..., str], override: str, where: str, said: str) -> None:
    message = refused(override)
    assert message.startswith(f"{where}: ")
    assert said in message


@pytest.mark.parametrize("override", ["rl.stepps=3", "eval.tasks=13", "models.policy.path=/no/such/model"])
def test_a_run_refuses_what_a_check_does(refused: Callable[..., str], override: str) -> None:
    """What the recipe's fields, its environment and its model refuse."""
    assert ": expected " in refused(override, verbs=("check", "run"))


def test_a_model_that_is_too_short_for_its_prompts(refused: Callable[..., str]) -> None:
    def fresh(text: str) -> str:
        return re.sub(r"path = .*", "init = { max_positions = 100 }", text)

    message = refused(text=fresh)
    assert message.startswith("task Sums/demonstration/0: ")
    assert "expected fewer tokens than the 100 positions of the model" in message
    assert "raise models.policy.init.max_positions" in message


@pytest.fixture
def broken(checkpoint: Path, tmp_path: Path) -> Callable[..., str]:
    """The override that names a copy of the checkpoint without some files, or with another config."""

    def made(*without: str, config: Callable[[dict], object] = dict) -> str:
        folder = tmp_path / "broken"
        shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns(*without))
        file = folder / "config.json"
        if file.exists():
            file.write_text(json.dumps(config(json.loads(file.read_text()))))
        return f"models.policy.path={folder}"

    return made


LAYERS = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
CHANGING = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
"""Rotary frequencies that change with the length of the sequence: an architecture that is not exact."""


@pytest.mark.parametrize(
    ("without", "config", "said"),
    [
        (["config.json"], {}, "or a GGUF file, got a folder"),
        (["*.safetensors"], {}, "broken: expected weights"),
        (["tokenizer.json"], {}, "broken/tokenizer.json: expected a tokenizer.json"),
        ([], LAYERS, "broken: expected all weights"),
        ([], {"intermediate_size": 48}, "mlp.down_proj.weight of shape [32, 48]"),
        ([], {"vocab_size": 300}, "broken/tokenizer.json: expected ids"),
        ([], CHANGING, "expected rotary frequencies"),
        ([], None, "broken/config.json: expected a"),
        ([], {"model_type": "resnet", "architectures": []}, "broken/config.json: expected a"),
        ([], {"max_position_embeddings": 150}, "task Sums/demonstration/0: expected fewer tokens"),
    ],
)
def test_a_wrong_model(
    refused: Callable[..., str], broken: Callable[..., str], without: list[str], config: dict | None, said: str
) -> None:
    message = refused(broken(*without, config=lambda given: [] if config is None else {**given, **config}))
    assert said in message and (config is not LAYERS or "(11 in all)" in message)


def test_a_tokenizer_without_a_chat_template(refused: Callable[..., str], broken: Callable[..., str]) -> None:
    folder = broken("chat_template.jinja", config=lambda config: {**config, "model_type": "llama"})
    file = Path(folder.partition("=")[2]) / "tokenizer_config.json"
    named = json.loads(file.read_text())
    named.pop("chat_template", None)
    file.write_text(json.dumps(named))
    assert "broken: expected a chat template (chat_template.jinja or tokenizer_config.json)" in refused(folder)


QUESTION = {"role": "user", "content": "1 + 1 = ?"}
ANSWER = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": [', ":2: expected one JSON object on the line"),
        ("[1, 2]", ":2: expected a JSON object"),
        (json.dumps({"messages": [QUESTION]}), ":2: expected an assistant message to learn"),
        (json.dumps({"messages": [ANSWER, QUESTION]}), ":2, messages[0]: expected a question before the first reply"),
        (
            json.dumps({"messages": [QUESTION, {**ANSWER, "role": "bot"}]}),
            ":2, messages[1]: expected an object with role",
        ),
        (json.dumps({"text": "2"}), ":2: expected a column 'prompt'"),
        (
            json.dumps({"messages": [QUESTION, {**ANSWER, "content": "2" * 900}]}),
            ", row 2: expected fewer tokens than the 512 positions of the model",
        ),
    ],
)
def test_a_row_of_conversations_that_does_not_parse(
    refused: Callable[..., str], tmp_path: Path, line: str, said: str
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"messages": [QUESTION, ANSWER]}) + "\n" + line + "\n")
    assert f"{data}{said}" in refused(f"sft.data={data}")


@pytest.fixture
def held_out_prompts(given: Path) -> list[str]:
    """What the tiny recipe evaluates on."""

    async def asked() -> list[str]:
        async with opened(resolve(load(given))) as context:
            return [task.messages[-1].content for task in held_out(context.config, context.factory, 6)]

    return asyncio.run(asked())


CHATS: dict[str, Callable[[str], list[dict]]] = {
    "alone": lambda text: [{"role": "user", "content": text}, ANSWER],
    "behind a system message": lambda text: [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": text},
        ANSWER,
    ],
    "later in a chat": lambda text: [QUESTION, ANSWER, {"role": "user", "content": text}, ANSWER],
}


@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_that_asks_for_a_held_out_task(
    refused: Callable[..., str], tmp_path: Path, held_out_prompts: list[str], chat: str
) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [[QUESTION, ANSWER], CHATS[chat](f" {held_out_prompts[4]}\n")]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    message = refused(f"sft.data={data}")
    expected = "expected a task that is in no training data"
    assert message.startswith(f"held-out task Sums/eval/4: {expected}, got {data}, row 2;")
    file = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": text, "chosen": "2", "rejected": "3"} for text in (QUESTION["content"], held_out_prompts[0])]
    file.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    message = refused(f"preference.data={file}", 'run.stages=["preference", "eval"]')
    assert message.startswith(f"held-out task Sums/eval/0: {expected}, got {file}:2;")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ('{"prompt": "a", "answer": "1"}\n{"prompt": ', "tasks.jsonl:2: expected one JSON object on the line"),
        ('{"question": "a", "answer": "1"}\n', "tasks.jsonl:1: expected a column"),
        ('{"prompt": "a", "answer": "1"}\n', "expected fewer than the 1"),
        ("", "tasks.jsonl: expected prompts"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', "expected a column 'answer' for the reward function"),
    ],
)
def test_task_files(refused: Callable[..., str], tmp_path: Path, rows: str, said: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(rows)
    (tmp_path / "judge.py").write_text("def reward(completion: str, answer: str) -> float:\n    return 0.0\n")

    def rewarded(text: str) -> str:
        env = f'[env]\nreward = "{tmp_path}/judge.py:reward"\ndata = "{tmp_path}/tasks.jsonl"\n\n[env.limits]'
        return re.sub(r"\[env\].*?\[env.limits\]", env, text, flags=re.DOTALL)

    assert said in refused('run.stages=["rl"]', text=rewarded)


def test_user_namespaces_blocked(refused: Callable[..., str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # bubblewrap does not run as root
        fake = Path(folder) / "bwrap"
        fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
        fake.chmod(0o755)
        message = refused(f"sandbox.bwrap={fake}")
    assert message.startswith("sandbox: expected a machine")
    assert "uid map: Permission denied" in message and "userns" in message


def test_no_bubblewrap_does_not_matter_to_a_world_without_boxes(
    given: Path, worlds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("sandbox.bwrap=none", 'run.stages=["rl"]', f"env.name={worlds}:Silent")
    assert main(["check", str(given), *(word for s in settings for word in ("--set", s))]) == 0
    assert "ready to run" in capsys.readouterr().out


@pytest.mark.parametrize("verb", short_of(["check", "run"], ["check"]))
def test_a_sink_without_its_library(given: Path, verb: str) -> None:
    code = "import sys; sys.modules['wandb'] = None; from sparring.cli.main import main; sys.exit(main())"
    arguments = [sys.executable, "-c", code, verb, str(given), "--set", 'observe.sinks=["wandb"]']
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert without_waits(done.stderr).startswith("observe.sinks: expected the wandb")
    assert nothing_done(given.parent / "runs")


def test_a_run_folder_that_cannot_be_made(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(f"run.directory={tmp_path}/file").startswith("run.directory: expected a folder")


def test_two_runs_in_one_folder(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = given.parent / "runs" / "tiny"
    folder.mkdir(parents=True)
    first = SqliteStore(folder / "store.sqlite")
    try:
        assert main(["run", str(given)]) == 2
    finally:
        first.close()
    message = capsys.readouterr().err.strip()
    assert REFUSAL.fullmatch(message)
    assert message.startswith(f"{folder}: expected no other run in this folder, got pid {os.getpid()}")


def test_a_refused_run_may_be_corrected_and_started_again(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was refused leaves nothing that the corrected recipe is held to."""
    assert main(["run", str(given), "--set", "eval.tasks=13"]) == 2
    assert main(["run", str(given), "--set", "rollout.group_size=1"]) == 2
    assert capsys.readouterr().err.splitlines()[1].startswith("rollout.group_size: ")


PATHS = "a path that this machine computes (exact-torch), got exact-tiles: no C++ compiler"


NO_COMPILER = {"SPARRING_KERNELS": "tiles", "CXX": "nothing of that name"}


@pytest.mark.parametrize(
    ("verb", "environment", "said"),
    short_of(
        [
            ("run", {"SPARRING_KERNELS": "exact"}, "SPARRING_KERNELS: expected one of off"),
            ("check", NO_COMPILER, f"SPARRING_KERNELS=tiles: expected {PATHS}"),
            ("serve", NO_COMPILER, f"SPARRING_KERNELS=tiles: expected {PATHS}"),
        ],
        [("check", NO_COMPILER, f"SPARRING_KERNELS=tiles: expected {PATHS}")],
    ),
)
def test_kernels_that_this_machine_cannot_compute(
    given: Path, checkpoint: Path, verb: str, environment: dict[str, str], said: str
) -> None:
    """In a process of its own, which chooses its path once."""
    command = (verb, str(checkpoint if verb == "serve" else given))
    done = finished(command, env={**os.environ, **environment}, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    error = without_waits(done.stderr)
    assert error.startswith(said) and REFUSAL.fullmatch(error.strip()), done.stderr
    assert nothing_done(given.parent / "runs")


@pytest.mark.full
def test_a_full_disk_loses_nothing(given: Path, tmp_path: Path) -> None:
    """A disk of its own under the run is filled to the last byte in the middle of RL, and freed again."""
    settings = ('run.stages=["rl"]', "rl.steps=30", "observe.lines_every_s=0")
    words = ["run", str(given), *(word for setting in settings for word in ("--set", setting))]
    assert main(words) == 0
    weights = hashlib.sha256((tmp_path / "runs/tiny/rl/model/model.safetensors").read_bytes()).hexdigest()
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = ["bwrap", "--dev-bind", "/", "/", "--size", str(48 << 20), "--tmpfs", str(disk), "--die-with-parent"]
    driver = [sys.executable, str(Path(__file__).with_name("full_disk.py")), str(disk)]
    done = subprocess.run(
        [*inside, *driver, *COMMAND, *words, "--set", f"run.directory={disk}"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["at"] and found["at"] != "30/30"
    assert found["code"] == 2, found["said"]
    assert REFUSAL.fullmatch(found["said"].strip()) and found["said"].startswith("disk: expected room to write")
    assert found["again"] == 0
    assert found["weights"] == weights
