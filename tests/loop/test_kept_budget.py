"""A run keeps the number of tokens at once that its machine chose, wherever it goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.launch.begun import claim
from sparring.launch.run import opened
from sparring.recipe.load import load, load_recorded
from sparring.recipe.run_config import dump, resolve
from sparring.stages.context import CHOSEN


@pytest.mark.parametrize(("recorded", "expected"), [("token_budget = 512\n", 512), ("token_budget = 8192\n", 8192)])
def test_it_goes_on_with_as_many_tokens_at_once(given: Path, recorded: str, expected: int) -> None:
    """Which another machine chose; the recipe leaves it open."""
    config = resolve(load(given))
    folder = given.parent / "runs" / config.run.name
    folder.mkdir(parents=True)
    said = "token_budget = 0\n"
    assert dump(config).count(said) == 1
    (folder / "config.toml").write_text(dump(config).replace(said, recorded))

    async def goes_on() -> None:
        async with opened(config) as context:
            assert context.config.train.token_budget == expected
            claim(context, {})

    asyncio.run(goes_on())
    assert load_recorded(folder / "config.toml").train.tokens_at_once == expected


def test_a_run_keeps_what_its_machine_chose(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = resolve(load(given))

    async def begins() -> int:
        async with opened(config) as context:
            claim(context, {})
            assert f"train.token_budget = {context.config.train.token_budget}" in context.store.get(CHOSEN)
            return context.config.train.token_budget

    chosen = asyncio.run(begins())
    folder = given.parent / "runs" / config.run.name
    assert load_recorded(folder / "config.toml").train.token_budget == chosen > 0
    assert main(["run", str(given), "--set", f"train.token_budget={chosen + 1}"]) == 2
    assert f"train.token_budget ({chosen} -> {chosen + 1})" in capsys.readouterr().err
