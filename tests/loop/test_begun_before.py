"""A run that was begun when something was done in another way goes on as it began, or says what it takes.

Groups of equal rewards once left the update by default; gradients that were views were once read in the wrong order.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from test_redo import AGAIN, EVERY, STEPS, command, stop_behind_the_checkpoint

from sparring.cli.main import main
from sparring.launch.begun import claim
from sparring.launch.run import opened
from sparring.recipe.load import load, load_recorded
from sparring.recipe.run_config import dump, resolve
from sparring.stages.context import CHOSEN


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


def test_a_password_in_an_address_leaves_the_folder_when_the_run_goes_on(given: Path) -> None:
    """The address of a gateway was written as it stood in the recipe."""
    config = resolve(load(given, ["train.token_budget=8192"]))
    folder = given.parent / "runs" / config.run.name
    folder.mkdir(parents=True)
    said = '[rollout.gateway]\nurl = ""\n'
    assert dump(config).count(said) == 1
    (folder / "config.toml").write_text(
        dump(config).replace(said, '[rollout.gateway]\nurl = "http://user:hunter2@host:1"\n')
    )

    async def goes_on() -> None:
        async with opened(config) as context:
            claim(context, {})

    asyncio.run(goes_on())
    assert load(folder / "config.toml") == config


@pytest.mark.parametrize(
    ("recorded", "expected"), [("token_budget = 512\n", 512), ("token_budget = 8192\n", 8192), ("", 8192)]
)
def test_it_goes_on_with_as_many_tokens_at_once(given: Path, recorded: str, expected: int) -> None:
    """Which another machine chose, or which was the default before machines chose; a recipe may still leave it open."""
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


@pytest.mark.slow
def test_an_adapter_that_was_stepped_wrongly_says_so(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps behind its checkpoint cannot be trained again to the same weights; from the checkpoint on they are right."""
    folder, adapter = tmp_path / "runs/tiny", ("models.policy.lora.rank=4", "observe.lines_every_s=0")
    assert main(command(given, *adapter)) == 0
    stop_behind_the_checkpoint(folder, other_bits=True)
    manifest = folder / f"rl/checkpoints/step-{EVERY:06d}/trainer.json"
    of_then = json.loads(manifest.read_text())
    assert not of_then.pop("gradients_were_misplaced") and not of_then.pop("schedule_ends_late")
    manifest.write_text(json.dumps(of_then))
    capsys.readouterr()
    assert main(command(given, *adapter)) == 1
    error = capsys.readouterr().err
    assert "version of Sparring that the run was begun with" in error and error.strip().endswith(AGAIN)
    assert main(command(given, *adapter, "run.redo=sample")) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    mended = [line["event"] for line in lines if "stepped right from here on" in line.get("event", "")]
    assert [line.partition(":")[0] for line in mended] == [f"step {STEPS - 1}"]
