"""Counts of the KV cache: what it found, what it gave up, what is computed again for want of room. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MOST = 4096
"""Conversations remembered: of one that never comes again and is never released, nothing is lost."""


class Allocation(NamedTuple):
    """Pages of an admitted request.

    Attributes:
        pages: for all of its tokens.
        num_cached: tokens whose keys and values the pages already hold.
        num_parked: those of them that its own conversation had parked in the cache.
        num_restored: those of them that are copied back from host memory.
    """

    pages: list[int]
    num_cached: int
    num_parked: int
    num_restored: int


@dataclass(slots=True)
class KvCounts:
    """Counts since the start: requests that began with cached tokens (`hits`) and without (`misses`), cached tokens by
    where they came from, evicted conversations, pages copied to host memory and back, and the most pages held at once.
    """

    hits: int = 0
    misses: int = 0
    kept_tokens: int = 0
    shared_tokens: int = 0
    restored_tokens: int = 0
    evictions: int = 0
    pages_out: int = 0
    pages_back: int = 0
    most_pages: int = 0

    def note(self, allocation: Allocation) -> None:
        """Count an admitted request."""
        self.hits += allocation.num_cached > 0
        self.misses += allocation.num_cached == 0
        self.kept_tokens += allocation.num_parked
        self.shared_tokens += allocation.num_cached - allocation.num_parked - allocation.num_restored
        self.restored_tokens += allocation.num_restored


class LostTokens:
    """Tokens whose keys and values were given up for want of room, and were computed again.

    Attributes:
        count: of tokens, since the start.
    """

    def __init__(self) -> None:
        self.count = 0
        self._evicted: dict[str, int] = {}

    def evict(self, conversation: str, num_tokens: int) -> None:
        """Take note that the cache of a conversation is gone."""
        self._evicted[conversation] = num_tokens
        if len(self._evicted) > MOST:
            del self._evicted[next(iter(self._evicted))]

    def forget(self, conversation: str | None = None) -> None:
        """Take note that a conversation is over; None: that what all of them had would be of no use."""
        if conversation is None:
            self._evicted.clear()
        else:
            self._evicted.pop(conversation, None)

    def resume(self, conversation: str | None, num_tokens: int, num_cached: int) -> None:
        """Count what a conversation's next turn, of `num_tokens`, computes again although it was computed."""
        if conversation in self._evicted:
            self.count += max(0, min(self._evicted.pop(conversation), num_tokens) - num_cached)
