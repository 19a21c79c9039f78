"""Leases of rollouts that programs elsewhere play: a rollout is offered, one worker claims it, renews its lease and
finishes it. A lease that is not renewed in time runs out, and nothing of its worker counts any more.
"""

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
"""Leases that are over and remembered, so that a late worker is answered as such."""


class UnknownLease(BadInput):
    """No worker of this process holds a lease of this id, or it is long over."""


class LeaseExpired(BadInput):
    """A lease has run out, or the rollout has ended without its worker."""


class LeaseConflict(BadInput):
    """A lease was finished in another way before."""


class RunOver(BadInput):
    """The run offers no more rollouts."""


class RunStopped(InfraError):
    """The run has stopped before its end: another process may go on with it."""


class LeaseEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End of a rollout, as its worker describes it."""

    outcome: Literal["completed", "truncated", "failed"]
    """`failed`: the worker could not play it, which is a failure of the infrastructure; it is played again.
    `truncated`: a limit of the worker's own was hit."""

    answer: str | None = None
    """Last words to the world; None: the policy's latest reply that called nothing."""

    reward: float | msgspec.UnsetType | None = msgspec.UNSET
    """Reward of the rollout, the last one; None: it is not scored, which is not 0."""

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
        environment: of its task.
        shown: what its worker is shown, as plain data.
        rewards: of the rollout from outside; None where the run takes none.
        worker: name of the worker that has it.
        claimed: set when a worker has it.
        over: set when the worker finished, or its lease ran out.
        end: as the worker described it; None where the lease ran out.
        lease: of the worker that has it.
        withdrawn: whether it is no longer there to be claimed.
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
        """Wait for the end.

        Raises:
            WorkerLost: the lease ran out.
        """
        await self.over.wait()
        if self.end is None:
            raise WorkerLost(f"worker {self.worker or 'without a name'}: its lease ran out")
        return self.end


@dataclass(eq=False, kw_only=True, slots=True)
class Lease:
    """Lease of an offer.

    Attributes:
        id: known to its worker alone.
        offer: which the worker has.
        claim: id of the claim that has got it; empty for none.
        timer: lets it run out; None while no lease does.
    """

    id: str
    offer: RolloutOffer
    claim: str = ""
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, kw_only=True, slots=True)
class _Claim:
    """Claim that waits for an offer."""

    environments: Sequence[str]
    id: str
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    offer: RolloutOffer | None = None

    def takes(self, offer: RolloutOffer) -> bool:
        return not self.environments or offer.environment in self.environments


class Leases:
    """Leases of one run: offers in the order in which they came, and claims in theirs.

    Args:
        lease_s: seconds after which a lease that is not renewed runs out.

    Attributes:
        lease_s: the same.
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
        """Offer a rollout for as long as the context lasts; its lease ends with it.

        Args:
            environment: of its task.
            shown: what its worker is shown, as plain data.
            rewards: of the rollout from outside; None where the run takes none.
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
        """Lease the first offer, or wait for one. A claim with the id of one that has got a lease gets that lease, and
        one with the id of another that waits takes its place.

        Args:
            environments: of which one is wanted; empty: any.
            wait_s: longest wait, in seconds.
            worker: name of who claims, for reports.
            id: of the claim, the same when it is made again; empty for none.

        Returns:
            The lease; None where there was no offer in time.

        Raises:
            RunOver: no more rollouts are offered.
            RunStopped: none by this process.
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
                return self._leased(offer, worker, id)

    def renew(self, id: str) -> None:
        """Let a lease last for its whole time again.

        Raises:
            UnknownLease, LeaseExpired: there is none.
        """
        self._start(self._lease(id))

    def pause(self) -> None:
        """Let no lease run out until `go_on`: nothing of the workers is heard."""
        self._paused = True
        for lease in self._leases.values():
            self._start(lease)

    def go_on(self) -> None:
        """Let every lease last for its whole time from now on."""
        self._paused = False
        for lease in self._leases.values():
            self._start(lease)

    def finish(self, id: str, end: LeaseEnd) -> None:
        """End the rollout of a lease. The same end twice is one.

        Raises:
            UnknownLease, LeaseExpired: there is no lease of this id.
            LeaseConflict: it was finished otherwise.
            RewardsClosed: the run takes no rewards from outside.
            StoreError: the reward cannot be made durable; nothing has ended.
        """
        if id not in self._leases and (before := self._over.get(id)) is not None:
            if before == end:
                return
            do = "finish a rollout once"
            raise LeaseConflict(str(refusal("lease", "one that is under way", f"one that {before.outcome}", do)))
        offer = self._lease(id).offer
        if end.reward is not msgspec.UNSET:
            if offer.rewards is None:
                do = "leave it out, or set rollout.rewards_within_s in the recipe"
                raise RewardsClosed(str(refusal("reward", "none in this run", "one", do)))
            offer.rewards.give(OutsideReward(reward=end.reward))
        self._end(id, end)

    def close(self, *, stopped: bool = False) -> None:
        """Offer no more: claims that wait are refused.

        Args:
            stopped: whether another process may go on with the run.
        """
        if stopped:
            closed: SparringError = RunStopped("the run has stopped; claim again when it goes on")
        else:
            do = "stop claiming, or start the run again"
            closed = RunOver(str(refusal("claim", "a run that is going on", "one that is over", do)))
        self._closed = self._closed or closed
        for claim in self._claims.values():
            claim.answered.set()

    async def _next(self, claim: _Claim, wait_s: float) -> RolloutOffer | None:
        """Return the offer that a claim gets, which nobody else gets then; None where there is none in time."""
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
        """Give an offer to the first claim that takes it, else let it wait for one."""
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
        """Take an offer back, and its lease."""
        offer.withdrawn = True
        self._offers.pop(id(offer), None)
        if offer.lease is not None and offer.lease.id in self._leases:
            self._end(offer.lease.id, None)

    def _leased(self, offer: RolloutOffer, worker: str, claim: str) -> Lease:
        """Return a new lease of an offer."""
        id = f"lease-{secrets.token_urlsafe(18)}"
        lease = self._leases[id] = Lease(id=id, offer=offer, claim=claim)
        if claim:
            self._of_claim[claim] = lease
        self._start(lease)
        offer.worker, offer.lease = worker, lease
        offer.claimed.set()
        return lease

    def _start(self, lease: Lease) -> None:
        """Let a lease last for its whole time from now on, or for as long as none runs out."""
        if lease.timer is not None:
            lease.timer.cancel()
        loop = asyncio.get_running_loop()
        lease.timer = None if self._paused else loop.call_later(self.lease_s, self._end, lease.id, None)

    def _end(self, id: str, end: LeaseEnd | None) -> None:
        """End a lease; None: it ran out."""
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
        """Return the lease of an id.

        Raises:
            UnknownLease: there is none.
            LeaseExpired: there was one.
        """
        lease = self._leases.get(id)
        if lease is not None:
            return lease
        if id in self._over:
            do = "claim another rollout; renew a lease in a third of its time"
            raise LeaseExpired(str(refusal("lease", "one that lasts", "one that is over", do)))
        raise UnknownLease(str(refusal("lease", "the id of a claimed rollout", repr(id), "claim a rollout first")))
