"""What a tier holds, in memory: which continue which, and which were used longest ago."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

from specmamba.cache.tiers.codec import Header
from specmamba.cache.tiers.prefix_hash import HEAD_TOKENS, PrefixHasher

Name = tuple[bytes, bytes]  # fingerprint and key: what the file of an entry is called after
Change = tuple[Name, "Stored | None"]  # an entry that has come; None: the one of this name has gone


@dataclass(slots=True, eq=False)
class Stored:
    """An entry of a tier; its file is what a folder has of it."""

    fingerprint: bytes
    key: bytes
    parent: bytes
    start: int
    end: int
    token_bytes: int
    state_bytes: int
    nbytes: int  # of the file
    used: int  # when it was last used, in nanoseconds: the time of its file's last change

    @classmethod
    def of(cls, header: Header, nbytes: int, used: int) -> Stored:
        """Describe a file by its header."""
        sizes = header.token_bytes, header.state_bytes
        return cls(
            header.fingerprint, header.key, header.parent, header.start, header.end, *sizes, nbytes=nbytes, used=used
        )

    @property
    def name(self) -> Name:
        return self.fingerprint, self.key


class EntryIndex:
    """The entries of a place, those of other models included, since all share its bytes. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[Name, Stored] = {}
        self._num_of: Counter[bytes] = Counter()  # entries of each fingerprint
        self._below: dict[Name, Counter[int]] = {}  # by fingerprint and parent: the ends of the entries that follow
        # (used, number, entry): those that may be leaves, by when they were used at that time
        self._by_use: list[tuple[int, int, Stored]] = []
        self._numbers = itertools.count()
        self._changed: dict[Name, Stored | None] | None = None  # since ``changes``; None: it was never called
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Stored]:
        return iter(self._entries.values())

    def get(self, name: Name) -> Stored | None:
        """Return an entry, or None."""
        return self._entries.get(name)

    @property
    def fingerprints(self) -> set[bytes]:
        """The fingerprints of all entries."""
        return set(self._num_of)

    def add(self, entry: Stored) -> None:
        """Add an entry, in the place of one of the same name."""
        self.remove(entry.name)
        self._entries[entry.name] = entry
        self._note(entry.name, entry)
        self._num_of[entry.fingerprint] += 1
        self._below.setdefault((entry.fingerprint, entry.parent), Counter())[entry.end] += 1
        self.num_bytes += entry.nbytes
        self._push(entry)
        self._compact()

    def remove(self, name: Name) -> Stored | None:
        """Remove an entry; returns it, or None if there is none of this name."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        self._note(name, None)
        self._num_of[entry.fingerprint] -= 1
        if not self._num_of[entry.fingerprint]:
            del self._num_of[entry.fingerprint]
        ends = self._below[entry.fingerprint, entry.parent]
        ends[entry.end] -= 1
        if not ends[entry.end]:
            del ends[entry.end]
        if not ends:
            del self._below[entry.fingerprint, entry.parent]
            if (parent := self._entries.get((entry.fingerprint, entry.parent))) is not None:
                self._push(parent)
        self.num_bytes -= entry.nbytes
        return entry

    def changes(self, most: int) -> list[Change]:
        """Return up to ``most`` entries that have come or gone since the last calls; those that are there come first.

        Changes that the calls have not returned yet are kept, one for each name.
        """
        if self._changed is None:
            self._changed = dict(self._entries)
        found = list(itertools.islice(self._changed.items(), most))
        for name, _ in found:
            del self._changed[name]
        return found

    def _note(self, name: Name, entry: Stored | None) -> None:
        if self._changed is not None:
            self._changed.pop(name, None)  # what continues an entry comes behind it
            self._changed[name] = entry

    def find(self, fingerprint: bytes, text: PrefixHasher) -> list[Stored]:
        """Return the entries that together hold the longest beginning of a text, the first segment first.

        Only lengths at which an entry ends are hashed: those behind the text's head, then those behind each entry that
        is found.
        """
        if text.num_tokens < HEAD_TOKENS or not self._entries:
            return []
        lengths = self._ends_behind(fingerprint, text.digest(HEAD_TOKENS), text.num_tokens)
        heapq.heapify(lengths)
        found: dict[bytes, Stored] = {}
        last: Stored | None = None
        previous = 0
        while lengths:
            length = heapq.heappop(lengths)
            if length == previous:
                continue
            previous, entry = length, self._entries.get((fingerprint, text.digest(length)))
            if entry is not None and entry.end == length and (entry.start == 0 or entry.parent in found):
                found[entry.key] = last = entry
                for end in self._ends_behind(fingerprint, entry.key, text.num_tokens):
                    heapq.heappush(lengths, end)
        chain: list[Stored] = []
        while last is not None:
            chain.append(last)
            last = found.get(last.parent) if last.start else None
        return chain[::-1]

    def oldest(self, spared: Container[Name] = ()) -> Stored | None:
        """Return what was used longest ago of the entries that no other one continues; None: all such are spared.

        In O(log n) of the entries, but for those that are spared or were used since the last call.
        """
        self._compact()
        kept: list[Stored] = []
        found: Stored | None = None
        while self._by_use and found is None:
            used, _, entry = heapq.heappop(self._by_use)
            if self._entries.get(entry.name) is not entry or entry.name in self._below:
                continue  # gone, or no leaf: its last child pushes it again
            if entry.name in spared:
                kept.append(entry)
            elif entry.used > used:
                self._push(entry)
            else:
                found = entry
                kept.append(entry)
        for entry in kept:
            self._push(entry)
        return found

    def limit_use(self, latest: int) -> None:
        """Let entries that were used later than ``latest`` count as used then, in the same order. In O(n) of all."""
        late = sorted((entry for entry in self if entry.used > latest), key=lambda entry: entry.used)
        for entry in late:
            entry.used = latest
        if late:
            kept = {id(entry) for entry in late}
            self._order([entry for entry in self if id(entry) not in kept] + late)

    def _compact(self) -> None:
        """Forget entries of the heap that are gone, where they are the most of it."""
        if len(self._by_use) > 2 * len(self._entries) + 64:
            self._order(list(self))

    def _order(self, entries: list[Stored]) -> None:
        """Make the heap anew; of entries that were used at the same time the first counts as the oldest."""
        self._by_use = [(entry.used, next(self._numbers), entry) for entry in entries]
        heapq.heapify(self._by_use)

    def _push(self, entry: Stored) -> None:
        heapq.heappush(self._by_use, (entry.used, next(self._numbers), entry))

    def _ends_behind(self, fingerprint: bytes, parent: bytes, most: int) -> list[int]:
        return [end for end in self._below.get((fingerprint, parent), ()) if end <= most]
