"""A run's folder has the tokenizer of a policy that the recipe names by its path, so that its page shows text."""

import json
from pathlib import Path

import msgspec

from sparring.dashboard.page_data import vocabulary
from sparring.launch.resume import keep_tokenizer
from sparring.recipe.run_config import RunConfig


def test_the_policys_tokenizer_is_kept_once(tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    run.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    document = {"run": {"name": "run"}, "models": {"policy": {"path": str(model)}}, "env": {"name": "reasoning_gym"}}
    config = msgspec.convert(document, RunConfig)
    assert vocabulary(run, {}) == {}
    keep_tokenizer(run, config)
    assert vocabulary(run, {}) == {0: ("a", ""), 1: ("b", "")}
    (model / "tokenizer.json").write_text("another")
    keep_tokenizer(run, config)
    (model / "tokenizer.json").unlink()
    assert len(vocabulary(run, {})) == 2
