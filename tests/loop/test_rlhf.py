"""Reinforcement learning from human feedback: what was preferred becomes a reward model, and PPO with a critic follows
it."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from sparring.recipe.load import load
from sparring.recipe.run_config import resolve
from sparring.store.sqlite import SqliteStore

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/rlhf.toml"


def test_the_recipe_reads_what_its_world_writes(tmp_path: Path) -> None:
    folder = ROOT / "recipes/rlhf"
    world = tmp_path / "manners.py"
    world.write_text((folder / "manners.py").read_text())
    written = runpy.run_path(str(world), run_name="__main__")
    for name in ("replies", "preferences"):
        assert (tmp_path / f"{name}.jsonl").read_text() == (folder / f"{name}.jsonl").read_text()
    preferences = [json.loads(line) for line in (folder / "preferences.jsonl").read_text().splitlines()]
    sounds = written["SOUNDS"]
    for row in preferences:
        answer = next(sound for animal, sound in sounds.items() if f" {animal} " in row["prompt"])
        assert written["worth"](row["chosen"], answer) > written["worth"](row["rejected"], answer)
    replies = [json.loads(line)["messages"] for line in (folder / "replies.jsonl").read_text().splitlines()]
    there = {row["prompt"] for row in preferences} | {messages[0]["content"] for messages in replies}
    asked = {written["Manners"]().generate(Random(seed))["prompt"] for seed in range(3000)}
    assert len(there) > 500 and len(asked) > 500 and not there & asked, "what the world asks is held out"


def test_the_recipe_is_ppo_with_a_critic_on_what_people_prefer() -> None:
    config = resolve(load(RECIPE))
    assert config.run.stages == ("init", "sft", "reward_model", "rl", "eval")
    assert config.algo.credit.__struct_config__.tag == "gae" and config.algo.gate.low == config.algo.gate.high == 0.2
    assert config.rl.critic is not None and config.rl.critic.model == config.rl.reward_model == "reward_model"
    assert config.algo.kl_reward is not None and config.rl.minibatches * config.rl.passes == 4


@pytest.mark.slow
def test_people_prefer_what_it_has_learned_to_say(tmp_path: Path) -> None:
    """The recipe as it is: half a minute."""
    command = [sys.executable, "-m", "sparring.cli.main", "run", str(RECIPE), "--set", f"run.directory={tmp_path}"]
    subprocess.run(command, check=True, timeout=3000, cwd=ROOT)
    summary = json.loads((tmp_path / "rlhf/summary.json").read_text())
    store = SqliteStore(tmp_path / "rlhf/store.sqlite", read_only=True)
    judged, metrics = store.get("stage/reward_model")["held_out"], [values for _, values in store.metrics("rl")]
    store.close()
    assert judged["accuracy"] > 0.8
    assert summary["rl_success_low"] > 2 * summary["sft_success_high"]
    assert summary["logprob_max_abs_diff"] == 0.0
    assert "clip_fraction" not in metrics[4] and "clip_fraction" in metrics[5], (
        "the critic alone learns through five updates"
    )
    explained = [values["critic/explained_variance"] for values in metrics[4:12]]
    assert sum(explained) / len(explained) > 0.2, (
        "0 is a critic that says the same of everything; replies are decided late"
    )
    assert any(0.01 < values["clip_fraction"] < 0.3 for values in metrics[5:])
