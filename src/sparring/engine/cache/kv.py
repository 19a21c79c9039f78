"""Ownership of the pages of the KV cache. Torch-free: pages are numbers.

A page is free, or referenced by running sequences and parked conversations. A full page has a digest of the weight
version and of all tokens from the start of its sequence, by which a request that begins with the same tokens finds the
page. A freed page keeps its digest until it is allocated again.

If the pages of a parked conversation are needed, they are copied to pages in host memory, if the cache has any, and
copied back for the conversation's next turn. Host pages are a second pool: a prefix that several conversations share is
stored once there, and an earlier copy that was not overwritten is found again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Literal, NamedTuple

import xxhash

from sparring.engine.cache.counts import Allocation, KvCounts, LostTokens
from sparring.engine.cache.pages import PagePool
from sparring.engine.weight_names import Weights


@dataclass(frozen=True, slots=True)
class ParkedConversation:
    """Conversation between two turns: its tokens and the pages of their keys and values, all of one version."""

    tokens: list[int]
    pages: list[int]
    version: Weights


class ParkedConversations:
    """Parked conversations and the pool of their pages, ordered by last use."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self._idle: OrderedDict[str, ParkedConversation] = OrderedDict()

    def put(self, conversation: str, parked: ParkedConversation) -> None:
        """Park a conversation and hold its pages, replacing its earlier entry."""
        for page in parked.pages:
            self.pool.hold(page, idle=True)
        self.release(conversation)
        self._idle[conversation] = parked

    def get(self, conversation: str | None) -> ParkedConversation | None:
        """Return the entry of a conversation; None if the conversation is not parked."""
        return self._idle.get(conversation) if conversation is not None else None

    def oldest(self) -> tuple[str, ParkedConversation]:
        """Return name and entry of the conversation parked longest ago among the conversations with a page that no
        running sequence uses."""
        return next(item for item in self._idle.items() if any(map(self.pool.is_idle, reversed(item[1].pages))))

    def release(self, conversation: str) -> None:
        """Remove a conversation; an unknown name is ignored. The conversation's last pages are freed first, as in
        `KvCache.drop`."""
        parked = self._idle.pop(conversation, None)
        for page in reversed(parked.pages if parked is not None else ()):
            self.pool.drop(page, idle=True)

    def release_weights(self, version: Weights) -> list[str]:
        """Remove the conversations that were computed by `version`; return their names."""
        names = [name for name, parked in self._idle.items() if parked.version == version]
        for name in names:
            self.release(name)
        return names

    def clear(self) -> None:
        """Remove every conversation."""
        for name in list(self._idle):
            self.release(name)


class PageCopy(NamedTuple):
    """Pending copy of page `source` to page `target`: within the cache, to host memory, or back from host memory."""

    way: Literal["within", "out", "back"]
    source: int
    target: int


class KvCache:
    """Page pool and parked conversations.

    Args:
        share_prefixes: whether full pages are found by their contents.
        host_pages: pages in host memory for evicted conversations.
        idle_pages: maximum number of pages that only parked conversations hold; None: no limit.
        window: maximum number of positions that a position attends to, itself included; None: no limit.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        share_prefixes: bool,
        host_pages: int = 0,
        idle_pages: int | None = None,
        window: int | None = None,
    ) -> None:
        self.page_size = page_size
        self.counts, self.lost = KvCounts(), LostTokens()
        self.share_prefixes, self._window = share_prefixes, window
        self._idle_pages = num_pages if idle_pages is None else idle_pages
        self._here, self._host = ParkedConversations(num_pages), ParkedConversations(host_pages)
        self.pool = self._here.pool
        self._tails: OrderedDict[bytes, int] = OrderedDict()
        self._copies: list[PageCopy] = []

    @property
    def host(self) -> PagePool:
        """Pool of the pages in host memory."""
        return self._host.pool

    @property
    def num_available(self) -> int:
        """Number of pages that `take` can return: free and evictable pages."""
        return self.pool.num_free + self.pool.num_idle

    @property
    def num_idle(self) -> int:
        """Number of pages that only parked conversations reference."""
        return self.pool.num_idle - sum(map(self.pool.is_idle, list(self._tails.values())))  # other threads ask too

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int, spare: int = 0) -> list[int] | None:
        """Take and return `count` pages, evicting parked conversations if too few pages are free. If fewer than `spare`
        pages would be available afterwards, return None and evict nothing."""
        if count + spare > self.num_available:
            return None
        while self.pool.num_free < count:
            if (key := next((one for one, page in self._tails.items() if self.pool.is_idle(page)), None)) is not None:
                self.unshare_tail(key)
            else:
                self._give_up()
        pages = [self.pool.take() for _ in range(count)]
        self.counts.most_pages = max(self.counts.most_pages, self.pool.num_pages - self.pool.num_free)
        return pages

    def drop(self, pages: list[int]) -> None:
        """Free pages, the last page first: the beginning of a text is more likely to be needed again than its end."""
        for page in reversed(pages):
            self.pool.drop(page)

    def num_unread(self, computed: int) -> int:
        """Return how many first pages of a sequence are outside the window of all tokens after the first `computed`."""
        return 0 if self._window is None else max(0, computed - self._window + 1) // self.page_size

    def drop_unread(self, pages: list[int], begin: int, end: int) -> None:
        """Free pages[begin:end] of a running sequence early. Their contents can be found until they are allocated
        again."""
        for index in range(begin, end):
            self.pool.drop(pages[index])
            pages[index] = self.pool.hole

    def trim(self) -> None:
        """Evict the conversations parked longest ago until parked conversations hold at most `idle_pages` pages."""
        while self.num_idle > self._idle_pages:
            self._give_up()

    def park(self, conversation: str, tokens: list[int], pages: list[int], version: Weights) -> None:
        """Park the pages of a running sequence for the next turn of a conversation, replacing its earlier entry. The
        sequence may continue to write in the last page; only the part with `tokens` belongs to the conversation."""
        gone = self.num_unread(len(tokens))
        self._host.release(conversation)
        self._here.put(conversation, ParkedConversation(tokens, [self.pool.hole] * gone + pages[gone:], version))

    def share_tail(self, key: bytes, page: int) -> None:
        """Hold the partly filled page in which a cached prefix ends. The sequence of this page may still write after
        the prefix."""
        if key not in self._tails:
            self.pool.hold(page, idle=True)
            self._tails[key] = page

    def unshare_tail(self, key: bytes) -> None:
        """Release the page held under `key`; an unknown key is ignored."""
        if (page := self._tails.pop(key, None)) is not None:
            self.pool.drop(page, idle=True)

    def take_copies(self) -> list[PageCopy]:
        """Return the pending copies, to be made in this order before the next step, and clear them."""
        copies, self._copies = self._copies, []
        return copies

    def release(self, conversation: str) -> None:
        """Drop a parked conversation; an unknown name is ignored."""
        self._here.release(conversation)
        self._host.release(conversation)

    def evict(self, conversation: str | bytes) -> None:
        """Drop the pages of an evicted recurrent state. For a parked conversation (str) drop its pages and count an
        eviction. For the key of a prefix (bytes) release the page shared under this key."""
        if isinstance(conversation, bytes):
            return self.unshare_tail(conversation)
        parked = self._here.get(conversation) or self._host.get(conversation)
        self.release(conversation)
        if parked is not None:
            self.counts.evictions += 1
            self.lost.evict(conversation, len(parked.tokens))

    def release_weights(self, version: Weights) -> list[str]:
        """Drop the parked conversations computed by `version`, which is no longer served; return their names."""
        self.lost.forget()
        return self._here.release_weights(version) + self._host.release_weights(version)

    def invalidate(self) -> None:
        """Drop all parked conversations and shared pages, because a failed step may not have made their copies."""
        self._here.clear()
        self._host = ParkedConversations(self.host.num_pages)
        for key in list(self._tails):
            self.unshare_tail(key)

    def allocate(
        self,
        conversation: str | None,
        tokens: list[int],
        count: int,
        version: Weights,
        digests: list[bytes],
        spare: int,
        tail: bytes | None = None,
    ) -> Allocation | None:
        """Allocate pages for a request, and reuse cached pages for as many of its tokens as possible.

        The last token is always computed; if its full page was found, the page already holds the same values. Parked
        tokens that are a prefix of `tokens` are reused completely, other parked tokens only as full pages of equal
        tokens.

        Args:
            conversation: conversation whose parked pages may be taken over; None for none.
            tokens: tokens of the request whose keys and values may be reused, and the token after them.
            count: number of pages for all tokens of the request.
            version: weights that will compute the other tokens.
            digests: list to which the digests of the found full pages are appended.
            spare: number of pages that running requests are about to need.
            tail: key of the shared page, if any, in which `tokens` without the last one end; the page is copied.

        Returns:
            The allocation; None if fewer than `spare` pages would be left, in which case parked pages stay parked.
        """
        pages, num_parked = self._resume(conversation, tokens, version)
        num_cached = self._find(pages, num_parked, tokens, version, digests)
        on_host, num_restored = self._away(conversation, tokens, version, num_cached)
        holes = on_host.count(self.host.hole)
        for page in on_host:
            self.host.hold(page)
        shared = self.pool.hole if num_restored else self._lent(tail, tokens, num_cached)
        self.pool.hold(shared)
        fresh = self.take(count - len(pages) - holes, spare)
        if fresh is None and shared != self.pool.hole:  # the held shared page may be the missing one
            self.pool.drop(shared)
            shared, fresh = self.pool.hole, self.take(count - len(pages) - holes, spare)
        if fresh is None:
            # only the conversation's own pages: the step being planned may still have to fill the others
            if num_parked and conversation is not None:
                self.park(conversation, tokens[:num_parked], pages[: self.pages_for(num_parked)], version)
            self.drop(pages)
            digests.clear()
        else:
            self._copies += [PageCopy("back", *pair) for pair in zip(on_host[holes:], fresh, strict=False)]
            self.counts.pages_back += len(on_host) - holes
            pages += [self.pool.hole] * holes + fresh
            if shared != self.pool.hole:
                self._copies.append(PageCopy("within", shared, pages[num_cached // self.page_size]))
                num_cached = len(tokens) - 1
            self.publish(pages, tokens, num_cached + num_restored, version, digests)
        self.pool.drop(shared)
        for page in reversed(on_host):
            self.host.drop(page)
        if fresh is None:
            return None
        return Allocation(pages, num_cached + num_restored, min(num_parked, num_cached), num_restored)

    def publish(
        self, pages: list[int], tokens: list[int], computed: int, version: Weights, digests: list[bytes]
    ) -> None:
        """Register the pages that the first `computed` tokens fill, for reuse by other requests. All were computed by
        `version`."""
        if not self.share_prefixes:
            return
        first = len(digests)
        chain_digests(digests, tokens, computed, self.page_size, version)
        for index in range(first, len(digests)):
            if pages[index] != self.pool.hole:
                self.pool.publish(pages[index], digests[index])

    def _resume(self, conversation: str | None, tokens: list[int], version: Weights) -> tuple[list[int], int]:
        """Take over the parked pages of a conversation that hold a prefix of `tokens`. Return these pages and their
        number of tokens."""
        parked = self._here.get(conversation)
        if parked is None or conversation is None:
            return [], 0
        num_cached = self._common(parked, tokens, version, self.pool)
        pages = parked.pages[: self.pages_for(num_cached)]
        for page in pages:
            self.pool.hold(page)
        self._here.release(conversation)
        if num_cached % self.page_size and not self._make_own(pages):
            self.drop([pages.pop()])
            num_cached -= num_cached % self.page_size
        return pages, num_cached

    def _find(
        self, pages: list[int], num_cached: int, tokens: list[int], version: Weights, digests: list[bytes]
    ) -> int:
        """Extend `pages`, which hold `num_cached` tokens, by pages found by their contents. Return the new number of
        cached tokens."""
        if not self.share_prefixes:
            return num_cached
        chain_digests(digests, tokens, num_cached, self.page_size, version)
        while num_cached % self.page_size == 0 and num_cached + self.page_size <= len(tokens):
            chain_digests(digests, tokens, num_cached + self.page_size, self.page_size, version)
            page = self.pool.find(digests[-1])
            if page is None:
                digests.pop()
                break
            self.pool.hold(page)
            pages.append(page)
            num_cached += self.page_size
        return min(num_cached, len(tokens) - 1)

    def _lent(self, tail: bytes | None, tokens: list[int], num_cached: int) -> int:
        """Return the page shared under `tail`, with tokens `num_cached` to the last but one; else `PagePool.hole`."""
        whole_pages = (len(tokens) - 1) // self.page_size * self.page_size
        return (
            self._tails.get(tail, self.pool.hole) if tail is not None and num_cached == whole_pages else self.pool.hole
        )

    def _away(
        self, conversation: str | None, tokens: list[int], version: Weights, num_cached: int
    ) -> tuple[list[int], int]:
        """Return the conversation's pages in host memory that can be reused after the first `num_cached` tokens, and
        the number of tokens gained."""
        parked = self._host.get(conversation)
        more = 0 if parked is None else self._common(parked, tokens, version, self.host) - num_cached
        return (
            (parked.pages[num_cached // self.page_size : self.pages_for(num_cached + more)], more)
            if parked and more > 0
            else ([], 0)
        )

    def _common(self, parked: ParkedConversation, tokens: list[int], version: Weights, pool: PagePool) -> int:
        """Count the reusable tokens of a parked conversation. If `tokens` diverges from them, only full pages count. If
        a page that the next token attends to was freed, none count."""
        num_common = _common(parked.tokens, tokens[:-1]) if parked.version == version else 0
        num_common -= 0 if num_common == len(parked.tokens) else num_common % self.page_size
        return 0 if pool.hole in parked.pages[self.num_unread(num_common) : self.pages_for(num_common)] else num_common

    def _make_own(self, pages: list[int]) -> bool:
        """Make the last page writable: copy a page with other references, unregister any other. Return False if no page
        is free for the copy."""
        last = pages[-1]
        if self.pool.references[last] == 1:
            self.pool.forget(last)
            return True
        copy = self.take(1)
        if copy is None:
            return False
        self._copies.append(PageCopy("within", last, *copy))
        self.pool.drop(last)
        pages[-1:] = copy
        return True

    def _give_up(self) -> None:
        """Evict the conversation parked longest ago; copy it to host memory if there is room."""
        name, parked = self._here.oldest()
        if not self._put_away(name, parked):
            self.counts.evictions += 1
            self.lost.evict(name, len(parked.tokens))
        self._here.release(name)

    def _put_away(self, name: str, parked: ParkedConversation) -> bool:
        """Copy a conversation to host memory, evicting the conversations copied there longest ago. Return False if the
        conversation does not fit."""
        host, needed = self.host, len(parked.pages) - parked.pages.count(self.pool.hole)
        while host.num_free + host.num_idle >= needed > host.num_free:
            oldest, gone = self._host.oldest()
            self._host.release(oldest)
            self.counts.evictions += 1
            self.lost.evict(oldest, len(gone.tokens))
        if needed > host.num_free:
            return False
        pages, full = [], len(parked.tokens) // self.page_size
        for index, page in enumerate(parked.pages):
            # a sequence that writes in the last page may register it before it is full
            digest = self.pool.digest(page) if index < full else None
            copied = None if digest is None else host.find(digest)
            if page == self.pool.hole:
                copied = host.hole
            elif copied is None:
                copied = host.take()
                if digest is not None:
                    host.publish(copied, digest)
                self._copies.append(PageCopy("out", page, copied))
                self.counts.pages_out += 1
            else:
                host.hold(copied)
            pages.append(copied)
        self._host.put(name, ParkedConversation(parked.tokens, pages, parked.version))
        for page in pages:
            host.drop(page)
        return True


def kv_metrics(cache: KvCache, page_bytes: int) -> dict[str, float]:
    """Return the metrics of the cache by name: counts, and present levels.

    Counts since the start: kv_hits and kv_misses (requests that found cached tokens, and that found none);
    kv_kept_tokens, kv_restored_tokens and kv_shared_tokens (tokens not prefilled, because the conversation was parked
    in the cache, was copied back from host memory, or because other requests had computed the same prefix);
    kv_evictions (conversations dropped for good); kv_lost_tokens (recomputed after an eviction or a preemption);
    kv_out_bytes and kv_back_bytes (to host memory and back). Levels: kv_bytes_now, kv_idle_bytes_now,
    kv_host_bytes_now; max_kv_bytes.
    """
    counts, pool, host = cache.counts, cache.pool, cache.host
    pages = {
        "kv_out_bytes": counts.pages_out,
        "kv_back_bytes": counts.pages_back,
        "kv_bytes_now": pool.num_pages - pool.num_free,
        "kv_idle_bytes_now": cache.num_idle,
        "kv_host_bytes_now": host.num_pages - host.num_free,
        "max_kv_bytes": counts.most_pages,
    }
    names = ("hits", "misses", "kept_tokens", "restored_tokens", "shared_tokens", "evictions")
    values = {f"kv_{name}": float(getattr(counts, name)) for name in names} | {
        "kv_lost_tokens": float(cache.lost.count)
    }
    return values | {name: float(count * page_bytes) for name, count in pages.items()}


def chain_digests(digests: list[bytes], tokens: Tokens[int], upto: int, page_size: int, version: Weights) -> None:
    """Append to `digests` the missing digests of the full pages of tokens[:upto]. The digest of a page covers all
    tokens up to the page's end."""
    while (len(digests) + 1) * page_size <= upto:
        begin = len(digests) * page_size
        before = digests[-1] if digests else str(version).encode()
        page = array("q", tokens[begin : begin + page_size]).tobytes()
        digests.append(xxhash.xxh3_128_digest(before + page))


def _common(a: list[int], b: list[int]) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
