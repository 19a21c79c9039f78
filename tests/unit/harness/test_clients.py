"""Functions that are handed clients, by the names of their parameters."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from refusals import refused_at

from sparring.gateway.server import open_door
from sparring.harness.load import load_harness
from sparring.record.recorder import Recorder
from sparring.rollout.episode import RunningEpisode
from sparring.rollout.guarded_env import GuardedEnv
from sparring.testing.scripted_engine import ScriptedEngine, replies
from sparring.testing.toy import ToyEnv, toy_renderer, toy_task

RENDERER = toy_renderer()
FILE = """
async def agent(episode, openai_client, door, temperature=0.5):
    messages = [{"role": "user", "content": "Hello."}]
    answer = await openai_client.chat.completions.create(model="policy", messages=messages)
    assert answer.choices[0].message.content == "Hi" and door.key.startswith("sk-")

async def wants_more(episode, database):
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def test_a_function_is_handed_a_ready_client_and_the_address(file: str) -> None:
    harness = load_harness(f"{file}:agent", ("policy",), open_door)
    engine = ScriptedEngine(replies(["Hi"], RENDERER.tokenizer.encode))
    world = GuardedEnv(ToyEnv)
    live = RunningEpisode(toy_task(3), world, Recorder(engine, RENDERER), rollout_id="r", seed=1)
    asyncio.run(harness.run(live))
    assert len(engine.requests) == 1


def test_a_parameter_that_is_no_client_is_refused(file: str) -> None:
    with refused_at("rollout.harness", "with the parameter 'database'"):
        load_harness(f"{file}:wants_more", ("policy",), open_door)
