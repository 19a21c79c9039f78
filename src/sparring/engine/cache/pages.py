"""Pool of a cache's pages: references to them, and lookup by their contents. Torch-free: pages are numbers."""

from __future__ import annotations

from collections import OrderedDict


class PagePool:
    """Reference counts, free pages (the page freed longest ago is allocated first) and content digests of pages.

    References are either live (of a running request) or idle (of a parked conversation, or to a shared page). Pages
    with only idle references may be evicted when pages run out.

    Attributes:
        num_idle: number of pages that have only idle references.
        hole: number that stands for a page that was freed early; holding or dropping this number does nothing.
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
        """Number of pages without a reference."""
        return len(self._free)

    def take(self) -> int:
        """Take a free page with one live reference. Raises KeyError if none is free: see `num_free`."""
        page, _ = self._free.popitem(last=False)
        self.forget(page)
        self.references[page] = 1
        return page

    def drop(self, page: int, *, idle: bool = False) -> None:
        """Remove a live or an `idle` reference. A page without references is free, and can be found by its contents
        until its next allocation."""
        if page == self.hole:
            return
        self._count(page, -1, idle)
        if self.references[page] == 0:
            self._free[page] = None

    def publish(self, page: int, digest: bytes) -> None:
        """Register a full page under its digest. If the page or the digest is registered already, do nothing."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def find(self, digest: bytes) -> int | None:
        """Return the page with a digest, whether held or free; None if no page has this digest."""
        return self._page_of.get(digest)

    def digest(self, page: int) -> bytes | None:
        """Return the digest under which a page is registered; None for a page that is not registered."""
        return self._digest_of.get(page)

    def hold(self, page: int, *, idle: bool = False) -> None:
        """Add a live or an `idle` reference to a page. Holding a free page keeps its contents."""
        if page == self.hole:
            return
        if self.references[page] == 0:
            del self._free[page]
        self._count(page, 1, idle)

    def forget(self, page: int) -> None:
        """Unregister a page, so that it is no longer found by its contents."""
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]

    def renew(self) -> None:
        """Unregister all free pages, whose contents became useless, and allocate free pages in the order of their
        numbers from now on. So pages that were written before are used again before any other page occupies memory."""
        for page in self._free:
            self.forget(page)
        self._free = OrderedDict.fromkeys(sorted(self._free))

    def is_idle(self, page: int) -> bool:
        """Return True if all references to a page are idle, so that it can be evicted."""
        return page != self.hole and 0 < self._idle[page] == self.references[page]

    def _count(self, page: int, change: int, idle: bool) -> None:
        self.num_idle -= self.is_idle(page)
        self.references[page] += change
        self._idle[page] += change if idle else 0
        self.num_idle += self.is_idle(page)
