"""Everything that the pools and faster tiers hold, written to a tier that outlives the process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

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
        self._nodes, self._above = deque(nodes), above
        self._tier, self._writer = tier, writer
        self._given: set[bytes] | None = None  # entries that waited to be stored when the last one was given

    def go_on(self, wait_s: float = 0.0) -> bool:
        """Write a part; returns whether all is written.

        Args:
            wait_s: how long this waits for the tier to take more. 0: it gives what the tier takes at once, in a short
                time, and is to be called again.
        """
        began = time.monotonic()
        deadline = began + wait_s
        while self._nodes:
            node = self._nodes[0]
            is_attached = node.parent is not None
            if is_attached and not self._writer.write(node, self._tier, deadline):
                return False
            self._nodes.popleft()
            if not wait_s and time.monotonic() - began > MAX_PAUSE_S:
                return False
        for tier in self._above:
            for entry in tier.held():
                if not self._writer.copy([entry], self._tier, deadline):
                    return False
                if not wait_s and time.monotonic() - began > MAX_PAUSE_S:
                    return False
        waiting = self._tier.waiting()
        self._given = waiting if self._given is None else self._given & waiting
        return not self._given

    def stats(self) -> TierStats:
        """Return the figures of the tier."""
        return self._tier.stats()
