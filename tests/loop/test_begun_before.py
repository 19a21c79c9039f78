"""A run that was begun when groups of equal rewards left the update by default goes on only where the recipe says
so."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.recipe.load import load
from sparring.recipe.run_config import dump, resolve


def begun(recipe: Path) -> Path:
    """A run's folder with the config of such a run, which has no key for the filter."""
    config = resolve(load(recipe))
    folder = recipe.parent / "runs" / config.run.name
    folder.mkdir(parents=True)
    said = "zero_variance_filter = false\n"
    text = dump(config)
    assert text.count(said) == 1
    (folder / "config.toml").write_text(text.replace(said, ""))
    return folder


def test_it_is_refused_by_name_where_the_recipe_has_no_filter(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = begun(given)
    assert main(["run", str(given)]) == 2
    said = capsys.readouterr().err
    assert f"{folder}: expected the config that this run was started with" in said
    assert "algo.zero_variance_filter (True -> False)" in said


def test_other_credits_had_none(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = given.with_name("other.toml")
    recipe.write_text(given.read_text().replace("[algo]\n", '[algo]\ncredit = "reinforce"\n'))
    begun(recipe)
    main(["run", str(recipe), "--set", "rl.groups_per_step=99"])
    said = capsys.readouterr().err
    assert "rl.groups_per_step" in said and "zero_variance_filter" not in said
