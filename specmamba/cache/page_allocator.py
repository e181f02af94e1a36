"""Who holds which KV page: requests, which cannot do without it, and the prefix cache, which can."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int64]
NO_PAGES: Pages = np.empty(0, dtype=np.int64)


class PageAllocator:
    """Pages 1..num_pages; page 0 is padding and belongs to nobody.

    A page has holders: rows of the request table and nodes of the prefix cache. It is free when it has none. A holder
    may pin the page: rows always do, nodes while a request runs on them. What nobody pins can be had by eviction, so
    ``num_available`` pages are what an allocation could get at the most. Arrays of pages have no duplicates.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self.num_pinned = 0
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int64)  # the first num_free of them are free
        self._holders = np.zeros(num_pages + 1, dtype=np.int32)
        self._pins = np.zeros(num_pages + 1, dtype=np.int32)

    @property
    def num_available(self) -> int:
        """Free pages, and those that eviction could free."""
        return self.num_pages - self.num_pinned

    @property
    def num_evictable(self) -> int:
        """Pages that are held and not pinned."""
        return self.num_available - self.num_free

    def allocate(self, count: int) -> Pages | None:
        """``count`` free pages, held and pinned once; None (and nothing taken) when there are not so many."""
        if count > self.num_free:
            return None
        pages = self._stack[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self.num_pinned += count
        self._holders[pages] = 1
        self._pins[pages] = 1
        return pages

    def hold(self, pages: Pages, pinned: bool) -> None:
        """One more holder for pages that are held.

        Raises:
            RuntimeError: a page is free, or is none of this pool.
        """
        self._check_held(pages)
        self._holders[pages] += 1
        if pinned:
            self._pin(pages)

    def release(self, pages: Pages, pinned: bool) -> None:
        """One holder less, who had pinned the pages or not; pages without a holder are free again.

        Raises:
            RuntimeError: a page is free already, is there twice, is none of this pool, or was not pinned.
        """
        self._check_held(pages)
        if len(np.unique(pages)) < len(pages):
            raise RuntimeError("a KV page was freed twice in one call")
        if pinned:
            self._unpin(pages)
        self._holders[pages] -= 1
        freed = pages[self._holders[pages] == 0]
        if self._pins[freed].any():
            raise RuntimeError("a KV page lost its last holder while it was pinned")
        self._stack[self.num_free : self.num_free + len(freed)] = freed[::-1]
        self.num_free += len(freed)

    def pin(self, pages: Pages) -> None:
        """A holder of these pages pins them. Raises RuntimeError: a page is free, or is none of this pool."""
        self._check_held(pages)
        self._pin(pages)

    def unpin(self, pages: Pages) -> None:
        """The holder can do without them again. Raises RuntimeError: a page was not pinned."""
        self._check_held(pages)
        self._unpin(pages)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return int(self._holders[page])

    def pins(self, page: int) -> int:
        """How many pin a page."""
        return int(self._pins[page])

    def _pin(self, pages: Pages) -> None:
        self.num_pinned += int((self._pins[pages] == 0).sum())
        self._pins[pages] += 1

    def _unpin(self, pages: Pages) -> None:
        if (self._pins[pages] < 1).any():
            raise RuntimeError("a KV page was unpinned that nobody had pinned")
        self._pins[pages] -= 1
        self.num_pinned -= int((self._pins[pages] == 0).sum())

    def _check_held(self, pages: Pages) -> None:
        if len(pages) and (pages.min() < 1 or pages.max() > self.num_pages or (self._holders[pages] < 1).any()):
            raise RuntimeError("a KV page was freed twice or was never allocated")
