"""Slots of recurrent state and their owners: running sequences, parked conversations, cached prefixes. Torch-free.

A model with recurrent layers needs one state per sequence in addition to its pages of keys and values. A state
summarises all tokens that its sequence has computed, and cannot be cut back to an earlier token. A conversation
therefore resumes from the state of its last turn only if its next prompt begins with all tokens of that turn. Requests
with a common prefix start from copies of the state after it (`shared_prefill.py`).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from sparring.engine.weight_names import Weights


class Prefix(NamedTuple):
    """First `num_tokens` tokens of a sequence, named by their digest and by the weights that computed them."""

    num_tokens: int
    weights: Weights
    digest: bytes

    @property
    def key(self) -> bytes:
        """Key of the shared page in which this prefix ends."""
        return str(self.weights).encode() + self.digest


def prefix_of(tokens: list[int], weights: Weights) -> Prefix:
    """Name a sequence of tokens as a prefix computed by `weights`."""
    return Prefix(len(tokens), weights, xxhash.xxh3_128_digest(array("q", tokens).tobytes()))


class ParkedState(NamedTuple):
    """State that no running sequence owns: its slot, and the tokens that it summarises."""

    slot: int
    prefix: Prefix


class StateSlots:
    """Pool of slots. Each slot is free, owned by one sequence, or parked for a conversation or a prefix. If no slot is
    free, the least recently used parked slot is evicted. `on_evict` is then called with the conversation, or the
    prefix's key, whose pages are useless without the state."""

    def __init__(self, num_slots: int, on_evict: Callable[[str | bytes], object]) -> None:
        self._free, self._on_evict = list(range(num_slots)), on_evict
        self._parked: OrderedDict[str | Prefix, ParkedState] = OrderedDict()
        self._copies: list[tuple[int, int]] = []

    @property
    def available(self) -> bool:
        """True if `take` would return a slot."""
        return bool(self._free or self._parked)

    def take(self) -> int | None:
        """Take a slot with arbitrary contents; evict a parked state if no slot is free. Return None if running
        sequences own all slots."""
        if not self._free and self._parked:
            owner, parked = self._parked.popitem(last=False)
            self.drop(parked.slot)
            self._on_evict(owner if isinstance(owner, str) else owner.key)
        return self._free.pop() if self._free else None

    def drop(self, slot: int | None) -> None:
        """Return a slot to the pool; the slot None is ignored."""
        if slot is not None:
            self._free.append(slot)

    def park(self, conversation: str, slot: int, prefix: Prefix) -> None:
        """Park a sequence's slot for the next turn of its conversation, replacing an earlier parked state."""
        self.release(conversation)
        self._parked[conversation] = ParkedState(slot, prefix)

    def cache_prefix(self, prefix: Prefix, slot: int) -> None:
        """Cache a copy of the state in `slot` for requests that begin with `prefix`. The sequence that owns the state
        continues. If no slot can be taken for the copy, nothing is cached."""
        copy = None if prefix in self._parked else self.take()
        if copy is not None:
            self._copies.append((slot, copy))
            self._parked[prefix] = ParkedState(copy, prefix)

    @property
    def prefix_lengths(self) -> set[int]:
        """Lengths in tokens of the cached prefixes."""
        return {owner.num_tokens for owner in self._parked if isinstance(owner, Prefix)}

    def num_tokens(self, owner: str | Prefix | None) -> int:
        """Return the number of tokens that the parked state of a conversation or prefix summarises; 0 without a
        state."""
        parked = self._parked.get(owner) if owner is not None else None
        return 0 if parked is None else parked.prefix.num_tokens

    def resume(self, owner: str | Prefix, cached: Prefix) -> int | None:
        """Take over the state of a parked conversation, or a copy of the state of a cached prefix, for a request whose
        cached pages hold the tokens `cached`. Return the slot. If the state summarises other tokens than `cached`, or
        is of other weights, return None; the state of a conversation is then dropped."""
        parked = self._parked.get(owner)
        fits = parked is not None and parked.prefix == cached
        if parked is None or isinstance(owner, Prefix):
            return self._copy(owner, parked.slot) if parked is not None and fits else None
        del self._parked[owner]
        if not fits:
            self.drop(parked.slot)
        return parked.slot if fits else None

    def release(self, owner: str | Prefix) -> None:
        """Drop the state of a parked conversation or cached prefix; an unknown `owner` is ignored."""
        parked = self._parked.pop(owner, None)
        if parked is not None:
            self.drop(parked.slot)
        if isinstance(owner, Prefix):
            self._on_evict(owner.key)

    def release_weights(self, weights: Weights) -> None:
        """Drop the states of all prefixes that were computed by weights which are no longer served."""
        for owner in [owner for owner in self._parked if isinstance(owner, Prefix) and owner.weights == weights]:
            self.release(owner)

    def invalidate(self) -> None:
        """Drop all parked states, because a failed step may not have made their copies."""
        self._copies.clear()
        while self._parked:
            self.drop(self._parked.popitem()[1].slot)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return and clear the pending copies as (from, to) slots, to be made in this order before the next step."""
        copies, self._copies = self._copies, []
        return copies

    def _copy(self, owner: str | Prefix, slot: int) -> int | None:
        """Return a slot with a copy of the parked state in `slot`. If no other slot can be taken, return `slot` itself;
        the state of `owner` is then no longer parked."""
        self._parked.move_to_end(owner)
        copy = self.take()
        if copy is not None and copy != slot:
            self._copies.append((slot, copy))
        return copy
