"""A step that waits for one rollout says which, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fates import Fates, make_stack

from sparring.rollout.runner import RolloutRunner
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_script, toy_task


def said_by(step_s: Callable[[int], float], *, turn_s: float = 1.0, rollouts: int = 4, **config: float) -> list[str]:
    """The lines of some rollouts at once."""
    lines: list[str] = []
    engine = ScriptedEngine(toy_script(toy_renderer()), latency_s=turn_s)
    runner: RolloutRunner = make_stack(Fates(step=step_s), engine=engine, rebuilds=0, **config).runner
    runner.report = lines.append

    async def main() -> None:
        await asyncio.gather(
            *[runner.run(toy_task(n), rollout_id=f"rl/0/{n}", index=n, seed=n) for n in range(rollouts)]
        )
        await asyncio.sleep(1000)

    run_virtual(main())
    return lines


def test_a_stall_is_said_once_and_again_when_another_is_to_blame() -> None:
    hangs = said_by(lambda number: 550.0 if number == 0 else 1.0, stalled_s=60.0)
    assert hangs == ["no rollout has finished for 60 s: rl/0/0 has been in phase tool add for 63 s"]
    lines = said_by(lambda number: {0: 200.0, 4: 400.0}.get(number, 1.0), stalled_s=60.0)
    assert len({line.split(": ")[1].split(" for")[0] for line in lines}) == len(lines) >= 2


def test_an_engine_that_stalls_is_named() -> None:
    lines = said_by(lambda number: 0.0, turn_s=100.0, stalled_s=60.0)
    assert lines[:1] == ["no rollout has finished for 60 s: rl/0/0 has been in phase turn for 60 s"]


def test_rollouts_that_finish_say_nothing() -> None:
    assert said_by(lambda number: 50.0, stalled_s=110.0, rollouts=8) == []
