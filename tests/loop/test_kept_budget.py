"""A run keeps the number of tokens at once that its machine chose, wherever it goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.launch.resume import claim
from sparring.launch.run import opened
from sparring.recipe.load import load, load_recorded
from sparring.recipe.run_config import resolve
from sparring.stages.context import CHOSEN


def test_a_run_keeps_what_its_machine_chose(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = resolve(load(given))
    file = given.parent / "runs" / config.run.name / "config.toml"

    async def budget() -> tuple[int, str]:
        async with opened(config) as context:
            claim(context)
            return context.config.train.token_budget, str(context.store.get(CHOSEN))

    chosen, why = asyncio.run(budget())
    assert load_recorded(file).train.token_budget == chosen > 0 and f"train.token_budget = {chosen}" in why
    assert main(["run", str(given), "--set", f"train.token_budget={chosen + 1}"]) == 2
    assert f"train.token_budget ({chosen} -> {chosen + 1})" in capsys.readouterr().err
    written = file.read_text()
    assert written.count(f"token_budget = {chosen}\n") == 1
    file.write_text(written.replace(f"token_budget = {chosen}\n", "token_budget = 512\n"))  # as another machine chose
    assert asyncio.run(budget())[0] == load_recorded(file).train.token_budget == 512
