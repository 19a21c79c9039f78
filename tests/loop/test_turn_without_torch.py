"""A whole rollout runs in a process that never imports torch or transformers."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, json, sys
from sparring.harness.chat import ChatHarness
from sparring.harness.episode import LiveEpisode
from sparring.record.recorder import Recorder
from sparring.render.round_trip import check_round_trip
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ADD, ToyEnv, toy_renderer, toy_script, toy_task
from sparring.types import Outcome

async def main():
    renderer, task, env = toy_renderer(), toy_task(1), ToyEnv()
    check_round_trip(renderer, (ADD,))
    recorder = Recorder(ScriptedEngine(toy_script(renderer)), renderer)
    episode = LiveEpisode(task, env, None, lambda role: recorder.open(task, rollout_id="r", seed=1, role=role))
    await ChatHarness().run(episode)
    trajectory = episode.session().trajectory(Outcome(kind="completed", reason="answered"))
    score = await env.score(trajectory)
    await episode.session().close()
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    print(json.dumps({"turns": trajectory.usage.turns, "reward": score.reward, "heavy": heavy}))

asyncio.run(main())
"""


def test_a_multi_turn_rollout_needs_neither_torch_nor_transformers():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stderr == "" and done.stdout == '{"turns": 2, "reward": 1.0, "heavy": []}\n'
