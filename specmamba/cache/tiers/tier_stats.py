"""What is counted of the prefixes in a tier: host memory, a folder on disk, a store of several machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

LocalMiss = Literal["absent", "damaged", "format", "fingerprint", "vanished", "unreadable", "slow", "no_room"]
TierMiss = LocalMiss | Literal["unreachable", "refused", "cut", "expired"]  # of other servers alone
TIER_MISSES: tuple[TierMiss, ...] = get_args(LocalMiss)
STORE_MISSES: tuple[TierMiss, ...] = (
    "absent",
    "damaged",
    "format",
    "vanished",
    "unreadable",
    "slow",
    "no_room",
    "unreachable",
)
REMOTE_MISSES: tuple[TierMiss, ...] = (*TIER_MISSES, "unreachable", "refused", "cut", "expired")
LocalLoss = Literal["busy", "too_large", "disk_full", "failed"]
LostWrite = LocalLoss | Literal["store_full", "unreachable"]
LOST_WRITES: tuple[LostWrite, ...] = get_args(LocalLoss)
STORE_LOST_WRITES: tuple[LostWrite, ...] = ("busy", "too_large", "store_full", "unreachable", "failed")


@dataclass(frozen=True, slots=True)
class TierStats:
    """Sizes of a tier now, entries of other models in a folder included, and counts since the start."""

    num_entries: int
    num_bytes: int
    max_bytes: int
    bytes_in_flight: int
    hits: int  # requests that got a prefix from the tier
    hit_tokens: int
    misses: dict[TierMiss, int]  # requests for which the tier had nothing more than memory, or could not give it
    load_seconds: float  # from a request's question to its prefix in the pools, of all hits
    loaded_bytes: int
    writes: int
    written_bytes: int
    lost_writes: dict[LostWrite, int]
    evictions: int  # in a store: entries that it was found to have no more
    damaged: int  # entries that were found damaged, and removed


@dataclass(slots=True)
class TierCounts:
    """Counts since the start; ``stats`` adds the sizes."""

    hits: int = 0
    hit_tokens: int = 0
    misses: Counter[TierMiss] = field(default_factory=Counter)
    load_seconds: float = 0.0
    loaded_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    lost_writes: Counter[LostWrite] = field(default_factory=Counter)
    evictions: int = 0
    damaged: int = 0

    def hit(self, num_tokens: int, nbytes: int, seconds: float) -> None:
        """Count a request that got ``num_tokens`` more than the pools had."""
        self.hits += 1
        self.hit_tokens += num_tokens
        self.loaded_bytes += nbytes
        self.load_seconds += seconds

    def stats(
        self,
        num_entries: int,
        num_bytes: int,
        max_bytes: int,
        bytes_in_flight: int,
        misses: Sequence[TierMiss] = TIER_MISSES,
        lost_writes: Sequence[LostWrite] = LOST_WRITES,
    ) -> TierStats:
        """Return these counts with the sizes now; ``misses``, ``lost_writes``: the reasons that the tier may have."""
        return TierStats(
            num_entries=num_entries,
            num_bytes=num_bytes,
            max_bytes=max_bytes,
            bytes_in_flight=bytes_in_flight,
            hits=self.hits,
            hit_tokens=self.hit_tokens,
            misses={reason: self.misses[reason] for reason in misses},
            load_seconds=self.load_seconds,
            loaded_bytes=self.loaded_bytes,
            writes=self.writes,
            written_bytes=self.written_bytes,
            lost_writes={reason: self.lost_writes[reason] for reason in lost_writes},
            evictions=self.evictions,
            damaged=self.damaged,
        )
