"""Rubrics in whole runs: a real engine judges, alone and in pairs; checks over a file; what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, message
from suite import short_of

from sparring.cli.main import main
from sparring.launch.run import run_recipe
from sparring.recipe.load import load
from sparring.store.sqlite import SqliteStore
from sparring.types import Group

RUBRIC = """
[env.rubric.right]
kind = "number"
decides = true

[env.rubric.short]
kind = "regex"
pattern = "^.{1,3}$"
weight = 0.1

[env.rubric.liked]
kind = "judge"
model = "judge"
prompt = "Is {completion} the answer to {prompt}"
choices = { yes = 1.0, no = 0.0 }
constrain = true
weight = 0.25
max_tokens = 16

[env.rubric.preferred]
kind = "pairwise"
model = "judge"
prompt = "{first} or {second}"
range = [0, 9]
constrain = true
weight = 0.5
max_tokens = 64
opponents = 1
"""
SETTINGS = (
    "rl.steps=2",
    "rollout.sampling.max_turn_tokens=8",
    "run.threads=1",
    'rollout.sampling.constraint={kind="regex", source="[0-9]{1,3}"}',
)


@pytest.fixture
def recipe(given: Path, checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny recipe over a file, with a rubric whose judge is the checkpoint itself."""
    rows = [{"prompt": f"{number} + 2 = ?", "answer": number + 2} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head, rest = given.read_text().split("[env]")
    limits = rest[rest.index("[env.limits]") :]
    env = f'[env]\ndata = "{tmp_path}/rows.jsonl"\n{RUBRIC}'
    given.write_text(f'{head}[models.judge]\npath = "{checkpoint}"\n\n{env}\n{limits}')
    return given


def words(*settings: str) -> list[str]:
    return [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]


def run_tiny(recipe: Path, name: str) -> tuple[list[Group], list[dict[str, float]], dict[str, Any]]:
    config = load(
        recipe, [*SETTINGS, f"run.name={name}", 'run.stages=["rl", "eval"]', "eval.tasks=2", "eval.no_tool_tasks=0"]
    )
    folder = run_recipe(config)
    store = SqliteStore(folder / "store.sqlite", read_only=True)
    found = list(store.groups(stage="rl")), [values for _, values in store.metrics("rl")], store.get("stage/eval")
    store.close()
    return found


def test_a_run_whose_rewards_a_real_engine_gives(recipe: Path) -> None:
    """Twice with the same rewards: a judge's seed is its question's."""
    (groups, steps, evaluated), (again, _, _) = run_tiny(recipe, "one"), run_tiny(recipe, "two")
    assert len(groups) == 4
    for group in groups:
        assert len(group.rollouts) == 3 and not group.failed
        for score in group.scores:
            parts = score.parts
            assert set(parts) == {"right", "short", "liked", "preferred"} and parts["liked"] in (0, 1)
            assert score.reward == pytest.approx(
                parts["right"] + 0.1 * parts["short"] + 0.25 * parts["liked"] + 0.5 * parts["preferred"]
            )
        assert sum(score.parts["preferred"] for score in group.scores) == pytest.approx(1.5), "half, on average"
    assert [g.scores for g in again] == [g.scores for g in groups]
    assert all(values["judge/questions"] > 0 and values["judge/reply_s"] > 0 for values in steps)
    assert "judge/failures" not in steps[0] and "judge/unread" not in steps[0]
    assert steps[0]["rollout/part/liked"] == pytest.approx(
        sum(s.parts["liked"] for g in groups[:2] for s in g.scores) / 6
    )
    assert evaluated["rl"]["success"]["tasks"] == 2 and not evaluated["rl"]["lost"]


def test_a_judge_that_never_answers_trains_nothing(recipe: Path) -> None:
    """Not a reward of 0: every rollout leaves its group, with the judge's failure in the record."""
    text = recipe.read_text().replace(
        "constrain = true\nweight = 0.5", "constrain = true\nweight = 0.5\ntimeout_s = 1e-9\nretries = 0"
    )
    recipe.write_text(text)
    groups, steps, _ = run_tiny(recipe, "one")
    assert len(groups) == 4 and not any(group.rollouts for group in groups)
    failures = [r.outcome for group in groups for r in group.failed]
    assert len(failures) == 12 and {outcome.kind for outcome in failures} == {"judge_failed"}
    assert all("no reply after 1e-09 s" in outcome.failure.message for outcome in failures if outcome.failure)
    assert [values["tokens_trained"] for values in steps] == [0, 0]


def test_the_rubric_is_evaluated_by_the_command(
    recipe: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(recipe), str(checkpoint), "--tasks", "3", *words()]) == 0
    assert re.search(r"\b3\b", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            'env.rubric.liked.model="nobody"',
            "env.rubric.liked.model: expected a table",
        ),
        (
            'env.rubric.liked.model="policy"',
            "env.rubric.liked.model: expected a table",
        ),
        ('models.judge.path="./nowhere"', "model ./nowhere: expected a Hugging Face checkpoint folder or a hub name"),
        ("env.rubric.liked.prompt=Well?", "prompt must contain {completion}"),
        (
            'models.judge.served={kind="openai", url="http://127.0.0.1:9/v1"}',
            "env.rubric.liked.constrain: expected false",
        ),
        (
            "env.rubric={r={kind='ranking', model='judge', prompt='{answers}'}}",
            "env.rubric: expected a part that scores one answer by itself",
        ),
    ],
)
def test_invalid_rubrics_are_refused(recipe: Path, change: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(recipe), *words("run.stages=['rl', 'eval']", change)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("evaluates", short_of(["run.stages=['rl', 'eval']", "eval.every=1"], ["eval.every=1"]))
def test_a_domain_in_which_answers_are_only_compared_cannot_be_evaluated(
    recipe: Path, tmp_path: Path, evaluates: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n} + 2 = ?", "answer": n + 2, "domain": ("sums", "stories")[n % 2]} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    right = "right={kind='number', domains=['sums']}"
    rubric = f"env.rubric={{{right}, best={{kind='ranking', model='judge', prompt='{{answers}}', domains=['sums', 'stories']}}}}"
    asked = ("run.stages=['rl']", evaluates, "eval.tasks=2", "eval.every_tasks=2", "eval.no_tool_tasks=0")
    assert main(["check", str(recipe), *words(*asked, rubric)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("env.rubric: expected a part") and "in domain 'stories'" in error
    settled = rubric.replace("['sums']", "['sums', 'stories']")
    assert main(["check", str(recipe), *words(*asked, settled)]) == 0, capsys.readouterr().err


def test_a_judge_that_cannot_be_reached_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text(recipe.read_text().replace("constrain = true\n", ""))
    unreached = 'models.judge.served={kind="openai", url="http://127.0.0.1:9/v1"}'
    assert main(["check", str(recipe), *words("run.stages=['rl']", unreached)]) == 2
    assert "http://127.0.0.1:9/v1: expected" in capsys.readouterr().err


def test_more_samples_ask_the_judge_nothing_that_it_has_said(
    given: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A greedy policy says the same in every sample; the evaluation's folder has what the judge said of it."""
    server = ChatServer(lambda body: message("yes"))
    served = f'served = {{ kind = "chat", url = "{server.url}", served_model = "big" }}'
    liked = 'kind = "judge"\nmodel = "judge"\nprompt = "Is {completion} the answer to {prompt}"\nchoices = { yes = 1.0, no = 0.0 }'
    text = given.read_text().replace(
        "[env.limits]", f"[env.rubric.liked]\n{liked}\n\n[models.judge]\n{served}\n\n[env.limits]"
    )
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} + 2 = ?", "answer": n + 2}) + "\n" for n in range(20))
    )
    given.write_text(
        re.sub(r"(\[env\]\n).*?(\n\[env\.rubric)", rf'\1data = "{tmp_path}/rows.jsonl"\n\2', text, flags=re.DOTALL)
    )
    command = ["eval", str(given), str(checkpoint), "--tasks", "3", *words("rollout.sampling.temperature=0")]
    try:
        counts = []
        for samples in ("1", "2"):
            assert main([*command, "--samples", samples]) == 0
            counts.append(sum(body["max_tokens"] != 1 for body in server.bodies))
    finally:
        server.stop()
    assert 1 <= counts[0] == counts[1] <= 3
    assert "6 rollouts, 2 of each task" in capsys.readouterr().out


def test_rows_whose_own_right_program_fails_are_refused(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And those that pass are counted."""
    text = recipe.read_text()
    rubric = text[text.index("[env.rubric.right]") : text.index("[env.limits]")]
    recipe.write_text(text.replace(rubric, '[env.rubric.right]\nkind = "code"\n\n'))
    rows = [
        {"prompt": f"Add {n}.", "answer": f"def add(x): return x + {n}", "tests": f"assert add(2) == {n + 2}"}
        for n in range(20)
    ]
    for last, status, said in (
        ("", 0, "20 of 20 rows"),
        (" + 1", 2, "19, env.rubric.right: column answer: expected a program that"),
    ):
        rows[18]["answer"] = f"def add(x): return x + 18{last}"
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = ("run.stages=['rl', 'eval']", "eval.tasks=2", "eval.no_tool_tasks=0")
        assert main(["check", str(recipe), *words(*settings)]) == status
        printed = capsys.readouterr()
        assert said in printed.out + printed.err
