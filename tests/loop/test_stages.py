"""Stages alone: done again where only their result was lost, and runs that have few of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from sparring.cli.main import main
from sparring.launch.run import opened
from sparring.recipe.load import load
from sparring.recipe.run_config import resolve
from sparring.stages import init, rl, sft

HERE = Path(__file__).parent


def test_a_stage_whose_result_was_lost_says_the_same_again(tmp_path: Path) -> None:
    """A crash after the last checkpoint and before the result is recorded: nothing is left to do."""
    world = HERE / "tiny_world.py:Sums"
    short = ("observe.progress=off", "sft.steps=2", "rl.steps=2")
    config = load(HERE / "tiny.toml", [f"run.directory={tmp_path}", f"env.name={world}", *short])

    async def twice() -> list[tuple[dict[str, Any], str]]:
        found = []
        async with opened(resolve(config)) as context:
            context.store.put("stage/init", await init.run(context))
            for stage in (sft, sft, rl, rl):
                result = await stage.run(context)
                await context.cluster.close()
                weights = (Path(result["model"]) / "model.safetensors").read_bytes()
                found.append((result, hashlib.sha256(weights).hexdigest()))
                if len(found) == 2:
                    context.store.put("stage/sft", result)
        return found

    first, again, trained, trained_again = asyncio.run(twice())
    assert first == again and first[0]["loss"] > 0
    assert trained == trained_again and trained[0]["account"]["trained"] > 0


def test_a_checkpoint_is_only_evaluated(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        'run.stages=["init", "eval"]',
        'eval.checkpoints=["init"]',
        "rollout.group_size=1",
        "eval.no_tool_tasks=0",
    ]
    assert main(["run", str(given), *(word for setting in settings for word in ("--set", setting))]) == 0
    summary = json.loads((given.parent / "runs/tiny/summary.json").read_text())
    assert (summary["init_success"], summary["init_success_low"], summary["eval_tasks"]) == (0.0, 0.0, 6)
    assert sum(entry["tasks"] for entry in summary["by_dataset"].values()) == 6
    assert "all together" in capsys.readouterr().out
