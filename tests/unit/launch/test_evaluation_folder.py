"""Where an evaluation is recorded hangs on all that decides its figures: what is recorded under another name is not
taken up."""

from pathlib import Path

import msgspec
import pytest

from sparring.launch.evaluate import Subject, evaluation_folder
from sparring.recipe.run_config import RunConfig

MODELS = ("policy", "reward", "judge", "nobody", "a/reward_model/model")
LIKED = {"kind": "judge", "model": "judge", "prompt": "{completion}?", "choices": {"yes": 1.0}}
JUDGED = {"data": "rows.jsonl", "rubric": {"liked": LIKED}}


def named(folder: Path, *, env: dict = JUDGED, rl: dict | None = None) -> Path:
    """The folder of the evaluation of `policy`."""
    document = {
        "run": {"name": "a", "directory": str(folder)},
        "models": {name: {"path": str(folder / name)} for name in MODELS},
        "env": env,
        "rl": {"reward_model": "reward"} if rl is None else rl,
    }
    return evaluation_folder(msgspec.convert(document, RunConfig), Subject(name="policy", folder=folder / "policy"))


PLAIN = {"env": {"name": "reverse"}, "rl": {}}
OWN = {"rl": {"reward_model": "reward_model"}}


@pytest.mark.parametrize(
    ("changed", "settings", "another"),
    [
        *((name, {}, True) for name in ("policy", "reward", "judge")),
        *(("nobody", {}, False), ("reward", PLAIN, False), ("judge", PLAIN, False)),
        ("a/reward_model/model", OWN, True),
    ],
)
def test_other_weights_of_whoever_answers_or_scores_are_another_evaluation(
    tmp_path: Path, changed: str, settings: dict, another: bool
) -> None:
    for name in MODELS:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    before = named(tmp_path, **settings)
    assert named(tmp_path, **settings) == before
    (tmp_path / changed / "model.safetensors").write_bytes(b"trained further")
    assert (named(tmp_path, **settings) != before) == another
