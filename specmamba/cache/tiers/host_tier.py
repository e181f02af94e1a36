"""Entries in host memory: what leaves the pools, until it is used again or makes room for what is used more."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from specmamba.cache.tiers.entry import Buffers, Bytes, Entry, EntryLayout
from specmamba.cache.tiers.entry_index import Change, EntryIndex, Name, Stored
from specmamba.cache.tiers.host_arena import HostArena, aligned
from specmamba.cache.tiers.prefix_hash import PrefixHasher
from specmamba.cache.tiers.tier import Load, TierName, WritePolicy
from specmamba.cache.tiers.tier_stats import LostWrite, TierCounts, TierMiss, TierStats


class HostTier:
    """The entries of one layout in one block of memory. All calls come from the engine's thread."""

    name: TierName = "host"
    outlives = False
    policy: WritePolicy = "write_back"

    def __init__(self, layout: EntryLayout, max_bytes: int, is_pinned: bool) -> None:
        """Allocate the block.

        Args:
            layout: of the engine's entries.
            max_bytes: size of the block.
            is_pinned: for a GPU.

        Raises:
            ConfigError: there is not so much memory.
        """
        self.layout = layout
        self._arena = HostArena(max_bytes, is_pinned)
        self._index = EntryIndex()
        self._entries: dict[bytes, Entry] = {}
        self._offsets: dict[bytes, int] = {}
        self._coming: tuple[int, int] | None = None  # offset and size of what ``allocate`` has given away
        self._users: Counter[bytes] = Counter()  # loads that use an entry
        self._counts = TierCounts()
        self.on_evict: Callable[[list[Entry]], object] | None = None  # gets what leaves, behind those that it continues

    def look(self, text: PrefixHasher) -> None:
        """Do nothing: ``find`` knows what there is."""

    def find(self, text: PrefixHasher) -> list[Stored]:
        """Return the entries that hold the longest beginning of a text."""
        return self._index.find(self.layout.fingerprint, text)

    def has(self, key: bytes) -> bool:
        """Whether there is an entry of this key."""
        return key in self._entries

    def held(self) -> list[bytes]:
        """Return the keys of all entries, parents before what continues them."""
        return [stored.key for stored in sorted(self._index, key=lambda stored: stored.start)]

    def get(self, key: bytes) -> Entry | None:
        """Return an entry, whose memory stays as it is until ``allocate`` or ``forget``; None: there is none."""
        return self._entries.get(key)

    def changes(self, most: int) -> list[Change]:
        """Return up to ``most`` entries that have come or gone since the last calls."""
        return self._index.changes(most)

    def learn(self, keys: Sequence[bytes], timeout_s: float) -> None:
        """Do nothing: no other process writes here."""

    def why_absent(self, text: PrefixHasher) -> TierMiss:
        """Return "absent": entries of other models are not here."""
        return "absent"

    def note_use(self, chain: Sequence[Stored]) -> None:
        """Note that entries are in use."""
        for stored in chain:
            stored.used = time.time_ns()

    def load(self, chain: Sequence[Stored], known: int = 0) -> Load:
        """Return a chain at once; its memory stays as it is until ``release``."""
        load = Load(chain)
        self.note_use(chain)
        self._users.update(stored.key for stored in chain)
        load.end(tuple(self._entries[stored.key] for stored in chain))
        return load

    def release(self, load: Load) -> None:
        """Allow the entries of a load to leave."""
        load.is_over = True
        self._users -= Counter(stored.key for stored in load.chain)

    def allocate(self, num_tokens: int, parent: bytes) -> Buffers | None:
        """Return memory for an entry, for which what was used longest ago leaves; None, counted: it does not fit.

        An entry is in one piece. Where what must stay lies so that no hole of its size can arise, nothing leaves.
        """
        sizes = [part.nbytes * num_tokens for part in self.layout.token_parts]
        sizes += [part.nbytes for part in self.layout.state_parts]
        nbytes = sum(map(aligned, sizes))
        if self._coming is not None:  # its entry was not put
            self._arena.free(*self._coming)
            self._coming = None
        if nbytes > self._arena.num_bytes:
            self._lose("too_large")
            return None
        offset = self._make_room(nbytes, [*self._users, parent])
        if offset is None:
            self._lose("busy")
            return None
        self._coming = offset, nbytes
        arrays: list[Bytes] = []
        for size in sizes:
            arrays.append(self._arena.view(offset, size))
            offset += aligned(size)
        split = len(self.layout.token_parts)
        return tuple(arrays[:split]), tuple(arrays[split:])

    def put(self, entry: Entry) -> None:
        """Keep the entry in the memory that ``allocate`` has returned last."""
        assert self._coming is not None
        assert entry.state is not None
        offset, nbytes = self._coming
        self._coming = None
        name = self.layout.fingerprint, entry.key
        if self.has(entry.key):
            self._remove(name)
        sizes = sum(part.nbytes for part in entry.tokens), sum(part.nbytes for part in entry.state)
        self._index.add(Stored(*name, entry.parent, entry.start, entry.end, *sizes, nbytes, time.time_ns()))
        self._entries[entry.key], self._offsets[entry.key] = entry, offset
        self._counts.writes += 1
        self._counts.written_bytes += nbytes

    def wait_to_put(self, num_tokens: int, timeout_s: float) -> bool:
        """Return True: nothing waits here."""
        return True

    def waiting(self) -> set[bytes]:
        """Return nothing: nothing waits here."""
        return set()

    def count_hit(self, load: Load, num_tokens: int) -> None:
        """Count a chain that is in the pools now, ``num_tokens`` of which were not before."""
        self._counts.hit(num_tokens, load.nbytes, time.monotonic() - load.began)

    def count_miss(self, reason: TierMiss) -> None:
        """Count a request that got nothing."""
        self._counts.misses[reason] += 1

    def stats(self) -> TierStats:
        """Return sizes now and counts since the start."""
        return self._counts.stats(len(self._index), self._index.num_bytes, self._arena.num_bytes, 0)

    def describe_line(self) -> str:
        """Return a line for the report at start."""
        return f"prefixes in host memory: up to {self._arena.num_bytes / (1 << 30):.2f} GiB of what leaves the pools"

    def drain(self) -> bool:
        """Return True: nothing waits here."""
        return True

    def forget(self) -> None:
        """Drop all entries."""
        for stored in list(self._index):
            self._remove(stored.name)

    def close(self) -> None:
        """Drop all entries."""
        self.forget()

    def _make_room(self, nbytes: int, spared: Sequence[bytes]) -> int | None:
        """Evict until there is a hole; returns its offset. None, with no change: the spared entries are in the way."""
        offset = self._arena.allocate(nbytes)
        if offset is None and not self._arena.has_room_beside(self._pieces_of(spared), nbytes):
            return None
        names = {(self.layout.fingerprint, key) for key in spared}
        while offset is None:
            victim = self._index.oldest(names)
            assert victim is not None  # or the spared entries alone would be left, and the hole be there
            self._evict(victim.name)
            offset = self._arena.allocate(nbytes)
        return offset

    def _pieces_of(self, keys: Sequence[bytes]) -> set[tuple[int, int]]:
        """Return offset and size of entries and of all that they continue."""
        pieces: set[tuple[int, int]] = set()
        for key in keys:
            entry = self._entries.get(key)
            while entry is not None:
                stored = self._index.get((self.layout.fingerprint, entry.key))
                assert stored is not None
                pieces.add((self._offsets[entry.key], stored.nbytes))
                entry = self._entries.get(entry.parent) if entry.start else None
        return pieces

    def _evict(self, name: Name) -> None:
        """Remove an entry that no other one continues."""
        if self.on_evict is not None:
            chain = [self._entries[name[1]]]
            while chain[-1].start:
                chain.append(self._entries[chain[-1].parent])
            self.on_evict(chain[::-1])
        self._remove(name)
        self._counts.evictions += 1

    def _remove(self, name: Name) -> None:
        stored = self._index.remove(name)
        assert stored is not None
        self._arena.free(self._offsets.pop(stored.key), stored.nbytes)
        del self._entries[stored.key]

    def _lose(self, reason: LostWrite) -> None:
        self._counts.lost_writes[reason] += 1
