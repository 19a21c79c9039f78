"""Counts of the KV cache: tokens found, conversations evicted, tokens recomputed because of evictions. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MOST = 4096
"""Maximum number of evicted conversations that are remembered, since some are never continued and never released."""


class Allocation(NamedTuple):
    """Pages of an admitted request.

    Attributes:
        num_cached: number of tokens whose keys and values the pages already hold.
        num_parked: number of cached tokens from the parked pages of the request's own conversation.
        num_restored: number of cached tokens that are copied back from host memory.
    """

    pages: list[int]
    num_cached: int
    num_parked: int
    num_restored: int


@dataclass(slots=True)
class KvCounts:
    """Counts since the start: requests with cached tokens (`hits`) and without (`misses`), cached tokens by origin,
    evicted conversations, pages copied to host memory and back, and the maximum number of pages in use at once."""

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
    """Tokens that were recomputed because their keys and values had been evicted; `count` since the start."""

    def __init__(self) -> None:
        self.count = 0
        self._evicted: dict[str, int] = {}

    def evict(self, conversation: str, num_tokens: int) -> None:
        """Record that a conversation was evicted with `num_tokens` tokens in the cache."""
        self._evicted[conversation] = num_tokens
        if len(self._evicted) > MOST:
            del self._evicted[next(iter(self._evicted))]

    def forget(self, conversation: str | None = None) -> None:
        """Drop the record of an ended conversation. None drops all records; new weights make them irrelevant."""
        if conversation is None:
            self._evicted.clear()
        else:
            self._evicted.pop(conversation, None)

    def resume(self, conversation: str | None, num_tokens: int, num_cached: int) -> None:
        """Count the tokens that a conversation recomputes after an eviction: `num_tokens` of its next turn are needed,
        `num_cached` are cached."""
        if conversation in self._evicted:
            self.count += max(0, min(self._evicted.pop(conversation), num_tokens) - num_cached)
