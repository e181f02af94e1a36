"""Entries as bytes: a header of fixed size, the layout as JSON, a digest of both, KV, state.

Sizes are checked against the layout of the reader before anything is allocated, and nothing that is read is run or
unpickled. The digests find damage; they do not tell who has written the bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from specmamba.cache.tiers.entry import DIGEST_BYTES, FORMAT_VERSION, Bytes, Entry, EntryLayout, Part

MAGIC = b"SPMENTRY"
MAX_LAYOUT_BYTES = 1 << 16
MAX_TOKENS = 1 << 31
# magic, format, bytes of the layout, start, end, bytes of KV and of the state; then five digests: fingerprint, key,
# parent, KV, state
_FIXED = struct.Struct(f"<8sII4Q{5 * f'{DIGEST_BYTES}s'}")

Fault = Literal["damaged", "format", "fingerprint"]


class Stream(Protocol):
    """A buffered stream of bytes: a file, or a connection (``socket.makefile``)."""

    def read(self, size: int, /) -> bytes:
        """Read ``size`` bytes, fewer only at the end."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read into memory; returns how many bytes, 0 at the end."""


class EntryError(Exception):
    """Bytes that are no entry, or none for the reader. ``fault`` is the kind."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault


@dataclass(frozen=True, slots=True)
class Header:
    """What the beginning of an encoded entry says."""

    fingerprint: bytes
    key: bytes
    parent: bytes
    start: int
    end: int
    token_bytes: int
    state_bytes: int
    token_digest: bytes
    state_digest: bytes
    layout: bytes  # JSON

    @property
    def header_bytes(self) -> int:
        return _FIXED.size + len(self.layout) + DIGEST_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the whole encoded entry."""
        return self.header_bytes + self.token_bytes + self.state_bytes


def encoded_bytes(entry: Entry) -> int:
    """Return the size of an encoded entry."""
    return _FIXED.size + len(entry.layout.description) + DIGEST_BYTES + entry.nbytes


def encode(entry: Entry) -> Iterator[memoryview]:
    """Return the pieces of an encoded entry, in order; KV and state are not copied.

    Raises:
        ValueError: the entry has no state, or its arrays do not have the sizes of its layout.
    """
    layout, num_tokens = entry.layout, entry.end - entry.start
    if entry.state is None:
        raise ValueError("an entry without its state cannot be encoded")
    _check_sizes(layout.token_parts, entry.tokens, num_tokens)
    _check_sizes(layout.state_parts, entry.state, 1)
    fixed = _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        len(layout.description),
        entry.start,
        entry.end,
        num_tokens * layout.token_bytes,
        layout.state_bytes,
        layout.fingerprint,
        entry.key,
        entry.parent,
        _digest(entry.tokens),
        _digest(entry.state),
    )
    header = fixed + layout.description
    yield memoryview(header + hashlib.sha256(header).digest())
    yield from (array.data for array in (*entry.tokens, *entry.state))


def read_header(stream: Stream) -> Header:
    """Read the header of an encoded entry.

    Raises:
        EntryError: damaged, or of another format.
        OSError: the stream cannot be read.
    """
    fixed = stream.read(_FIXED.size)
    if len(fixed) < _FIXED.size or fixed[: len(MAGIC)] != MAGIC:
        raise EntryError("damaged", "it does not begin like an entry")
    _, version, layout_bytes, start, end, token_bytes, state_bytes, *digests = _FIXED.unpack(fixed)
    if version != FORMAT_VERSION:
        raise EntryError("format", f"its format is {version}, not {FORMAT_VERSION}")
    if layout_bytes > MAX_LAYOUT_BYTES:
        raise EntryError("damaged", f"its layout has {layout_bytes} bytes, {MAX_LAYOUT_BYTES} are the most")
    layout, digest = stream.read(layout_bytes), stream.read(DIGEST_BYTES)
    if hashlib.sha256(fixed + layout).digest() != digest:
        raise EntryError("damaged", "its header is not what was written")
    fingerprint, key, parent, token_digest, state_digest = digests
    if not start < end <= MAX_TOKENS or hashlib.sha256(layout).digest() != fingerprint:
        raise EntryError("damaged", "its header contradicts itself")
    return Header(
        fingerprint, key, parent, start, end, token_bytes, state_bytes, token_digest, state_digest, bytes(layout)
    )


def read_entry(stream: Stream, layout: EntryLayout, max_tokens: int, with_state: bool = True) -> Entry:
    """Read an encoded entry whose layout is known.

    Args:
        stream: at the entry's first byte; a file or a connection.
        layout: of the pools that it is for.
        max_tokens: the longest segment that is read, which bounds the memory.
        with_state: False: stop before the state, which is the last part.

    Raises:
        EntryError: damaged, longer than ``max_tokens``, of another format or of another layout.
        OSError: the stream cannot be read.
    """
    header = read_header(stream)
    if header.fingerprint != layout.fingerprint:
        raise EntryError("fingerprint", "it belongs to another model, or to other settings")
    num_tokens = header.end - header.start
    sizes = header.token_bytes, header.state_bytes
    if num_tokens > max_tokens or sizes != (num_tokens * layout.token_bytes, layout.state_bytes):
        raise EntryError("damaged", f"{num_tokens} tokens in {sizes[0]} bytes and a state in {sizes[1]} do not fit")
    tokens = _read_parts(stream, layout.token_parts, num_tokens, header.token_digest)
    state = _read_parts(stream, layout.state_parts, 1, header.state_digest) if with_state else None
    return Entry(layout, header.key, header.parent, header.start, header.end, tokens, state)


def check_payload(stream: Stream, header: Header) -> None:
    """Read what follows a header, of any layout, and compare it with the digests. Raises EntryError: it differs."""
    for nbytes, expected in ((header.token_bytes, header.token_digest), (header.state_bytes, header.state_digest)):
        digest = hashlib.sha256()
        while nbytes:
            piece = stream.read(min(nbytes, 1 << 20))
            if not piece:
                raise EntryError("damaged", "it ends too early")
            digest.update(piece)
            nbytes -= len(piece)
        if digest.digest() != expected:
            raise EntryError("damaged", "its content is not what was written")
    if stream.read(1):
        raise EntryError("damaged", "it goes on behind its end")


def _read_parts(stream: Stream, parts: Sequence[Part], count: int, expected: bytes) -> tuple[Bytes, ...]:
    arrays = tuple(np.empty(part.nbytes * count, dtype=np.uint8) for part in parts)
    for array in arrays:
        _fill(stream, array)
    if _digest(arrays) != expected:
        raise EntryError("damaged", "its content is not what was written")
    return arrays


def _fill(stream: Stream, array: Bytes) -> None:
    rest = array.data
    while len(rest):
        if not (count := stream.readinto(rest)):
            raise EntryError("damaged", "it ends too early")
        rest = rest[count:]


def _digest(arrays: Sequence[Bytes]) -> bytes:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.data)
    return digest.digest()


def _check_sizes(parts: Sequence[Part], arrays: Sequence[Bytes], count: int) -> None:
    sizes, expected = [array.nbytes for array in arrays], [part.nbytes * count for part in parts]
    if sizes != expected:
        raise ValueError(f"the arrays of an entry have {sizes} bytes, but the layout says {expected}")
