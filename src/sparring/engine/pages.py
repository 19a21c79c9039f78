"""The pages of a cache: who holds which, and by what it is found. Torch-free: pages are numbers."""

from __future__ import annotations

from collections import OrderedDict


class PagePool:
    """Reference counts, the free list (the page freed longest ago is given out first) and the digests.

    `num_idle` counts pages whose holders all give them up where room is needed: idle conversations, and those kept to
    be lent. `hole` is no page: it stands where one was given back early, and holding or dropping it does nothing.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = self.hole = num_pages
        self.num_idle = 0
        self.references = [0] * num_pages
        self._idle = [0] * num_pages
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

    def drop(self, page: int, *, idle: bool = False) -> None:
        """One holder less; `idle` where that was one that gives it up where room is needed."""
        if page == self.hole:
            return
        self._count(page, -1, idle)
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

    def digest(self, page: int) -> bytes | None:
        """By which a page is found, if it is."""
        return self._digest_of.get(page)

    def hold(self, page: int, *, idle: bool = False) -> None:
        """One holder more, who gives it up where room is needed if `idle`; a free page leaves the free list with what
        it contains."""
        if page == self.hole:
            return
        if self.references[page] == 0:
            del self._free[page]
        self._count(page, 1, idle)

    def forget(self, page: int) -> None:
        """Nobody finds this page by its contents any more."""
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]

    def is_idle(self, page: int) -> bool:
        """Whether only those hold it who give it up where room is needed."""
        return page != self.hole and 0 < self._idle[page] == self.references[page]

    def _count(self, page: int, change: int, idle: bool) -> None:
        self.num_idle -= self.is_idle(page)
        self.references[page] += change
        self._idle[page] += change if idle else 0
        self.num_idle += self.is_idle(page)
