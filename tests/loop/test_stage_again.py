"""A crash after a stage's last checkpoint and before its result is recorded: the stage again, which has nothing left to do."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

from sparring.config import load, resolve
from sparring.launch.run import opened
from sparring.stages import init, rl, sft

HERE = Path(__file__).parent


def test_a_stage_whose_result_was_lost_says_the_same_again(tmp_path: Path) -> None:
    world = HERE / "tiny_world.py:Sums"
    config = load(HERE / "tiny.toml", [f"run.directory={tmp_path}", f"env.name={world}", "observe.progress=off"])

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
