"""The window: who may start when."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import on_event_loop, on_virtual_clock

from sparring.errors import BadInput
from sparring.rollout.config import RolloutConfig, RolloutLimitsConfig, TimeoutsConfig
from sparring.rollout.window import Window, check_window


async def admitted(window: Window) -> list[int]:
    """Every group that may start now."""
    indices: list[int] = []
    try:
        async with asyncio.timeout(0):
            while (index := await window.acquire()) is not None:
                indices.append(index)
                await asyncio.sleep(0) if len(indices) > 100 else None
    except TimeoutError:
        pass
    return indices


@on_virtual_clock
async def test_a_synchronous_window_admits_one_step_at_a_time() -> None:
    window = Window(3, 0)
    assert await admitted(window) == [0, 1, 2]
    assert await admitted(window) == []
    window.release(1)
    assert await admitted(window) == [3, 4, 5]


@on_virtual_clock
async def test_a_wider_window_admits_the_steps_ahead_of_it() -> None:
    window = Window(2, 2)
    assert await admitted(window) == [0, 1, 2, 3, 4, 5]
    window.release(1)
    assert await admitted(window) == [6, 7]


@settings(deadline=None)
@given(
    groups_per_step=st.integers(1, 5), max_lag=st.integers(0, 3), releases=st.integers(0, 6), start=st.integers(0, 4)
)
@on_event_loop
async def test_admission_is_what_the_law_says(groups_per_step: int, max_lag: int, releases: int, start: int) -> None:
    window = Window(groups_per_step, max_lag)
    window.resume(start)
    seen: list[int] = []
    for step in range(start, start + releases + 1):
        if step > start:
            window.release(step)
        for index in await admitted(window):
            assert index // groups_per_step - window.released_steps <= max_lag
            seen.append(index)
        assert window.next_index == (step + max_lag + 1) * groups_per_step
    assert seen == list(range(start * groups_per_step, window.next_index))


@on_virtual_clock
async def test_nothing_is_admitted_that_no_step_would_take() -> None:
    window = Window(2, 5, total_steps=3)
    assert await admitted(window) == [0, 1, 2, 3, 4, 5]
    assert await window.acquire() is None


def test_a_second_model_may_release_the_same_step() -> None:
    window = Window(2, 0)
    window.release(1)
    window.release(1)
    assert window.released_steps == 1


@pytest.mark.parametrize("step", [1, 4])
def test_a_step_that_is_out_of_order_is_refused(step: int) -> None:
    window = Window(2, 0)
    window.resume(2)
    with pytest.raises(ValueError, match=f"step {step} cannot be released after step 2"):
        window.release(step)


def test_a_window_in_use_cannot_be_resumed() -> None:
    window = Window(2, 0)
    asyncio.run(window.acquire())
    with pytest.raises(ValueError, match="before its first admission"):
        window.resume(3)


def test_the_proof_accepts_what_can_run() -> None:
    check_window(RolloutConfig(), groups_per_step=16, engine_tokens=512, rollout_tokens=512)
    check_window(RolloutConfig(group_size=1, max_concurrent_rollouts=1, max_lag=7), groups_per_step=1)


@pytest.mark.parametrize(
    ("config", "extra", "message"),
    [
        (
            RolloutConfig(limits=RolloutLimitsConfig(timeout_s=float("inf"))),
            {},
            "rollout.limits.timeout_s: expected a finite time",
        ),
        (
            RolloutConfig(timeouts=TimeoutsConfig(score_s=float("inf"))),
            {},
            "rollout.timeouts.score_s: expected a finite time",
        ),
        (
            RolloutConfig(timeouts=TimeoutsConfig(box_s=float("inf"))),
            {},
            "rollout.timeouts.box_s: expected a finite time",
        ),
        (RolloutConfig(), {"groups_per_step": 0}, "rl.groups_per_step: expected at least 1"),
        (RolloutConfig(), {"engine_tokens": 100, "rollout_tokens": 101}, "a cache of at least 101 tokens"),
    ],
)
def test_the_proof_refuses_what_could_wait_for_ever(config: RolloutConfig, extra: dict[str, int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_window(config, **{"groups_per_step": 4, **extra})
