"""What tiers share that are read and written by threads: loads under way, entries that wait to be written, counts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from specmamba.cache.tiers.codec import encoded_bytes
from specmamba.cache.tiers.entry import Buffers, Entry, EntryLayout
from specmamba.cache.tiers.entry_index import Change, EntryIndex, Stored
from specmamba.cache.tiers.mover import Mover
from specmamba.cache.tiers.prefix_hash import PrefixHasher
from specmamba.cache.tiers.tier import MAX_LOAD_S, Load, Look, TierName, WritePolicy
from specmamba.cache.tiers.tier_stats import LostWrite, TierCounts, TierMiss

logger = logging.getLogger("specmamba")

MAX_BYTES_IN_FLIGHT = 512 << 20  # in each direction; a single prefix may be larger
TOUCH_INTERVAL_NS = 60 * 10**9  # between two notes on an entry that it is used
CLOSE_S = 30.0  # for what is still to be written


class ThreadedTier:
    """The entries of one layout in a place that other processes may use too. ``Tier`` has the contract.

    The engine's thread asks and gives; two threads read and write. Subclasses have the place: they find entries, read
    chains and write entries.
    """

    outlives = True

    def __init__(self, name: TierName, layout: EntryLayout, max_bytes: int, policy: WritePolicy) -> None:
        """Know of no entry yet.

        Args:
            name: of the tier and its threads.
            layout: of this engine's entries.
            max_bytes: of the place.
            policy: as ``Tier`` has it.
        """
        self.name, self.layout, self.policy = name, layout, policy
        self._max_bytes = max_bytes
        self._index = EntryIndex()
        # guards the index, which other threads change too, the counts and what is being written
        self._lock = threading.Lock()
        self._counts = TierCounts()
        self._coming: dict[bytes, Entry] = {}  # entries that wait to be written, by key
        self._reader = Mover(f"specmamba-{name}-reader", 2 * MAX_BYTES_IN_FLIGHT)
        self._writer = Mover(f"specmamba-{name}-writer", MAX_BYTES_IN_FLIGHT)
        self._loading = 0  # bytes of loads that are not released

    def look(self, text: PrefixHasher) -> Look | None:
        """Return None: ``find`` knows what there is."""
        return None

    def has(self, key: bytes) -> bool:
        """Whether there is an entry of this layout with this key."""
        with self._lock:
            return self._index.get((self.layout.fingerprint, key)) is not None

    def held(self) -> list[bytes]:
        """Return nothing: entries are for all processes."""
        return []

    def get(self, key: bytes) -> Entry | None:
        """Return None: entries are for all processes."""
        return None

    def forget(self) -> None:
        """Do nothing: entries are for all processes."""

    def changes(self, most: int) -> list[Change]:
        """Return up to ``most`` entries of this layout that have come or gone since the last calls."""
        own: list[Change] = []
        with self._lock:
            while not own and (changes := self._index.changes(most)):
                own = [change for change in changes if change[0][0] == self.layout.fingerprint]
        return own

    def learn(self, keys: Sequence[bytes], timeout_s: float) -> None:
        """Look for entries that are not known."""
        unknown = [key for key in keys if not self.has(key)]
        has_ended = threading.Event()

        def read() -> None:
            for key in unknown:
                self._look_for(key)
            has_ended.set()

        if unknown and not self.hangs and self._reader.put(read, 0):
            has_ended.wait(timeout_s)

    def note_use(self, chain: Sequence[Stored]) -> None:
        """Note that entries are in use, though in memory, so that they are not removed for what is used less."""
        if self.hangs:  # notes would pile up
            return
        now = time.time_ns()
        old = [entry for entry in chain if now - entry.used > TOUCH_INTERVAL_NS]
        for entry in old:
            entry.used = now
        if old:
            self._reader.put(lambda: self._touch(old), 0)

    def load(self, chain: Sequence[Stored], known: int = 0) -> Load | None:
        """Begin to read a chain; of all entries but the last, KV alone is read. None: loads hold too much memory."""
        load = Load(chain)
        if self._loading and self._loading + load.nbytes > MAX_BYTES_IN_FLIGHT and not self.hangs:
            return None
        self._loading += load.nbytes
        if self.hangs or not self._reader.put(lambda: load.end(self._read(load)), load.nbytes):
            load.end("slow")
        return load

    def release(self, load: Load) -> None:
        """Count a load's memory no more, and do not read it if it was not read yet."""
        load.is_over = True
        self._loading -= load.nbytes

    @property
    def hangs(self) -> bool:
        """Whether the place does not answer, so that no request should wait for it."""
        since = self._reader.began
        return since is not None and time.monotonic() - since > MAX_LOAD_S

    def allocate(self, num_tokens: int, parent: bytes) -> Buffers | None:
        """Return memory for an entry; None, counted as a lost write: it is too large, or too much waits already."""
        nbytes = self.layout.entry_bytes(num_tokens)
        lost: LostWrite | None = "too_large" if self._is_too_large(num_tokens) else None
        if lost is None and not self._writer.has_room(nbytes):
            lost = "busy"
        if lost is not None:
            self._lose(lost)
            return None
        return self.layout.new_buffers(num_tokens)

    def _is_too_large(self, num_tokens: int) -> bool:
        return self.layout.entry_bytes(num_tokens) > self._max_bytes

    def wait_to_put(self, num_tokens: int, timeout_s: float) -> bool:
        """Wait until an entry of this size is taken; returns whether it is."""
        return self._writer.wait(self.layout.entry_bytes(num_tokens), timeout_s)

    def waiting(self) -> set[bytes]:
        """Return the keys of entries that are not written yet."""
        with self._lock:
            return set(self._coming)

    def put(self, entry: Entry) -> None:
        """Write an entry, soon. It is found from now on."""
        nbytes = encoded_bytes(entry)
        sizes = sum(part.nbytes for part in entry.tokens), sum(part.nbytes for part in entry.state or ())
        stored = Stored(
            self.layout.fingerprint, entry.key, entry.parent, entry.start, entry.end, *sizes, nbytes, time.time_ns()
        )
        with self._lock:
            self._index.add(stored)
            self._coming[entry.key] = entry
        if not self._writer.put(lambda: self._write(entry, stored), entry.nbytes):
            self._forget(stored)
            self._lose("busy")

    def count_hit(self, load: Load, num_tokens: int) -> None:
        """Count a chain that is in the pools now, ``num_tokens`` of which were not before."""
        with self._lock:
            self._counts.hit(num_tokens, load.nbytes, time.monotonic() - load.began)

    def count_miss(self, reason: TierMiss) -> None:
        """Count a request that got nothing."""
        with self._lock:
            self._counts.misses[reason] += 1

    def drain(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until all that was put is written; returns whether it was."""
        return self._writer.drain(timeout_s)

    # ---- on other threads --------------------------------------------------------------------------------------------

    def _read_chain(self, load: Load) -> tuple[Entry, ...] | TierMiss:
        """Read the entries of a chain, on the reader's thread; of all but the last the state may be left out."""
        raise NotImplementedError

    def _look_for(self, key: bytes) -> None:
        """Add an entry to the index if the place has it, on the reader's thread."""
        raise NotImplementedError

    def _touch(self, chain: Sequence[Stored]) -> None:
        """Note in the place that entries are used, on the reader's thread."""
        raise NotImplementedError

    def _write(self, entry: Entry, stored: Stored) -> None:
        """Write an entry, on the writer's thread, and count it."""
        raise NotImplementedError

    def _read(self, load: Load) -> tuple[Entry, ...] | TierMiss:
        if load.is_over:
            return "slow"
        try:
            return self._read_chain(load)
        except Exception:  # its request must not wait
            logger.exception("an entry of the prefix cache cannot be read")
            return "unreadable"

    def _forget(self, stored: Stored) -> None:
        with self._lock:
            if self._index.get(stored.name) is stored:
                self._index.remove(stored.name)
                self._coming.pop(stored.key, None)

    def _give_up(self, entry: Entry, stored: Stored, reason: LostWrite) -> None:
        """Count an entry that could not be written, and free its memory, whatever the index has of its key now."""
        self._forget(stored)
        with self._lock:
            self._came(entry)
        self._lose(reason)

    def _came(self, entry: Entry) -> None:
        """Let an entry wait no more, under the lock; another one of its key may wait since."""
        if self._coming.get(entry.key) is entry:
            del self._coming[entry.key]

    def _lose(self, reason: LostWrite) -> None:
        with self._lock:
            self._counts.lost_writes[reason] += 1
