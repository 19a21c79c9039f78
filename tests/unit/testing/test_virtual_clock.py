"""The virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from sparring.testing.clock import run_virtual


def test_waiting_takes_virtual_time_only():
    async def main() -> list[str]:
        done: list[str] = []

        async def after(delay_s: float, name: str) -> None:
            await asyncio.sleep(delay_s)
            done.append(name)

        await asyncio.gather(after(3600.0, "late"), after(60.0, "soon"))
        return done

    assert run_virtual(main()) == (["soon", "late"], 3600.0)


def test_timeouts_and_threads_work():
    async def main() -> int:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await asyncio.Event().wait()
        return await asyncio.to_thread(lambda: 5)

    assert run_virtual(main()) == (5, 10.0)
