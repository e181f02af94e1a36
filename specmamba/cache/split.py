"""One budget of memory for KV pages and recurrent states, divided by a line that moves while requests run.

Both pools have addresses for their largest size from the start. On a CPU the operating system gives memory to what has
been written, on a GPU the driver maps chunks of memory up to the end of each layer. A pool that shrinks gives back the
memory behind its new end, and the other one may take as much. So no tensor, no stride and no address of a captured step
ever changes, and layers stay as dense as in pools of fixed sizes. What stands behind the new end of a pool is copied to
lower pages or slots first, and all who know it by number are told. A pool has memory before its new pages or slots can
be allocated, and gives it back after they are gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specmamba.cache.kv_pool import KVPool, Pages
from specmamba.cache.memory.elastic import SplitBounds
from specmamba.cache.state_pool import StateOwnershipError, StatePool

# Free pages are worth a move from so many on: below, the oldest state is evicted for a slot. Otherwise the line goes to
# and fro between requests: in the two loads of docs/prefix_cache.md that were 135 and 451 moves in place of 54 and 272,
# for the same hits within 0.2 %.
SLACK_STATES = 4
SLACK_SHARE = 0.1  # of both pools: the most, where these are small


class Follower(Protocol):
    """It knows pages and slots by number."""

    def pages_moved(self, now: Pages) -> None:
        """Pages have moved; ``now`` [pages + 1]: by page, what it is now."""

    def state_moved(self, slot: int, now: int) -> bool:
        """A state has moved to another slot; returns whether this follower owns it."""
        ...


@dataclass(frozen=True, slots=True)
class SplitStats:
    """What the line between the pools has done since the start."""

    num_moves: int  # times that one pool gave memory to the other
    moved_tokens: int  # places of KV that were copied for it, those of running requests included
    moved_states: int


class Split:
    """The line between the pools. Only free pages and slots go from one to the other; eviction is the cache's part."""

    def __init__(self, kv: KVPool, states: StatePool, bounds: SplitBounds) -> None:
        self.bounds = bounds
        self.followers: list[Follower] = []
        self._kv, self._states = kv, states
        self._start = kv.allocator.num_pages, states.num_slots
        self._num_moves = self._moved_pages = self._moved_states = 0
        self._slack_bytes = min(SLACK_STATES * bounds.slot_bytes, int(SLACK_SHARE * bounds.pool_bytes))
        kv.fit()
        states.fit()

    @property
    def stats(self) -> SplitStats:
        """What happened since the start."""
        return SplitStats(self._num_moves, self._moved_pages * self._kv.page_size, self._moved_states)

    @property
    def num_slots_at_start(self) -> int:
        """State slots that there were at the start."""
        return self._start[1]

    @property
    def spare_bytes(self) -> int:
        """Bytes that neither pool has."""
        bounds = self.bounds
        of_both = self._kv.allocator.num_pages * bounds.page_bytes + self._states.num_slots * bounds.slot_bytes
        return bounds.pool_bytes - of_both

    def most_slots(self, num_pages: int) -> int:
        """Slots that there can be beside so many pages."""
        bounds = self.bounds
        return min(bounds.most_state_slots, (bounds.pool_bytes - num_pages * bounds.page_bytes) // bounds.slot_bytes)

    def most_pages(self, num_slots: int) -> int:
        """Pages that there can be beside so many slots."""
        bounds = self.bounds
        return min(bounds.most_pages, (bounds.pool_bytes - num_slots * bounds.slot_bytes) // bounds.page_bytes)

    def spares(self, num_pages: int) -> bool:
        """Whether so many free pages are too few to move the line for: a state may be evicted instead.

        Not where memory that neither pool has is enough for a slot: no page goes for that.
        """
        is_little = 0 <= num_pages * self.bounds.page_bytes < self._slack_bytes
        return is_little and self.spare_bytes < self.bounds.slot_bytes

    def affordable_slots(self, num_kept: int) -> int:
        """Slots that spare bytes and free pages would make, ``num_kept`` pages beside them."""
        num_free = max(0, self._kv.allocator.num_free - num_kept)
        return (self.spare_bytes + num_free * self.bounds.page_bytes) // self.bounds.slot_bytes

    def gain_slots(self, num_missing: int, num_kept: int) -> bool:
        """Add state slots, in place of free pages if need be: as many as are missing, or as there is memory for.

        Args:
            num_missing: slots.
            num_kept: pages that must stay free.

        Returns:
            False, with no change: there is memory for none.
        """
        bounds, states = self.bounds, self._states
        count = min(num_missing, bounds.most_state_slots - states.num_slots, self.affordable_slots(num_kept))
        if count < 1:
            return False
        num_pages = -(-(count * bounds.slot_bytes - self.spare_bytes) // bounds.page_bytes)
        if num_pages > 0:
            self._drop_pages(num_pages)
        states.extend(count)
        states.fit()
        return True

    def gain_pages(self, num_missing: int, num_kept: int) -> bool:
        """Add pages, in place of free state slots if need be: as many as are missing, or as there is memory for.

        What a slot leaves over becomes pages too.

        Args:
            num_missing: pages.
            num_kept: slots that must stay free.

        Returns:
            False, with no change: there is none.
        """
        bounds, allocator = self.bounds, self._kv.allocator
        room = bounds.most_pages - allocator.num_pages
        lacking = min(num_missing, room) * bounds.page_bytes - self.spare_bytes
        num_slots = min(-(-lacking // bounds.slot_bytes), self._states.num_free - num_kept)
        if not room or self.spare_bytes + max(0, num_slots) * bounds.slot_bytes < bounds.page_bytes:
            return False
        if num_slots > 0:
            self._drop_slots(num_slots)
        wanted = max(num_missing, bounds.slot_bytes // bounds.page_bytes)
        allocator.extend(min(room, wanted, self.spare_bytes // bounds.page_bytes))
        self._kv.fit()
        return True

    def restore(self) -> None:
        """Go back to the sizes of the start, and forget all figures. Both pools must be unused."""
        num_pages, num_slots = self._start
        allocator, states = self._kv.allocator, self._states
        allocator.shrink(max(0, allocator.num_pages - num_pages))
        states.shrink(max(0, states.num_slots - num_slots))
        self._kv.fit()  # what one gives back, the other needs below
        states.fit()
        allocator.extend(num_pages - allocator.num_pages)
        states.extend(num_slots - states.num_slots)
        self._kv.fit()
        states.fit()
        self._num_moves = self._moved_pages = self._moved_states = 0

    def _drop_pages(self, count: int) -> None:
        source, target = self._kv.allocator.shrink(count)
        if len(source):
            self._kv.move_pages(source, target)
            now = np.arange(self.bounds.most_pages + 1)
            now[source] = target
            for follower in self.followers:
                follower.pages_moved(now)
        self._kv.fit()
        self._num_moves += 1
        self._moved_pages += len(source)

    def _drop_slots(self, count: int) -> None:
        moved = self._states.shrink(count)
        for slot, now in moved:
            if not any(follower.state_moved(slot, now) for follower in self.followers):
                raise StateOwnershipError(f"state slot {slot} has moved to {now}, and its owner is not known")
        self._states.fit()
        self._num_moves += 1
        self._moved_states += len(moved)
