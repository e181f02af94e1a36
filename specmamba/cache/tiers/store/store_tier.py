"""Entries in a Mooncake Store: memory of several machines, in which each engine finds what the others have stored."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from specmamba.cache.tiers.codec import EntryError, Header
from specmamba.cache.tiers.entry import Buffers, Entry, EntryLayout
from specmamba.cache.tiers.entry_index import Stored
from specmamba.cache.tiers.mover import Mover
from specmamba.cache.tiers.prefix_hash import GRID_TOKENS, HEAD_TOKENS, PrefixHasher
from specmamba.cache.tiers.store.entry_objects import EntryGoneError, EntryObjects
from specmamba.cache.tiers.store.object_store import ObjectStore, StoreError
from specmamba.cache.tiers.threaded_tier import CLOSE_S, ThreadedTier
from specmamba.cache.tiers.tier import MAX_LOAD_S, Load, Look, WritePolicy
from specmamba.cache.tiers.tier_stats import STORE_LOST_WRITES, STORE_MISSES, LostWrite, TierMiss, TierStats
from specmamba.cache.tiers.tier_writer import MIN_GAIN

logger = logging.getLogger("specmamba")

MAX_KNOWN = 1 << 16  # entries that are remembered; others are asked for again
MAX_MARKS = 16  # steps of the grid, from the end of a text on, in which entries are looked for
END_S = 1.0  # for a call of the store that is under way when it is left
RETRY_S = 5.0  # in which a store that was not reached is left alone


class StoreTier(ThreadedTier):
    """The entries of one layout in a store that other engines use too.

    A store cannot be searched, and asking it takes time, so that this has an index of the entries that were written
    here or looked up. A look asks for the marks on the text's grid, then for the headers behind the last of them, then
    for what those continue. Whatever is wrong with the store is counted, and is a miss or a write that is lost.
    """

    def __init__(
        self,
        store: ObjectStore,
        layout: EntryLayout,
        signing_key: bytes,
        max_tokens: int,
        policy: WritePolicy = "write_through",
        place: str = "a store",
        lent_bytes: int = 0,
    ) -> None:
        """Know of no entry yet.

        Args:
            store: that was joined; closed with the tier.
            layout: of this engine's entries.
            signing_key: of the servers that share entries.
            max_tokens: of a segment that is read.
            policy: as ``Tier`` has it.
            place: the store's address, for the report at start.
            lent_bytes: of the store that are this process's memory.
        """
        super().__init__("store", layout, store.max_bytes, policy)
        self._objects, self._max_tokens = EntryObjects(store, layout, signing_key), max_tokens
        self._place, self._lent_bytes = place, lent_bytes
        self._looker = Mover("specmamba-store-looker", 1)  # looks hold no memory, and must not wait for loads
        self._retry_at = 0.0  # of ``time.monotonic()``: until then the store counts as gone
        self._looks_since: float | None = None  # when the looker's thread began with its newest look
        self._names: dict[bytes, list[str]] = {}  # the objects of the entries in the index, by key

    @property
    def is_away(self) -> bool:
        """Whether the store was not reached a short time ago, or does not answer."""
        now = time.monotonic()
        since = self._looks_since
        return now < self._retry_at or self.hangs or (since is not None and now - since > MAX_LOAD_S)

    def look(self, text: PrefixHasher) -> Look | None:
        """As ``Tier.look``; None where the store is away, or the index has nearly all of the text."""
        chain = self.find(text)
        if self.is_away or text.num_tokens - (chain[-1].end if chain else 0) < MIN_GAIN:
            return None
        look = Look()
        return look if self._looker.put(lambda: self._answer(look, text), 0) else None

    def find(self, text: PrefixHasher) -> list[Stored]:
        """Return the entries of the index that hold the longest beginning of a text."""
        with self._lock:
            return self._index.find(self.layout.fingerprint, text)

    def why_absent(self, text: PrefixHasher) -> TierMiss:
        """Return why ``find`` finds nothing: "unreachable" if the store was not asked."""
        return "unreachable" if self.is_away else "absent"

    def allocate(self, num_tokens: int, parent: bytes) -> Buffers | None:
        """As ``ThreadedTier.allocate``; nothing is copied for a store that is away."""
        if self.is_away:
            self._lose("unreachable")
            return None
        return super().allocate(num_tokens, parent)

    def _is_too_large(self, num_tokens: int) -> bool:
        return max(num_tokens * self.layout.token_bytes, self.layout.state_bytes) > self._max_bytes

    def stats(self) -> TierStats:
        """Return what is known of the store, what this process lends to it, and counts since the start."""
        in_flight = self._reader.num_bytes + self._writer.num_bytes
        with self._lock:
            sizes = len(self._index), self._index.num_bytes, self._lent_bytes, in_flight
            return self._counts.stats(*sizes, misses=STORE_MISSES, lost_writes=STORE_LOST_WRITES)

    def describe_line(self) -> str:
        """Return a line for the report at start."""
        lent = f", to which this process lends {self._lent_bytes / (1 << 30):.2f} GiB" if self._lent_bytes else ""
        return f"prefixes in {self._place}{lent}, {self.policy}"

    def close(self) -> None:
        """Write what was put, end the threads and leave the store; one that does not answer is left alone."""
        has_ended = self._writer.close(CLOSE_S)
        if not has_ended:
            logger.warning("--hicache-storage-backend: the store does not answer, and lacks the newest prefixes")
        for mover in (self._looker, self._reader):
            has_ended &= mover.close(END_S)
        if has_ended and not self.is_away:  # its functions must not run meanwhile
            self._objects.store.close()

    # ---- on the looker's thread --------------------------------------------------------------------------------------

    def _answer(self, look: Look, text: PrefixHasher) -> None:
        try:
            if not look.is_over and not self.is_away:
                self._looks_since = time.monotonic()
                self._look_up(text)
        except StoreError as error:
            self._note(error)
        finally:
            self._looks_since = None
            look.end()

    def _look_up(self, text: PrefixHasher) -> None:
        """Add the entries that hold the longest beginning of a text to the index."""
        text.restart()
        grid = [(start, text.digest(start)) for start in range(0, text.num_tokens + 1, GRID_TOKENS)]
        marked = self._objects.store.have([self._objects.mark_name(digest) for _, digest in grid])
        starts = [start for (start, _), is_marked in zip(grid, marked, strict=True) if is_marked]
        for start in starts[: -MAX_MARKS - 1 : -1]:
            if self._look_behind(text, start):
                return

    def _look_behind(self, text: PrefixHasher, start: int) -> bool:
        """Look for entries that end less than a step behind ``start``; returns whether one is complete."""
        text.restart()
        ends = range(max(start, HEAD_TOKENS + 1), min(start + GRID_TOKENS - 1, text.num_tokens) + 1)
        keys = [text.digest(end) for end in ends]
        found = self._objects.store.have([self._objects.header_name(key) for key in keys])
        there = [key for key, is_there in zip(keys, found, strict=True) if is_there]
        return any(self._learn(key) for key in reversed(there))

    def _learn(self, key: bytes) -> bool:
        """Add an entry and those that it continues to the index; False: one is not there, or cannot be used."""
        headers: list[Header] = []
        end: int | None = None  # of the next one; None: any
        while end != 0:
            with self._lock:
                known: Stored | Header | None = self._index.get((self.layout.fingerprint, key))
            if known is None:
                if (known := self._header(key)) is None:
                    return False
                headers.append(known)
            if end is not None and known.end != end:
                return False
            key, end = known.parent, known.start
        for header in reversed(headers):
            self._add(header)
        return True

    def _header(self, key: bytes) -> Header | None:
        """Read a header; None: there is none, or none that can be used."""
        try:
            signed = self._objects.read_header(key)
        except EntryError as error:
            self._drop(key, None, error)
            return None
        return None if signed is None else signed.header

    def _add(self, header: Header) -> None:
        """Add an entry, as the store has it, to the index, in which what was used longest ago makes room."""
        stored = Stored.of(header, header.nbytes, time.time_ns())
        with self._lock:
            known = self._index.get(stored.name)
            if known is None or (known.parent, known.start) != (stored.parent, stored.start):
                self._index.add(stored)
            self._names[header.key] = self._objects.part_names(header)
            spared = {(self.layout.fingerprint, key) for key in self._coming}
            while len(self._index) > MAX_KNOWN and (oldest := self._index.oldest(spared)) is not None:
                self._index.remove(oldest.name)
                self._names.pop(oldest.key, None)

    # ---- on the reader's thread --------------------------------------------------------------------------------------

    def _read_chain(self, load: Load) -> tuple[Entry, ...] | TierMiss:
        entries: list[Entry] = []
        if time.monotonic() < self._retry_at:
            return "unreachable"
        for stored in load.chain:
            try:
                entries.append(self._read_one(stored, with_state=stored is load.chain[-1]))
            except EntryGoneError:
                self._miss(stored)
                return "vanished"
            except EntryError as error:
                return error.fault
            except StoreError as error:
                self._note(error)
                return "unreachable" if error.fault == "unreachable" else "unreadable"
        self._touch(load.chain)
        return tuple(entries)

    def _look_for(self, key: bytes) -> None:
        try:
            if not self.is_away:
                self._learn(key)
        except StoreError as error:
            self._note(error)

    def _read_one(self, stored: Stored, with_state: bool) -> Entry:
        coming = self._coming.get(stored.key)
        if coming is not None and (coming.parent, coming.start) == (stored.parent, stored.start):
            return coming  # not where another engine has stored the same text in other segments
        header: Header | None = None
        try:
            signed = self._objects.read_header(stored.key)
            if signed is None:
                raise EntryGoneError
            header = signed.header
            if (header.parent, header.start, header.end) == (stored.parent, stored.start, stored.end):
                return self._objects.read(signed, self._max_tokens, with_state)
        except EntryGoneError:
            self._objects.remove(stored.key, None)  # so that the next writer writes all of it
            raise
        except EntryError as error:
            self._drop(stored.key, header, error)
            raise
        self._add(header)  # another engine has stored this text in other segments
        raise EntryGoneError

    def _touch(self, chain: Sequence[Stored]) -> None:
        """Note in the store that entries are used; those of which something is gone are forgotten."""
        if time.monotonic() < self._retry_at:
            return
        with self._lock:
            chain = [stored for stored in chain if stored.key not in self._coming]
            parts = [self._names.get(stored.key, []) for stored in chain]
        names = [[self._objects.header_name(stored.key), *own] for stored, own in zip(chain, parts, strict=True)]
        try:
            found = iter(self._objects.store.have([name for own in names for name in own]))
        except StoreError as error:
            self._note(error)
            return
        for stored, own in zip(chain, names, strict=True):
            stored.used = time.time_ns()
            there = [next(found) for _ in own]
            if not all(there):
                self._miss(stored)

    def _miss(self, stored: Stored) -> None:
        """Count an entry that the store has no more."""
        with self._lock:
            if self._index.get(stored.name) is stored:
                self._index.remove(stored.name)
                self._names.pop(stored.key, None)
                self._counts.evictions += 1

    def _drop(self, key: bytes, header: Header | None, error: EntryError) -> None:
        """Remove an entry that is not what was written, so that it is found by no request any more."""
        logger.warning("an entry of the prefix cache is not used: %s", error)
        with self._lock:
            self._counts.damaged += error.fault == "damaged"
            stored = self._index.get((self.layout.fingerprint, key))
            self._names.pop(key, None)
        if stored is not None:
            self._forget(stored)
        if error.fault == "damaged":
            self._objects.remove(key, header)

    def _note(self, error: StoreError) -> None:
        """Leave a store that is not reached alone for a time."""
        if error.fault == "unreachable":
            if time.monotonic() >= self._retry_at + RETRY_S:  # once, not every RETRY_S
                logger.warning("--hicache-storage-backend: %s is not reached: %s", self._place, error)
            self._retry_at = time.monotonic() + RETRY_S
        elif error.fault == "failed":  # a store that is full is no news, and counted
            logger.warning("a prefix cannot be read from the store, or written: %s", error)

    # ---- on the writer's thread --------------------------------------------------------------------------------------

    def _write(self, entry: Entry, stored: Stored) -> None:
        lost: LostWrite | None = "failed"
        try:
            if self.is_away:
                raise StoreError("unreachable", "it was not reached a short time ago")
            written = 0 if self._is_whole(entry) else self._write_anew(entry)
            lost = None
        except StoreError as error:
            lost = error.fault
            if not self.is_away:
                self._note(error)
        finally:
            if lost is not None:
                self._give_up(entry, stored, lost)
        if lost is None:
            with self._lock:
                self._came(entry)
                self._counts.writes += written > 0
                self._counts.written_bytes += written

    def _is_whole(self, entry: Entry) -> bool:
        """Whether another engine has stored this entry; what is left of one that is not whole is removed."""
        header = self._header(entry.key)
        if header is None:
            return False
        is_same = (header.parent, header.start) == (entry.parent, entry.start)
        is_continued = is_same or not header.start or self._learn(header.parent)
        if not (is_continued and all(self._objects.store.have(self._objects.part_names(header)))):
            self._objects.remove(entry.key, None)
            return False
        self._add(header)
        self._objects.mark(entry)
        return True

    def _write_anew(self, entry: Entry) -> int:
        header, nbytes = self._objects.write(entry)
        self._add(header)
        return nbytes
