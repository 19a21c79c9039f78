"""A user's own data, end to end on the tiny model: conversations to imitate, tasks with a reward function, a model by
hub name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.store.sqlite import SqliteStore

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCKS = dict(
    re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
)
SETTINGS = (
    "rl.steps=2",
    "rl.groups_per_step=2",
    "rollout.group_size=3",
    "rollout.sampling.max_turn_tokens=8",
    "run.threads=1",
)


def finished(recipe: str, *overrides: str) -> None:
    assert main(["run", recipe, *(word for override in overrides for word in ("--set", override))]) == 0


def conversation(number: int) -> dict[str, object]:
    """The second of every two with a call of the tool, written as chat APIs write it."""
    question = {"role": "user", "content": f"{number} + 1 = ?"}
    answer = {"role": "assistant", "content": str(number + 1)}
    arguments = json.dumps({"code": f"print({number} + 1)"})
    call = {"id": "a", "type": "function", "function": {"name": "python", "arguments": arguments}}
    called = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": f"{number + 1}\n"},
    ]
    return {"messages": [question, *(called if number % 2 else ()), answer]}


def test_conversations_from_a_file_are_imitated(given: Path, tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(conversation(number)) + "\n" for number in range(12)))
    finished(str(given), f"sft.data={data}", 'run.stages=["sft"]', "sft.train.learning_rate=0.01", "sft.steps=30")
    store = SqliteStore(tmp_path / "runs/tiny/store.sqlite", read_only=True)
    losses = [values["loss_imitate"] for _, values in store.metrics("sft")]
    result = store.get("stage/sft")
    store.close()
    assert result["rows"] == 12
    assert len(losses) == 30 and losses[-1] < 0.8 * losses[0]


def test_the_tutorials_reward_function_is_trained(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its recipe as it stands on the page, but for the model and the number of steps. A random model earns no reward,
    so that every token is accounted for as of no advantage and no agreement of log-probabilities is claimed."""
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
    with contextlib.chdir(tmp_path):
        finished("capitals.toml", f"models.policy.path={checkpoint}", *SETTINGS)
    summary = json.loads((tmp_path / "runs/capitals/summary.json").read_text())
    assert summary["logprob_max_abs_diff"] is None
    assert summary["eval_tasks"] == 1 and summary["rl_success"] == 0.0
    assert summary["tokens_sampled"] == summary["tokens"]["zero_advantage"] > 0
    assert (tmp_path / "runs/capitals/export/model.safetensors").is_file()
    assert "report: runs/capitals/report.html" in capsys.readouterr().out


@pytest.mark.slow
def test_a_function_of_trl_and_a_row_that_does_not_fit(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tutorial's recipe with the function of docs/from-trl.md. A short file comes again: its rows are counted."""
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
    page = (PAGE.parent / "from-trl.md").read_text(encoding="utf-8")
    (tmp_path / "capitals.py").write_text(re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[0])
    rows = [json.loads(line) for line in (tmp_path / "capitals.jsonl").read_text().splitlines()]
    more = [{"question": "Where? " * 900, "capital": "x"}, *({"question": f"{n}?", "capital": "y"} for n in range(9))]
    (tmp_path / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + more))
    with contextlib.chdir(tmp_path):
        assert (
            main(["check", "capitals.toml", "--set", f"models.policy.path={checkpoint}", "--set", "env.held_out=1"])
            == 0
        )
    assert re.search(rf"context: 1 of {len(rows) + len(more) - 1} prompts do not fit", capsys.readouterr().out)


TOOLS_OF_A_TASK = """
from sparring import Env
from sparring.types import Observation, ToolSpec


class Asks(Env):
    def generate(self, random):
        return {"prompt": f"Look up {random.randint(0, 9999)}."}

    @property
    def tools(self):
        spec = ToolSpec(name="look", description="deep " * 30, parameters={"type": "object", "properties": {}})
        return () if self._task is None else (spec,)

    async def step(self, reply):
        return Observation(done=True)

    def reward(self, completion, task):
        return float(completion == "nothing")
"""


def test_prompts_are_measured_with_the_tools_of_their_task(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "asks.py").write_text(TOOLS_OF_A_TASK)
    unread = "sft.data=nowhere.jsonl"  # of a stage that the run does not have
    words = ("env.name=" + str(tmp_path / "asks.py") + ":Asks", 'run.stages=["rl"]', unread)
    assert main(["check", str(given), *(part for word in words for part in ("--set", word))]) == 0, capsys.readouterr()
    found = re.search(r"context: prompts of up to (\d+) tokens leave", capsys.readouterr().out)
    assert found is not None and int(found[1]) > 60


@pytest.mark.full
def test_a_fresh_model_from_nothing_but_files(given: Path, tmp_path: Path) -> None:
    """No checkpoint and no expert: the tokenizer, the demonstrations and the tasks all come from files."""
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(conversation(2 * number)) + "\n" for number in range(12)))
    rows = [{"prompt": f"{number} + 2 = ?", "answer": number + 2} for number in range(20)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judge.py").write_text(
        "def reward(completion: str, answer: str) -> float:\n    return 1.0 if completion == answer else len(completion) % 5 / 10\n"
    )
    text = given.read_text()
    init = "[models.policy.init]\nhidden_size = 32\nnum_layers = 1\nnum_heads = 2\nnum_kv_heads = 1\nhead_dim = 16\n"
    env = f'[env]\nreward = "{tmp_path}/judge.py:reward"\ndata = "{tmp_path}/tasks.jsonl"\n\n[env.limits]'
    text = re.sub(
        r"\[models.policy\].*?\[env.limits\]", lambda _: f"{init}vocab_size = 400\n\n{env}", text, flags=re.DOTALL
    )
    given.write_text(text)
    learnt = ("sft.steps=60", "sft.train.learning_rate=0.01")  # to end an answer: one that is cut short earns nothing
    finished(str(given), f"sft.data={tmp_path}/chats.jsonl", "eval.tasks=4", "eval.no_tool_tasks=0", *learnt, *SETTINGS)
    summary = json.loads((tmp_path / "runs/tiny/summary.json").read_text())
    assert set(summary["wall_s"]) == {"init", "sft", "rl", "eval", "export"}
    assert summary["logprob_max_abs_diff"] == 0.0 and summary["tokens_trained"] > 0


@pytest.mark.full
def test_a_model_by_its_hub_name(given: Path, checkpoint: Path, tmp_path: Path) -> None:
    """In a cache laid out as the library does it, with the network shut off."""
    model = tmp_path / "hub/models--owner--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    for folder in ("refs", "blobs", f"snapshots/{commit}"):
        (model / folder).mkdir(parents=True)
    (model / "refs/main").write_text(commit)
    for file in checkpoint.iterdir():
        blob = model / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (model / "snapshots" / commit / file.name).symlink_to(Path("../../blobs") / blob.name)
    overrides = ("models.policy.path=owner/name", 'run.stages=["rl", "export"]', *SETTINGS)
    words = [
        *(sys.executable, "-m", "sparring.cli.main", "run", str(given)),
        *(w for o in overrides for w in ("--set", o)),
    ]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs/tiny/export/config.json").read_text())["model_type"] == "qwen3"
