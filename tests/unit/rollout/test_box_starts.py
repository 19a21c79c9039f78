"""What rollouts share: boxes that start."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fates import FatedBoxes, FatedWorld, Fates, make_stack

from sparring.harness.chat import ChatHarness
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.testing.clock import run_virtual
from sparring.testing.toy import toy_task
from sparring.types import BoxSpec

BOX_S = 50.0


class SlowBoxes(FatedBoxes):
    """A pool whose boxes take `BOX_S` to start, and how many did at once."""

    starting = most_starting = 0

    async def take(self, spec: BoxSpec):
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        try:
            await asyncio.sleep(BOX_S)
            return await super().take(spec)
        finally:
            self.starting -= 1


def run_boxed(most: int, **config: object) -> tuple[list[Finished], float, SlowBoxes, list[str]]:
    """Twelve rollouts whose boxes start slowly, at most so many at once."""
    pool, lines, stack = SlowBoxes(Fates()), [], make_stack(rebuilds=0, **config)
    parts, starts = (FatedWorld(Fates()), pool, stack.recorder, ChatHarness(), stack.config), asyncio.Semaphore(most)
    runners = [RolloutRunner(*parts, report=lines.append, box_starts=starts) for _ in range(2)]

    async def main() -> list[Finished]:
        task = replace(toy_task(), box=BoxSpec())
        rollouts = [runners[n % 2].run(task, rollout_id=f"rl/0/{n}", index=n, seed=n) for n in range(12)]
        return await asyncio.gather(*rollouts)

    done, seconds = run_virtual(main())
    return done, seconds, pool, lines


def test_boxes_that_start_are_capped_over_all_runners() -> None:
    done, seconds, pool, _ = run_boxed(3)
    assert pool.most_starting == 3 and 4 * BOX_S < seconds < 4.5 * BOX_S
    assert {f.rollout.outcome.kind for f in done} == {"completed"}
    assert run_boxed(12)[2].most_starting == 12


def test_who_waits_for_others_boxes_is_on_no_clock() -> None:
    done, seconds, _, lines = run_boxed(1, box_s=1.5 * BOX_S, timeout_s=1.0, stalled_s=0.8 * BOX_S)
    assert seconds > 12 * BOX_S, "the last has waited for eleven boxes, far beyond the limit of one"
    assert {f.rollout.outcome.kind for f in done} == {"completed"} and not any(f.broken for f in done)
    assert lines[0].endswith("rl/0/0 has been in phase box for 40 s"), "what is said is what the others wait for"


def test_a_box_that_hangs_gives_its_place_to_the_next() -> None:
    done, *_ = run_boxed(1, box_s=0.5 * BOX_S)
    failures = [f.rollout.outcome.failure for f in done]
    assert all(failure is not None and failure.message.startswith("no box after 25 s") for failure in failures)
