"""Where the time of a real run went: each second of engine and trainer is busy or has a cause."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from suite import short_of

from sparring.launch.run import run_recipe
from sparring.recipe.load import load
from sparring.stages.runtime.timing import ENGINE_CAUSES, TRAINER_CAUSES
from sparring.store.sqlite import SqliteStore

SETTINGS = ("rl.steps=4", "rl.train.save_every=1", "eval.every=2", "eval.every_tasks=4", "run.stages=['rl']")


@pytest.mark.parametrize("max_lag", short_of([0, 1], [1]))
def test_busy_and_idle_add_up_to_every_step(given: Path, max_lag: int) -> None:
    folder = run_recipe(load(given, [*SETTINGS, "observe.progress=off", f"rollout.max_lag={max_lag}"]))
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        steps = [values for _, values in store.metrics("rl")]
    assert len(steps) == 4
    for values in steps:
        for part, causes in (("engine", ENGINE_CAUSES), ("trainer", TRAINER_CAUSES)):
            times = {name: share for name, share in values.items() if name.startswith(f"time/{part}/")}
            assert {name.split("/")[2] for name in times} == {"busy", "other", *(cause for _, cause in causes)}
            assert sum(times.values()) == pytest.approx(1.0, abs=1e-9) and min(times.values()) >= 0
        assert values["time/trainer/busy"] == pytest.approx(values["time/training"])
        assert values["time/engine/busy"] >= values.get("time/generating", 0.0) - 1e-9
        assert values["time/trainer/busy"] > 0 and values["time/trainer/update"] > 0
        assert values["rollout/places"] == 128 and values["engine/kv_lost_tokens"] == 0, (
            "what places follow is reported"
        )
    for name in ("time/engine/busy", "time/worlds", "time/judging", "time/evaluating"):
        assert max(values[name] for values in steps) > 0
    assert all(values["time/saving"] > 0 for values in steps[1:]), "the checkpoint of the step before"
    if not max_lag:
        assert all(values["time/engine/training"] > 0 for values in steps)
