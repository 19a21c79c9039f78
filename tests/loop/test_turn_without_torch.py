"""Groups of rollouts run, are scored and stored as production does it, in a process that never imports torch or
transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio, json, sys
from sparring.harness.load import load_harness
from sparring.record.recorder import Recorder
from sparring.render.round_trip import check_round_trip
from sparring.rollout.config import RolloutConfig
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.store.sqlite import SqliteStore
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ADD, ToyWorld, toy_renderer, toy_script

async def main(folder):
    renderer, world, config = toy_renderer(), ToyWorld(), RolloutConfig(group_size=2)
    check_round_trip(renderer, (ADD,))
    engine, store = ScriptedEngine(toy_script(renderer)), SqliteStore(folder + "/store.sqlite")
    recorder = Recorder(engine, renderer, store, sampling=config.sampling.build())
    boxes = BubblewrapBoxes(SandboxConfig())
    runner = RolloutRunner(world, boxes, recorder, load_harness(config.harness, ("policy",)), config)
    scheduler = Scheduler(
        runner, world.tasks("train", 1), Window(1, 0, 1), run_seed=1, engine_version=lambda: engine.version
    )
    async for group in scheduler.groups():
        store.append(group, stage="rl")
    loaded = store.load("rl/0/1")
    rewards = [score.reward for group in store.groups(stage="rl") for score in group.scores]
    await boxes.close()
    store.close()
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps({"turns": loaded.trajectories[0].usage.turns, "rewards": rewards, "heavy": heavy}))

asyncio.run(main(sys.argv[1]))
"""


def test_a_group_of_rollouts_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert json.loads(done.stdout) == {"turns": 2, "rewards": [1.0, 1.0], "heavy": []}
