"""Everything that the pools and faster tiers hold, written to a tier that outlives the process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from specmamba.cache.prefix.node import Node
from specmamba.cache.tiers.tier import Tier
from specmamba.cache.tiers.tier_stats import TierStats
from specmamba.cache.tiers.tier_writer import TierWriter

MAX_PAUSE_S = 0.02  # that one call takes from the engine


class Saving:
    """What is to be saved, as it was when this began. What leaves the pools meanwhile is not saved for that."""

    def __init__(self, nodes: Sequence[Node], above: Sequence[Tier], tier: Tier, writer: TierWriter) -> None:
        """Note what there is.

        Args:
            nodes: with states, parents first.
            above: the tiers that are faster.
            tier: that it is written to.
            writer: of these tiers.
        """
        self._tier, self._writer = tier, writer
        self._above = deque(above)  # those whose entries are not among the jobs yet
        # each writes one state until a deadline; False: the tier has not taken it
        self._jobs: deque[Callable[[float], bool]] = deque(partial(self._write_node, node) for node in nodes)
        self._given: set[bytes] | None = None  # entries that waited to be stored when the last one was given

    def go_on(self, wait_s: float = 0.0) -> bool:
        """Write a part; returns whether all is written.

        Args:
            wait_s: how long this waits for the tier to take more. 0: it gives what the tier takes at once, in a short
                time, and is to be called again.
        """
        began = time.monotonic()
        deadline = began + wait_s
        while self._jobs or self._take_entries():
            if not self._jobs[0](deadline):
                return False
            self._jobs.popleft()
            if not wait_s and time.monotonic() - began > MAX_PAUSE_S:
                return False
        waiting = self._tier.waiting()
        self._given = waiting if self._given is None else self._given & waiting
        return not self._given

    def stats(self) -> TierStats:
        """Return the figures of the tier."""
        return self._tier.stats()

    def _take_entries(self) -> bool:
        """Add what the tiers above hold, once: after the nodes, so that what has left the pools meanwhile is in it."""
        while self._above and not self._jobs:
            tier = self._above.popleft()
            self._jobs.extend(partial(self._write_entry, tier, key) for key in tier.held())
        return bool(self._jobs)

    def _write_node(self, node: Node, deadline: float) -> bool:
        is_attached = node.parent is not None
        return not is_attached or self._writer.write(node, self._tier, deadline)

    def _write_entry(self, tier: Tier, key: bytes, deadline: float) -> bool:
        entry = tier.get(key)  # None: it has left the tier
        return entry is None or self._writer.copy([entry], self._tier, deadline)
