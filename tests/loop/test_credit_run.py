"""A credit rule that remembers, pools, shaped rewards and a price for leaving the start, through the stage and a
resume."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from sparring.launch.run import opened
from sparring.recipe.load import load
from sparring.recipe.run_config import resolve
from sparring.stages import init, rl

HERE = Path(__file__).parent
SETTINGS = [
    f"env.name={HERE / 'tiny_world.py:Sums'}",
    "observe.progress=off",
    "rl.steps=3",
    "algo.credit=rae",
    "rl.pools.keep_hard=0.5",
    "algo.kl_reward.coefficient=0.1",
    'algo.shaping=[{name = "linear_length", price = 0.01, by_success = false}, {name = "overlong", limit = 20, buffer = 16}]',
]


@pytest.mark.slow
def test_it_ends_with_the_same_bits_after_a_resume(tmp_path: Path) -> None:
    config = resolve(load(HERE / "tiny.toml", [f"run.directory={tmp_path}", *SETTINGS]))

    async def scenario() -> tuple[list[str], list[dict[str, Any]]]:
        found, states = [], []
        async with opened(config) as context:
            context.store.put("stage/init", await init.run(context))
            for _ in range(2):
                result = await rl.run(context)
                await context.cluster.close()
                found.append(hashlib.sha256((Path(result["model"]) / "model.safetensors").read_bytes()).hexdigest())
                states.append(context.store.last_checkpoint("rl")[1]["credit"])
                shutil.rmtree(context.folder / "rl" / "checkpoints" / "step-000003")
            tasks = context.store.last_checkpoint("rl")[1]["scheduler"]["source"]["source"]
            assert tasks["pools"], "nothing of it is ever solved"
            return found, states

    (whole, resumed), (state, again) = asyncio.run(scenario())
    assert whole == resumed and state == again
    assert set(state["averages"]) == {"Sums/policy"} and state["averages"]["Sums/policy"] != 0
