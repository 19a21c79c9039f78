"""Leases of rollouts, on a virtual clock: one worker at a time, and what of a late one does not count."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from sparring.errors import WorkerLost
from sparring.record.leases import LeaseConflict, LeaseEnd, LeaseExpired, Leases, RunOver, UnknownLease
from sparring.record.rewards import OutsideReward, OutsideRewards, RewardsClosed
from sparring.testing.clock import run_virtual

DONE = LeaseEnd(outcome="completed")


def virtual(main: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
    return run_virtual(main)


def test_offers_and_claims_are_matched_in_order_of_arrival() -> None:
    async def main() -> list[str]:
        leases, seen = Leases(10.0), []
        with leases.offer("a", {"n": 1}), leases.offer("b", {"n": 2}), leases.offer("a", {"n": 3}):
            for environments in ((), ("a",), ("b", "c"), ()):
                lease = await leases.claim(environments)
                seen.append(None if lease is None else lease.offer.shown["n"])
        waiting = [asyncio.create_task(leases.claim((name,), 5.0)) for name in ("a", "b", "a")]
        await asyncio.sleep(1)
        with leases.offer("a", {"n": 4}), leases.offer("b", {"n": 5}):
            for lease in await asyncio.gather(*waiting):
                seen.append(None if lease is None else lease.offer.shown["n"])
        return seen

    assert virtual(main()) == ([1, 3, 2, None, 4, 5, None], 5.0)


def test_a_lease_expires_unless_it_is_renewed() -> None:
    async def main() -> None:
        leases = Leases(10.0)
        with leases.offer("a", {}) as offer:
            lease = await leases.claim(worker="w-1")
            assert lease is not None
            for _ in range(5):
                await asyncio.sleep(9)
                leases.renew(lease.id)
            with pytest.raises(WorkerLost, match="worker w-1: its lease ran out"):
                await offer.ended()
            with pytest.raises(LeaseExpired):
                leases.renew(lease.id)
            with pytest.raises(LeaseExpired):
                leases.finish(lease.id, DONE)
            assert await leases.claim() is None, "this attempt is over; the next one is another offer"
        with pytest.raises(UnknownLease):
            leases.renew("lease-of-nobody")

    assert virtual(main())[1] == 55.0


def test_a_repeated_end_counts_once_and_another_end_is_refused() -> None:
    async def main() -> None:
        leases = Leases(10.0)
        with leases.offer("a", {}) as offer:
            lease = await leases.claim()
            assert lease is not None
            with pytest.raises(RewardsClosed):
                leases.finish(lease.id, LeaseEnd(outcome="completed", reward=1.0))
            leases.finish(lease.id, DONE)
            leases.finish(lease.id, DONE)
            with pytest.raises(LeaseConflict):
                leases.finish(lease.id, LeaseEnd(outcome="failed", reason="late"))
            with pytest.raises(LeaseExpired):
                leases.renew(lease.id)
            assert await offer.ended() == DONE

    virtual(main())


def test_an_end_may_include_a_reward() -> None:
    async def main() -> bool:
        leases, rewards = Leases(10.0), OutsideRewards("rl/0/0", 5.0)
        with leases.offer("a", {}, rewards):
            lease = await leases.claim()
            assert lease is not None
            leases.finish(lease.id, LeaseEnd(outcome="completed", reward=None))
        rewards.give(OutsideReward(reward=None))
        return await rewards.wait()

    assert virtual(main()) == (True, 0.0)


def test_withdrawn_offers_and_cancelled_claims_are_skipped() -> None:
    async def main() -> None:
        leases = Leases(10.0)
        with leases.offer("a", {"n": 1}):
            lease = await leases.claim()
        assert lease is not None
        with pytest.raises(LeaseExpired):
            leases.renew(lease.id)
        gone = asyncio.create_task(leases.claim((), 60.0))
        stays = asyncio.create_task(leases.claim((), 60.0))
        await asyncio.sleep(0)
        with leases.offer("a", {"n": 2}):
            gone.cancel()  # in the same turn of the loop in which the offer came to it
            lease = await stays
            assert lease is not None and lease.offer.shown["n"] == 2
        waits = asyncio.create_task(leases.claim((), 60.0))
        await asyncio.sleep(1)
        leases.close()
        for claim in (waits, leases.claim()):
            with pytest.raises(RunOver):
                await claim

    assert virtual(main())[1] == 1.0


def test_many_workers_play_every_rollout_once() -> None:
    """Every third worker dies in mid-rollout; its rollout is offered again, as another attempt."""

    async def main() -> tuple[list[int], int]:
        leases, finished, lost = Leases(10.0), [], 0
        held: set[int] = set()

        async def play(number: int) -> None:
            nonlocal lost
            while True:
                with leases.offer("a", {"n": number}) as offer:
                    try:
                        await offer.ended()
                    except WorkerLost:
                        lost += 1
                        held.discard(number)
                        continue
                finished.append(number)
                return

        async def work(name: int) -> None:
            while (lease := await leases.claim((), 25.0)) is not None:
                number = lease.offer.shown["n"]
                assert number not in held
                held.add(number)
                if name % 3 == 0:
                    return
                await asyncio.sleep(name % 5)
                held.discard(number)
                leases.finish(lease.id, DONE)

        await asyncio.gather(*map(play, range(60)), *map(work, range(12)))
        return sorted(finished), lost

    assert virtual(main())[0] == (list(range(60)), 4)


def test_a_repeated_claim_gets_the_same_lease_and_paused_leases_do_not_expire() -> None:
    async def main() -> None:
        leases = Leases(10.0)
        gone = asyncio.create_task(leases.claim(wait_s=60.0, id="c-1"))
        await asyncio.sleep(1)
        again = asyncio.create_task(leases.claim(wait_s=60.0, id="c-1"))
        await asyncio.sleep(1)
        with leases.offer("a", {}) as offer:
            lease = await again
            assert await gone is None and lease is not None and offer.lease is lease
            assert await leases.claim(id="c-1") is lease, "its answer was lost"
            leases.pause()
            await asyncio.sleep(100)
            leases.renew(lease.id)
            await asyncio.sleep(100)
            leases.go_on()
            await asyncio.sleep(9)
            leases.finish(lease.id, DONE)
            assert await offer.ended() == DONE
        assert await leases.claim(id="c-1") is None, "the lease is over"

    assert virtual(main())[1] == 211.0
