"""What is counted of handoffs, on either side."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from specmamba.cache.tiers.tier_stats import REMOTE_MISSES, TierMiss


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """Counts of handoffs since the start, and what is open now."""

    num_handoffs: int  # prompts that were sent, or were taken over
    num_bytes: int  # of KV and states in them
    seconds: float  # of all: from the first question to the end of the transfer, or to the prompt in the pools
    failures: dict[TierMiss, int]  # handoffs that came to nothing, by reason
    num_open: int  # prompts that are held for a decode server, or are being asked for


class HandoffCounts:
    """Counts that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_handoffs = self._num_bytes = 0
        self._seconds = 0.0
        self._failures: Counter[TierMiss] = Counter()

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a prompt that has arrived, or was sent."""
        with self._lock:
            self._num_handoffs += 1
            self._num_bytes += nbytes
            self._seconds += seconds

    def fail(self, reason: TierMiss) -> None:
        """Count one that has not."""
        with self._lock:
            self._failures[reason] += 1

    def stats(self, num_open: int) -> HandoffStats:
        """Return the counts."""
        with self._lock:
            failures = {reason: self._failures[reason] for reason in REMOTE_MISSES}
            return HandoffStats(self._num_handoffs, self._num_bytes, self._seconds, failures, num_open)
