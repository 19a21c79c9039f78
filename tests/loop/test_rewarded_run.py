"""A run whose rewards come from outside: a program posts them, and RL trains on them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from sparring.cli.main import main
from sparring.store.sqlite import SqliteStore

WORLD = Path(__file__).parent / "rewarded_world.py"


def test_what_the_program_posts_is_what_is_trained(given: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} + 1 = ?"}) + "\n" for n in range(20)))
    settings = (
        'run.stages=["rl"]',
        "env.name=",
        "env.reward=outside",
        f"env.data={rows}",
        f"rollout.harness={WORLD}:agent",
        "rollout.rewards.within_s=60",
        "env.limits.max_tokens=60",
        "algo.credit=turn_level",
        "rl.steps=2",
        "observe.lines_every_s=0",
    )
    assert main(["run", str(given), *(word for setting in settings for word in ("--set", setting))]) == 0
    with closing(SqliteStore(given.parent / "runs/tiny/store.sqlite", read_only=True)) as store:
        groups = list(store.groups(stage="rl"))
        metrics = [values for _, values in store.metrics("rl")]
    rewards = []
    for group in groups:
        assert not group.failed and len(group.rollouts) == 3
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            turns = rollout.trajectories[0].turns
            worth = tuple(len(turn.message.content if turn.message else "") % 7 / 8 for turn in turns)
            assert len(turns) == 2 and (score.per_turn, score.reward) == (worth, sum(worth))
            assert score.parts["answers"] == 2.0
            rewards.append(score.reward)
    assert len(set(rewards)) > 1, "no group tells one text from another"
    assert [(step["rollout/rewards_missing"], step["rollout/rewards_expired"]) for step in metrics] == [(0.0, 0.0)] * 2
    assert [step["logprob_max_abs_diff"] for step in metrics] == [0.0] * 2
    assert all(step["grad_norm"] > 0 for step in metrics)
