"""What a tier is: a place below the pools that holds entries, is asked where a match ends, and gives them back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, Protocol

from specmamba.cache.tiers.entry import Buffers, Entry
from specmamba.cache.tiers.entry_index import Change, Stored
from specmamba.cache.tiers.prefix_hash import PrefixHasher
from specmamba.cache.tiers.tier_stats import TierMiss, TierStats

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
TierName = Literal["host", "disk", "store", "remote"]
MAX_LOAD_S = 10.0  # a request does not wait longer for a tier


class Load:
    """A chain of entries on its way from a tier. Made by ``Tier.load``; other threads may ask for its result."""

    def __init__(self, chain: Sequence[Stored], timeout_s: float | None = None) -> None:
        """``timeout_s``: how long its request waits at the most; None: ``MAX_LOAD_S``."""
        self._timeout_s = timeout_s
        self.chain = tuple(chain)
        self.nbytes = sum(entry.token_bytes for entry in chain) + chain[-1].state_bytes  # in memory
        self.began = time.monotonic()
        self.is_over = False  # its request has taken it, or wants it no more
        self._result: tuple[Entry, ...] | TierMiss | None = None

    @property
    def result(self) -> tuple[Entry, ...] | TierMiss | None:
        """The entries; why there are none; None: it is not known yet. All entries but the last may lack a state."""
        most = MAX_LOAD_S if self._timeout_s is None else self._timeout_s
        is_late = self._result is None and time.monotonic() - self.began > most
        return "slow" if is_late else self._result

    def end(self, result: tuple[Entry, ...] | TierMiss) -> None:
        """Set the result."""
        self._result = result


class Look:
    """A question to a tier what it has of a text, where that takes time. Made by ``Tier.look``."""

    def __init__(self) -> None:
        self._began, self._is_answered = time.monotonic(), False

    @property
    def is_over(self) -> bool:
        """Whether ``Tier.find`` knows the answer now, or none is waited for any more."""
        return self._is_answered or time.monotonic() - self._began > MAX_LOAD_S

    def end(self) -> None:
        """Note that the answer is there."""
        self._is_answered = True


class Tier(Protocol):
    """Entries of one layout, outside of the pools.

    All calls but ``learn`` come from the engine's thread, and of these only ``wait_to_put``, ``drain`` and ``close``
    wait. ``PrefixTiers`` has a
    list of tiers, the fastest first. What goes wrong in a tier is counted by it, and is a miss or a write that is lost.
    Hashes of one text are the same for all tiers of an engine.
    """

    @property
    def name(self) -> TierName: ...

    @property
    def outlives(self) -> bool:
        """Whether its entries outlive the process."""
        ...

    @property
    def policy(self) -> WritePolicy | None:
        """When states are written to it; None: never, its entries come in another way."""
        ...

    def look(self, text: PrefixHasher) -> Look | None:
        """Begin to ask what there is of a text, which ``find`` knows when that is over; None: it knows already.

        ``text`` is the tier's from then on.
        """
        ...

    def find(self, text: PrefixHasher) -> list[Stored]:
        """Return the entries that together hold the longest beginning of a text, the first segment first."""
        ...

    def has(self, key: bytes) -> bool:
        """Whether there is an entry of this key."""
        ...

    def held(self) -> list[bytes]:
        """Return the keys of the entries that this process alone holds, parents first."""
        ...

    def get(self, key: bytes) -> Entry | None:
        """Return an entry that this process alone holds, valid until the next call; None: there is none."""
        ...

    def forget(self) -> None:
        """Drop the entries that this process alone holds."""
        ...

    def changes(self, most: int) -> list[Change]:
        """Return up to ``most`` entries that have come or gone since the last calls; at first, those that there are."""
        ...

    def learn(self, keys: Sequence[bytes], timeout_s: float) -> None:
        """Look for entries that another process is said to have written. May be called from any thread, and waits."""
        ...

    def why_absent(self, text: PrefixHasher) -> TierMiss | None:
        """Return why ``find`` finds nothing; None: nothing was expected, so that it is no miss."""
        ...

    def note_use(self, chain: Sequence[Stored]) -> None:
        """Note that entries are in use, though in the pools, so that they are not removed for what is used less."""
        ...

    def load(self, chain: Sequence[Stored], known: int = 0) -> Load | None:
        """Begin to bring a chain; None: only when another load has been released.

        ``known``: tokens that the pools have already, so that their KV may be left out.
        """
        ...

    def release(self, load: Load) -> None:
        """End the use of a load, and of the memory of its entries."""
        ...

    def allocate(self, num_tokens: int, parent: bytes) -> Buffers | None:
        """Return memory for an entry that ``put`` is called with next; None, counted: it cannot be written now.

        Args:
            num_tokens: of its segment.
            parent: of the entry; it is not removed to make room.
        """
        ...

    def put(self, entry: Entry) -> None:
        """Store an entry, which is found from now on. Its arrays are those of ``allocate``."""
        ...

    def wait_to_put(self, num_tokens: int, timeout_s: float) -> bool:
        """Wait until an entry is taken, for a time that may be 0; returns whether it is."""
        ...

    def waiting(self) -> set[bytes]:
        """Return the keys of entries that were put and are not stored yet."""
        ...

    def count_hit(self, load: Load, num_tokens: int) -> None:
        """Count a chain that is in the pools now, ``num_tokens`` of which were not before."""
        ...

    def count_miss(self, reason: TierMiss) -> None:
        """Count a request that got nothing."""
        ...

    def stats(self) -> TierStats:
        """Return sizes now and counts since the start."""
        ...

    def describe_line(self) -> str:
        """Return a line for the report at start."""
        ...

    def drain(self) -> bool:
        """Wait until all that was put is stored; returns whether it is."""
        ...

    def close(self) -> None:
        """Store what was put, and end threads."""
        ...
