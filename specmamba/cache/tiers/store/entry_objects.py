"""An entry as objects of a store: its signed header, its KV, its state, and a mark on the grid by which it is found.

The three are the bytes of an entry's file on disk. KV and state are named by their digests, which the header has: an
object is written once, so two servers that store the same prefix at the same time cannot mix theirs. The header is
named by the hash of the text, and signed, since those who reach a store may write into it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

from specmamba.cache.tiers.codec import EntryError, Header, encode, read_entry, read_header
from specmamba.cache.tiers.entry import Entry, EntryLayout
from specmamba.cache.tiers.store.object_store import ObjectStore

TAG_BYTES = 32
MARK = memoryview(b"1")  # the content of a mark, which only has to exist


class EntryGoneError(Exception):
    """An entry, or a part of it, is not in the store any more."""


@dataclass(frozen=True, slots=True)
class SignedHeader:
    """The header of an entry in the store, whose signature is right."""

    header: Header
    data: memoryview  # its bytes


class EntryObjects:
    """Entries of one layout in a store. Every method may raise StoreError."""

    def __init__(self, store: ObjectStore, layout: EntryLayout, signing_key: bytes) -> None:
        """``signing_key``: of the headers, which all servers have that share entries."""
        self.store, self._layout, self._signing_key = store, layout, signing_key
        self._prefix = f"specmamba-{layout.fingerprint.hex()}"

    def header_name(self, key: bytes) -> str:
        """Return the name of the header of the entry with this key."""
        return f"{self._prefix}-entry-{key.hex()}"

    def mark_name(self, grid: bytes) -> str:
        """Return the name of the mark for entries that end less than a step of the grid behind a beginning."""
        return f"{self._prefix}-mark-{grid.hex()}"

    def part_names(self, header: Header) -> list[str]:
        """Return the names of KV and state; parts without bytes have none."""
        parts = (header.token_bytes, header.token_digest), (header.state_bytes, header.state_digest)
        return [self._part_name(digest) for nbytes, digest in parts if nbytes]

    def read_header(self, key: bytes) -> SignedHeader | None:
        """Read the header of the entry with this key; None: there is none.

        Raises:
            EntryError: damaged, forged, or of another format.
        """
        data = self.store.get(self.header_name(key))
        if data is None:
            return None
        tag, data = data[:TAG_BYTES], data[TAG_BYTES:]
        if not hmac.compare_digest(self._tag(data), tag):
            raise EntryError("damaged", "its header is not signed by a server that has the key")
        header = read_header(BytesIO(data))
        if (header.key, header.fingerprint) != (key, self._layout.fingerprint):
            raise EntryError("damaged", "it is another entry than its name says")
        return SignedHeader(header, data)

    def read(self, signed: SignedHeader, max_tokens: int, with_state: bool) -> Entry:
        """Read the entry behind a header; arguments as of ``codec.read_entry``.

        Raises:
            EntryError: damaged, or longer than ``max_tokens``.
            EntryGoneError: a part is not there any more.
        """
        stream = _Objects(signed.data, (self._get(name) for name in self.part_names(signed.header)))
        return read_entry(stream, self._layout, max_tokens, with_state)

    def write(self, entry: Entry) -> tuple[Header, int]:
        """Write an entry that is not there; the header last. Returns its header, and the bytes that were written."""
        data, *parts = encode(entry)
        header, num_arrays = read_header(BytesIO(data)), len(entry.tokens)
        halves = (header.token_digest, parts[:num_arrays]), (header.state_digest, parts[num_arrays:])
        for digest, arrays in halves:
            if arrays := [array for array in arrays if len(array)]:
                self.store.put(self._part_name(digest), *arrays)
        self.mark(entry)
        self.store.put(self.header_name(entry.key), memoryview(self._tag(data)), data)
        return header, TAG_BYTES + header.nbytes

    def mark(self, entry: Entry) -> None:
        """Write the mark by which an entry is found."""
        if entry.grid:
            self.store.put(self.mark_name(entry.grid), MARK)

    def remove(self, key: bytes, header: Header | None) -> None:
        """Remove an entry, with its parts where its header is known."""
        self.store.remove(self.header_name(key), *(self.part_names(header) if header is not None else ()))

    def _get(self, name: str) -> memoryview:
        data = self.store.get(name)
        if data is None:
            raise EntryGoneError
        return data

    def _part_name(self, digest: bytes) -> str:
        return f"{self._prefix}-part-{digest.hex()}"

    def _tag(self, header: memoryview) -> bytes:
        return hmac.digest(self._signing_key, header, hashlib.sha256)


class _Objects:
    """A stream of a header, and of objects that are fetched one after the other, when they are read."""

    def __init__(self, header: memoryview, parts: Iterator[memoryview]) -> None:
        self._header, self._parts = BytesIO(header), parts
        self._rest = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        return self._header.read(size)

    def readinto(self, buffer: memoryview, /) -> int:
        if not len(self._rest):
            self._rest = next(self._parts, self._rest)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
