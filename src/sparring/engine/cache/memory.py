"""Memory that a request holds while it runs: pages of keys and values and, in a recurrent model, a state. Torch-free.

`PagedMemory` serves models without recurrent layers, `RecurrentMemory` those with some. The scheduler takes either.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from sparring.engine.cache.counts import Allocation
from sparring.engine.cache.kv import KvCache
from sparring.engine.cache.shared_prefill import NoSharing, PrefillSharing
from sparring.engine.cache.states import Prefix, StateSlots, prefix_of
from sparring.engine.sequence import Sequence
from sparring.engine.weight_names import Weights


class PagedMemory:
    """Memory of a model whose layers all attend: pages, without recurrent states. `sharing` decides which requests wait
    while another request computes their common prefix."""

    def __init__(self, cache: KvCache) -> None:
        self.cache = cache
        self.sharing: NoSharing | PrefillSharing = NoSharing()

    def allocate(self, sequence: Sequence, spare: int) -> Allocation | None:
        """Allocate memory for all tokens of a request, and reuse their cached pages. Return None if fewer than `spare`
        pages would be left, which running requests are about to need."""
        return _pages_for(self.cache, sequence, sequence.reusable, spare)

    def park(self, sequence: Sequence, conversation: str) -> None:
        """Park the memory of a finished request for the next turn of its conversation."""
        tokens = sequence.tokens[: sequence.computed]
        pages = sequence.pages[: self.cache.pages_for(sequence.computed)]
        self.cache.park(conversation, tokens, pages, sequence.served.key)

    def give_back(self, sequence: Sequence) -> None:
        """Free all memory of a request; the request has no computed tokens afterwards."""
        self.cache.drop(sequence.pages)
        sequence.pages, sequence.digests, sequence.computed, sequence.oldest = [], [], 0, None

    def release(self, conversation: str) -> None:
        """Drop a parked conversation; unknown ones are ignored."""
        self.cache.release(conversation)

    def forget(self, weights: Weights) -> list[str]:
        """Drop the parked conversations that `weights`, which are no longer served, have computed; return their names.
        For weights of the base model also unregister free pages: all are useless, since no adapter is loaded."""
        conversations = self.cache.release_weights(weights)
        if isinstance(weights, int):
            self.cache.pool.renew()
        return conversations

    def invalidate(self) -> None:
        """Drop all parked memory, because a failed step may not have made its copies."""
        self.cache.invalidate()

    def empty(self) -> None:
        """Drop all cached data. No request may run; all pages and states are free afterwards."""
        self.invalidate()
        self.take_state_copies()
        self.cache.take_copies()
        self.cache.lost.forget()
        self.cache.pool.renew()

    def take_state_copies(self) -> Several[tuple[int, int]]:
        """Return the pending copies of states as (from, to) slots, to be made in this order, and clear the list."""
        return ()


class RecurrentMemory(PagedMemory):
    """Memory of a model with recurrent layers: pages, and a slot of state for each request."""

    def __init__(self, cache: KvCache, num_states: int) -> None:
        super().__init__(cache)
        self.states = StateSlots(num_states, cache.evict)
        if cache.share_prefixes:
            self.sharing = PrefillSharing(self.states, cache)

    def allocate(self, sequence: Sequence, spare: int) -> Allocation | None:
        """Allocate pages and a state. Cached pages are reused only if the recurrent state after exactly their tokens is
        cached too."""
        states, conversation = self.states, sequence.conversation
        if not states.available:
            return None
        own = [conversation] if conversation and states.num_tokens(conversation) else []
        for owner in (*own, *self.sharing.cached_prefixes(sequence), None):
            tail = owner.key if isinstance(owner, Prefix) else None
            reusable = sequence.reusable[: states.num_tokens(owner) + 1]
            allocation = _pages_for(self.cache, sequence, reusable, spare, tail)
            if allocation is not None:
                cached = (
                    owner
                    if isinstance(owner, Prefix) and allocation.num_cached == owner.num_tokens
                    else _computed(sequence, allocation.num_cached)
                )
                sequence.state = states.take() if owner is None else states.resume(owner, cached)
            if allocation is None or sequence.state is not None:
                break
            self.cache.drop(allocation.pages)
            sequence.digests.clear()
            if isinstance(owner, Prefix):
                states.release(owner)  # its pages are gone
            elif owner is not None:
                self.cache.release(owner)  # its state is
        if allocation is not None and conversation is not None:  # a copy in host memory has no state any more
            self.cache.release(conversation)
        return allocation

    def park(self, sequence: Sequence, conversation: str) -> None:
        super().park(sequence, conversation)
        if sequence.state is not None:
            self.states.park(conversation, sequence.state, _computed(sequence, sequence.computed))
            sequence.state = None

    def give_back(self, sequence: Sequence) -> None:
        super().give_back(sequence)
        self.states.drop(sequence.state)
        sequence.state, sequence.share_at = None, 0

    def release(self, conversation: str) -> None:
        super().release(conversation)
        self.states.release(conversation)

    def forget(self, weights: Weights) -> list[str]:
        conversations = super().forget(weights)
        for conversation in conversations:
            self.states.release(conversation)
        self.states.release_weights(weights)
        return conversations

    def invalidate(self) -> None:
        super().invalidate()
        self.states.invalidate()

    def take_state_copies(self) -> Several[tuple[int, int]]:
        return self.states.take_copies()


def _pages_for(
    cache: KvCache, sequence: Sequence, reusable: list[int], spare: int, tail: bytes | None = None
) -> Allocation | None:
    """Allocate pages for a request. All tokens of `reusable` but the last may be reused from the cache; their last page
    may be a copy of the page shared under `tail`."""
    count, weights = cache.pages_for(len(sequence.tokens)), sequence.served.key
    return cache.allocate(sequence.conversation, reusable, count, weights, sequence.digests, spare, tail)


def _computed(sequence: Sequence, count: int) -> Prefix:
    """Return the first `count` tokens of a sequence as a `Prefix`."""
    return prefix_of(sequence.tokens[:count], sequence.served.key)
