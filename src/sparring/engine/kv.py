"""Who owns which page of the KV cache. Torch-free: pages are numbers.

A page is free, or held by one or more sequences and idle conversations (reference count). A full page carries a digest of
the weight version and of every token from the start of its sequence, by which a request that begins with the same tokens
finds it; a freed page keeps its digest until it is given out again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import xxhash

Weights = int | str
"""What keys and values are of: the number of a weight version, or the name and version of an adapter."""


class PagePool:
    """Reference counts, the free list (the page freed longest ago is given out first) and the digests."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.references = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free page, now held once. Raises KeyError when there is none: the caller has looked."""
        page, _ = self._free.popitem(last=False)
        self.forget(page)
        self.references[page] = 1
        return page

    def drop(self, page: int) -> None:
        """One holder less."""
        self.references[page] -= 1
        if self.references[page] == 0:
            self._free[page] = None

    def publish(self, page: int, digest: bytes) -> None:
        """Let others find a full page. The first page of a digest stays the one that is found."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def find(self, digest: bytes) -> int | None:
        """The page of a digest, held or free."""
        return self._page_of.get(digest)

    def hold(self, page: int) -> None:
        """One holder more; a free page leaves the free list with what it contains."""
        if self.references[page] == 0:
            del self._free[page]
        self.references[page] += 1

    def forget(self, page: int) -> None:
        """Nobody finds this page by its contents any more."""
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]


@dataclass(frozen=True, slots=True)
class Idle:
    """What stays of a conversation between its turns: its tokens, all with KV of one weight version in `pages`."""

    tokens: list[int]
    pages: list[int]
    version: Weights


class KvCache:
    """The pool together with the idle conversations, least recently used first."""

    def __init__(self, num_pages: int, page_size: int, *, share_prefixes: bool) -> None:
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self._share = share_prefixes
        self._idle: OrderedDict[str, Idle] = OrderedDict()
        self._copies: list[tuple[int, int]] = []

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int, spare: int = 0) -> list[int] | None:
        """`count` pages, at the cost of idle conversations where the free ones do not suffice.

        None, and nothing is given up, if even with those fewer than `spare` pages would be left.
        """
        missing = count + spare - self.pool.num_free
        if missing > 0 and missing > self._reclaimable():
            return None
        while self.pool.num_free < count:
            _, idle = self._idle.popitem(last=False)
            self.drop(idle.pages)
        return [self.pool.take() for _ in range(count)]

    def drop(self, pages: list[int]) -> None:
        """Give pages back, the last ones first: a beginning is more likely to be asked for again than an end."""
        for page in reversed(pages):
            self.pool.drop(page)

    def park(self, conversation: str, idle: Idle) -> None:
        """Keep a conversation for its next turn, in place of what was kept before."""
        self.release(conversation)
        self._idle[conversation] = idle

    def share(self, conversation: str, tokens: list[int], pages: list[int], version: Weights) -> None:
        """Keep what a live sequence holds for another conversation too. The sequence writes on in the last page: only what
        `tokens` fill of it is the conversation's."""
        for page in pages:
            self.pool.hold(page)
        self.park(conversation, Idle(tokens, list(pages), version))

    def take_copies(self) -> list[tuple[int, int]]:
        """Pages to copy, (from, to) in this order, before the next step is computed; they are asked for once."""
        copies, self._copies = self._copies, []
        return copies

    def release(self, conversation: str) -> None:
        """Forget an idle conversation; none is fine."""
        idle = self._idle.pop(conversation, None)
        if idle is not None:
            self.drop(idle.pages)

    def release_other_versions(self, version: Weights) -> None:
        """Forget every idle conversation whose KV is not of `version`."""
        for name in [name for name, idle in self._idle.items() if idle.version != version]:
            self.release(name)

    def resume(
        self, conversation: str | None, tokens: list[int], version: Weights, digests: list[bytes]
    ) -> tuple[list[int], int]:
        """Pages that already hold a beginning of `tokens` under `version`, and how many tokens they hold.

        The last token is always left to compute; where its page was found full, what is written there stands there already.
        Where the kept tokens are a beginning of `tokens`, all of them are reused; where they diverge, the pages that are full
        and equal.

        Args:
            conversation: whose idle pages may be taken over.
            tokens: the request's tokens.
            version: of the weights that will compute the rest.
            digests: of the full pages found, appended to.
        """
        pages, known = self._resume_idle(conversation, tokens, version)
        if not self._share:
            return pages, known
        chain_digests(digests, tokens, known, self.page_size, version)
        while known % self.page_size == 0 and known + self.page_size <= len(tokens):
            chain_digests(digests, tokens, known + self.page_size, self.page_size, version)
            page = self.pool.find(digests[-1])
            if page is None:
                digests.pop()
                break
            self.pool.hold(page)
            pages.append(page)
            known += self.page_size
        return pages, min(known, len(tokens) - 1)

    def _resume_idle(self, conversation: str | None, tokens: list[int], version: Weights) -> tuple[list[int], int]:
        idle = self._idle.pop(conversation, None) if conversation is not None else None
        if idle is None:
            return [], 0
        if idle.version != version:
            self.drop(idle.pages)
            return [], 0
        known = _common(idle.tokens, tokens[:-1])
        if known < len(idle.tokens):
            known -= known % self.page_size
        count = self.pages_for(known)
        self.drop(idle.pages[count:])
        pages = idle.pages[:count]
        if known % self.page_size and not self._make_own(pages):
            self.drop([pages.pop()])
            known -= known % self.page_size
        return pages, known

    def _make_own(self, pages: list[int]) -> bool:
        """Let the last page be written in: nobody else may hold it or find it. False where there is no room for a copy."""
        last = pages[-1]
        if self.pool.references[last] == 1:
            self.pool.forget(last)
            return True
        copy = self.take(1)
        if copy is None:
            return False
        self._copies.append((last, *copy))
        self.pool.drop(last)
        pages[-1:] = copy
        return True

    def publish(self, pages: list[int], tokens: list[int], computed: int, version: Weights, digests: list[bytes]) -> None:
        """Let others find the pages that are full once `computed` tokens have KV, all of `version`."""
        if not self._share:
            return
        first = len(digests)
        chain_digests(digests, tokens, computed, self.page_size, version)
        for index in range(first, len(digests)):
            self.pool.publish(pages[index], digests[index])

    def _reclaimable(self) -> int:
        """Pages that only idle conversations hold."""
        held: dict[int, int] = {}
        for idle in self._idle.values():
            for page in idle.pages:
                held[page] = held.get(page, 0) + 1
        return sum(count == self.pool.references[page] for page, count in held.items())


def chain_digests(digests: list[bytes], tokens: Tokens[int], upto: int, page_size: int, version: Weights) -> None:
    """Append the digests of the full pages of tokens[:upto] that are not in `digests` yet; each covers all before it."""
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
