"""Where an evaluation is recorded hangs on all that decides its figures: what is recorded under another name is not
taken up."""

from pathlib import Path

import msgspec
import pytest

from sparring.launch.evaluate import Subject, evaluation_folder
from sparring.recipe.run_config import RunConfig

MODELS = ("policy", "reward", "judge", "nobody")
LIKED = {"kind": "judge", "model": "judge", "prompt": "{completion}?", "choices": {"yes": 1.0}}
JUDGED = {"data": "rows.jsonl", "rubric": {"liked": LIKED}}


def checkpoints(folder: Path) -> None:
    for name in MODELS:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
        (folder / name / "model.safetensors").write_bytes(name.encode())


def named(folder: Path, *, env: dict = JUDGED, rl: dict | None = None) -> Path:
    """The folder of the evaluation of `policy`."""
    document = {
        "run": {"name": "a", "directory": str(folder)},
        "models": {name: {"path": str(folder / name)} for name in MODELS},
        "env": env,
        "rl": {"reward_model": "reward"} if rl is None else rl,
    }
    return evaluation_folder(msgspec.convert(document, RunConfig), Subject(name="policy", folder=folder / "policy"))


@pytest.mark.parametrize(
    ("changed", "another"), [("policy", True), ("reward", True), ("judge", True), ("nobody", False)]
)
def test_other_weights_of_whoever_answers_or_scores_are_another_evaluation(
    tmp_path: Path, changed: str, another: bool
) -> None:
    checkpoints(tmp_path)
    before = named(tmp_path)
    assert named(tmp_path) == before
    (tmp_path / changed / "model.safetensors").write_bytes(b"trained further")
    assert (named(tmp_path) != before) == another


def test_models_that_do_not_score_change_nothing(tmp_path: Path) -> None:
    checkpoints(tmp_path)
    plain = {"env": {"name": "reverse"}, "rl": {}}
    before = named(tmp_path, **plain)
    for name in ("reward", "judge"):
        (tmp_path / name / "model.safetensors").write_bytes(b"trained further")
    assert named(tmp_path, **plain) == before


def test_what_the_runs_own_stage_wrote_counts(tmp_path: Path) -> None:
    checkpoints(tmp_path)
    own = tmp_path / "a/reward_model/model"
    own.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (own / name).write_text("{}")
    before = named(tmp_path, rl={"reward_model": "reward_model"})
    (own / "model.safetensors").write_bytes(b"trained further")
    assert named(tmp_path, rl={"reward_model": "reward_model"}) != before
