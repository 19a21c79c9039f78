"""Leases of rollouts that external programs play: a rollout is offered, and one worker claims it, renews its lease and
finishes it. A lease that is not renewed in time expires, and its worker has no effect on the rollout any more."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from sparring.errors import BadInput, InfraError, SparringError, WorkerLost, refusal
from sparring.record.rewards import OutsideReward, OutsideRewards, RewardsClosed

MOST_OVER = 4096
"""Maximum number of ended leases that are kept, so that a late worker gets `LeaseExpired` and not `UnknownLease`."""


class UnknownLease(BadInput):
    """Error of a lease id that this process gave to no worker, or whose lease ended long ago."""


class LeaseExpired(BadInput):
    """Error of a lease that expired, or whose rollout ended without its worker."""


class LeaseConflict(BadInput):
    """Error of a report on a lease that was already finished with another report."""


class RunOver(BadInput):
    """Error of a claim in a run that offers no more rollouts."""


class RunStopped(InfraError):
    """Error of a claim in a run that stopped early, and that another process may resume."""


class LeaseEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End of a rollout, as reported by its worker."""

    outcome: Literal["completed", "truncated", "failed"]
    """`failed`: the worker could not play the rollout (an infrastructure failure), which is played again. `truncated`:
    the rollout hit a limit of the worker."""

    answer: str | None = None
    """Last message to the world; None: the policy's latest reply without calls."""

    reward: float | msgspec.UnsetType | None = msgspec.UNSET
    """Final reward of the rollout; None: the rollout is not scored, which is different from reward 0."""

    reason: str = ""
    """Reason of a failure."""

    def __post_init__(self) -> None:
        if self.outcome == "failed" and not self.reason:
            raise ValueError("outcome failed needs a reason")
        if self.outcome == "failed" and (self.answer is not None or self.reward is not msgspec.UNSET):
            raise ValueError("outcome failed must stand without an answer and a reward: the rollout is played again")
        if isinstance(self.reward, float) and not math.isfinite(self.reward):
            raise ValueError(f"reward must be a finite number, got {self.reward}")


@dataclass(eq=False, kw_only=True, slots=True)
class RolloutOffer:
    """Offer of one attempt at a rollout.

    Attributes:
        shown: plain data for the worker.
        rewards: external rewards of the rollout; None if the run takes no rewards.
        worker: name of the worker that claimed the offer.
        claimed: event that is set when a worker claims the offer.
        over: event that is set when the worker finishes the rollout or the lease expires.
        end: worker's report; None if the lease expired.
        withdrawn: whether the offer can no longer be claimed.
    """

    environment: str
    shown: Mapping[str, Any]
    rewards: OutsideRewards | None = None
    worker: str = ""
    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    end: LeaseEnd | None = None
    lease: Lease | None = None
    withdrawn: bool = False

    async def ended(self) -> LeaseEnd:
        """Wait for the worker's report and return it. Raises WorkerLost if the lease expired."""
        await self.over.wait()
        if self.end is None:
            raise WorkerLost(f"worker {self.worker or 'without a name'}: its lease ran out")
        return self.end


@dataclass(eq=False, kw_only=True, slots=True)
class Lease:
    """Lease of an offer.

    Attributes:
        id: secret id, known to the worker.
        claim: id of the claim; empty if the claim had no id.
        timer: timer of the lease's expiry; None while leases do not expire.
    """

    id: str
    offer: RolloutOffer
    claim: str = ""
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, kw_only=True, slots=True)
class _Claim:
    environments: Sequence[str]
    id: str
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    offer: RolloutOffer | None = None

    def takes(self, offer: RolloutOffer) -> bool:
        return not self.environments or offer.environment in self.environments


class Leases:
    """Leases of one run. Offers and claims are matched in order of arrival.

    Attributes:
        lease_s: seconds until a lease expires unless it is renewed.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._offers: OrderedDict[int, RolloutOffer] = OrderedDict()
        self._claims: OrderedDict[int, _Claim] = OrderedDict()
        self._leases: dict[str, Lease] = {}
        self._of_claim: dict[str, Lease] = {}
        self._paused = False
        self._over: OrderedDict[str, LeaseEnd | None] = OrderedDict()
        self._closed: SparringError | None = None

    @contextmanager
    def offer(
        self, environment: str, shown: Mapping[str, Any], rewards: OutsideRewards | None = None
    ) -> Iterator[RolloutOffer]:
        """Offer a rollout while the context lasts; its lease ends with the context.

        Args:
            shown: plain data for the worker.
            rewards: external rewards of the rollout; None if the run takes no rewards.
        """
        offer = RolloutOffer(environment=environment, shown=shown, rewards=rewards)
        self._put(offer)
        try:
            yield offer
        finally:
            self._withdraw(offer)

    async def claim(
        self, environments: Sequence[str] = (), wait_s: float = 0.0, worker: str = "", id: str = ""
    ) -> Lease | None:
        """Lease the first matching offer, or wait for one.

        A claim with the id of an earlier claim gets the lease of that claim. If the earlier claim still waits, the new
        claim replaces it.

        Args:
            environments: environments that the worker can play; empty: all.
            worker: name of the worker, for reports.
            id: id of the claim, equal if the claim is repeated; empty: every claim is new.

        Returns:
            Lease, or None if no offer came in time.

        Raises:
            RunOver: the run offers no more rollouts.
            RunStopped: this process offers no more rollouts.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + wait_s
        if id in self._of_claim:
            lease = self._of_claim[id]
            self.renew(lease.id)
            return lease
        while True:
            offer = await self._next(_Claim(environments=environments, id=id), until - clock())
            if offer is None:
                return None
            if not offer.withdrawn:
                return self._new_lease(offer, worker, id)

    def renew(self, id: str) -> None:
        """Restart the time of a lease. Raises UnknownLease for an unknown id, LeaseExpired if the lease has ended."""
        self._start(self._lease(id))

    def pause(self) -> None:
        """Keep all leases alive until `go_on`, while workers cannot reach the run."""
        self._paused = True
        for lease in self._leases.values():
            self._start(lease)

    def go_on(self) -> None:
        """Let leases expire again, each after its full time."""
        self._paused = False
        for lease in self._leases.values():
            self._start(lease)

    def finish(self, id: str, end: LeaseEnd) -> None:
        """End the rollout of a lease. A repeated equal report has no effect.

        Raises:
            UnknownLease, LeaseExpired: the id is unknown, or the lease has ended in another way.
            LeaseConflict: the rollout was already finished with another report.
            RewardsClosed: the run takes no external rewards.
            StoreError: the reward could not be stored; the rollout has not ended.
        """
        if id not in self._leases and (before := self._over.get(id)) is not None:
            if before == end:
                return
            remedy = "finish a rollout once"
            raise LeaseConflict(str(refusal("lease", "one that is under way", f"one that {before.outcome}", remedy)))
        offer = self._lease(id).offer
        if end.reward is not msgspec.UNSET:
            if offer.rewards is None:
                remedy = "leave it out, or set rollout.rewards.within_s in the recipe"
                raise RewardsClosed(str(refusal("reward", "none in this run", "one", remedy)))
            offer.rewards.give(OutsideReward(reward=end.reward))
        self._end(id, end)

    def close(self, *, stopped: bool = False) -> None:
        """Stop offering rollouts and refuse waiting claims. `stopped`: whether another process may resume the run."""
        if stopped:
            closed: SparringError = RunStopped("the run has stopped; claim again when it goes on")
        else:
            remedy = "stop claiming, or start the run again"
            closed = RunOver(str(refusal("claim", "a run that is going on", "one that is over", remedy)))
        self._closed = self._closed or closed
        for claim in self._claims.values():
            claim.answered.set()

    async def _next(self, claim: _Claim, wait_s: float) -> RolloutOffer | None:
        """Return the offer for a claim, or None if no offer came in time."""
        if self._closed is not None:
            raise self._closed
        for offer in self._offers.values():
            if claim.takes(offer):
                return self._offers.pop(id(offer))
        if wait_s <= 0:
            return None
        if claim.id:
            for other in [other for other in self._claims.values() if other.id == claim.id]:
                del self._claims[id(other)]
                other.answered.set()
        self._claims[id(claim)] = claim
        try:
            async with asyncio.timeout(wait_s):
                await claim.answered.wait()
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if claim.offer is not None:
                self._put(claim.offer, first=True)
            raise
        finally:
            self._claims.pop(id(claim), None)
        return claim.offer if claim.offer is not None or self._closed is None else await self._next(claim, 0.0)

    def _put(self, offer: RolloutOffer, *, first: bool = False) -> None:
        if offer.withdrawn:
            return
        for number, claim in self._claims.items():
            if claim.takes(offer):
                del self._claims[number]
                claim.offer = offer
                claim.answered.set()
                return
        self._offers[id(offer)] = offer
        if first:
            self._offers.move_to_end(id(offer), last=False)

    def _withdraw(self, offer: RolloutOffer) -> None:
        offer.withdrawn = True
        self._offers.pop(id(offer), None)
        if offer.lease is not None and offer.lease.id in self._leases:
            self._end(offer.lease.id, None)

    def _new_lease(self, offer: RolloutOffer, worker: str, claim: str) -> Lease:
        id = f"lease-{secrets.token_urlsafe(18)}"
        lease = self._leases[id] = Lease(id=id, offer=offer, claim=claim)
        if claim:
            self._of_claim[claim] = lease
        self._start(lease)
        offer.worker, offer.lease = worker, lease
        offer.claimed.set()
        return lease

    def _start(self, lease: Lease) -> None:
        """Start the timer of a lease, unless leases are paused."""
        if lease.timer is not None:
            lease.timer.cancel()
        loop = asyncio.get_running_loop()
        lease.timer = None if self._paused else loop.call_later(self.lease_s, self._end, lease.id, None)

    def _end(self, id: str, end: LeaseEnd | None) -> None:
        """End a lease. `end`: worker's report; None: the lease expired."""
        lease = self._leases.pop(id)
        if lease.timer is not None:
            lease.timer.cancel()
        self._of_claim.pop(lease.claim, None)
        lease.offer.end = end
        lease.offer.over.set()
        self._over[id] = end
        if len(self._over) > MOST_OVER:
            self._over.popitem(last=False)

    def _lease(self, id: str) -> Lease:
        """Return the lease with this id.

        Raises:
            UnknownLease: no lease has or had this id.
            LeaseExpired: the lease has ended.
        """
        lease = self._leases.get(id)
        if lease is not None:
            return lease
        if id in self._over:
            remedy = "claim another rollout; renew a lease in a third of its time"
            raise LeaseExpired(str(refusal("lease", "one that lasts", "one that is over", remedy)))
        raise UnknownLease(str(refusal("lease", "the id of a claimed rollout", repr(id), "claim a rollout first")))
