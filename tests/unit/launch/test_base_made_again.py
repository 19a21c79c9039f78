"""The base of a run's adapter, where it lay in the user's cache and that is gone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparring.launch.checkpoint import CONFIG, STORE, find_checkpoint
from sparring.model.hub import model_folder
from sparring.recipe.load import load
from sparring.recipe.run_config import dump, resolve

TINY = Path(__file__).parents[2] / "loop" / "tiny.toml"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    before = dict(os.environ)
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    yield tmp_path / "cache"
    os.environ.clear()
    os.environ.update(before)


def test_it_is_made_again_for_whoever_asks_for_the_run_s_weights(tmp_path: Path, cache: Path) -> None:
    checkpoint, run, template = tmp_path / "checkpoint", tmp_path / "run", tmp_path / "own.jinja"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    template.write_text("{{ messages }}")
    recipe = tmp_path / "recipe.toml"
    head, rest = TINY.read_text().split("[models.policy.init]")
    policy = f'[models.policy]\npath = "{checkpoint}"\ntemplate = "{template}"\n\n[env]'
    recipe.write_text(head + policy + rest.partition("[env]")[2])
    config = resolve(load(recipe, []))
    base = model_folder(config.models["policy"])
    adapter = run / "rl" / "model"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    (run / CONFIG).write_text(dump(config))
    (run / STORE).write_bytes(b"")
    shutil.rmtree(cache)
    assert find_checkpoint(run) == adapter
    assert (base / "chat_template.jinja").read_text() == "{{ messages }}"
