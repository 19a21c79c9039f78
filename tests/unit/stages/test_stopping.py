"""When a stage ends before its last step: a function of the values that were recorded, whatever was done again."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from sparring.recipe.sections.stop import StopConfig
from sparring.stages.runtime.stopping import Stopping
from sparring.store.sqlite import SqliteStore


class Evaluator:
    """Evaluates only when it is waited for."""

    def __init__(self, store: SqliteStore, values: dict[int, float]) -> None:
        self.store, self.values, self.step = store, values, 0

    async def finish(self) -> None:
        if self.step in self.values and self.step not in dict(self.store.metrics("rl/eval")):
            self.store.metric("rl/eval", self.step, {"success": self.values[self.step]})


CASES = (
    (StopConfig(metric="m", patience=2), {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.5, 5: 0.9}, 4),
    (StopConfig(metric="m", patience=2, after=5), {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.5, 5: 0.5, 6: 0.5}, 5),
    (StopConfig(metric="m", patience=1, min_delta=0.2), {1: 0.1, 2: 0.5, 3: 0.6}, 3),
    (StopConfig(metric="m", patience=1, highest=False), {1: 3.0, 2: 2.0, 3: 1.0, 4: 1.5}, 4),
    (StopConfig(metric="m", target=0.5), {1: 0.1, 2: float("nan"), 3: 0.5}, 3),
    (StopConfig(metric="m", target=0.5, highest=False), {1: 0.9, 2: 0.4}, 2),
    (StopConfig(metric="m", target=2.0, patience=3), {1: 0.1, 2: 0.2, 3: 0.1, 4: 0.2}, 0),
)


@pytest.mark.parametrize(("config", "values", "end"), CASES)
def test_it_ends_where_the_values_say(tmp_path: Path, config: StopConfig, values: dict[int, float], end: int) -> None:
    """The same after a resume at any step; with a figure that is evaluated, updates wait for it."""

    async def ended(stop: StopConfig, name: str, resumed_at: int) -> tuple[int, list[int]]:
        with closing(SqliteStore(tmp_path / f"{name}.sqlite")) as store:
            evaluator, done, said = Evaluator(store, values), [], []
            for first in (0, resumed_at):
                stopping = Stopping(stop, "rl", store, said.append)
                await stopping.resume(first, evaluator)
                for step in stopping.remaining(range(first + 1, 8)):
                    evaluator.step = step
                    metrics = {"m": values[step]} if step in values else {}
                    store.metric("rl", step, metrics)
                    assert await stopping.after(step, metrics, evaluator) == (stopping.step == step)
                    done.append(step)
                    if not first and step == resumed_at:
                        break
            assert stopping.result().get("ended_early", {}).get("step", 0) == stopping.step
            return stopping.step, done

    held_out = StopConfig(
        **{**{key: getattr(config, key) for key in config.__struct_fields__}, "metric": "rl/eval/success"}
    )
    for at in (1, 2, 4):
        last = end or 7
        for number, stop in enumerate((config, held_out)):
            step, done = asyncio.run(ended(stop, f"{at}-{number}", min(at, last)))
            assert (step, done) == (end, list(range(1, last + 1)))


def test_without_a_rule_all_steps_are_done(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "s.sqlite")) as store:
        stopping = Stopping(None, "rl", store, print)
        assert list(stopping.remaining(range(3))) == [0, 1, 2] and stopping.result() == {}
