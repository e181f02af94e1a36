"""Entries as bytes: what is written is read, and nothing else is ever read as an entry."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmamba.cache.tiers.codec import EntryError, check_payload, encode, encoded_bytes, read_entry, read_header
from specmamba.cache.tiers.entry import Entry, EntryLayout, Part

LAYOUT = EntryLayout(
    {"weights": "abc"},
    (Part("kv0", "float32", 4, (2, 1, 3)), Part("scales", "float32", 4, (2, 1)), Part("none", "int8", 1, (0, 4))),
    (Part("recurrent", "float32", 4, (3, 2)), Part("features", "bfloat16", 2, (1, 0))),
)
MAX_TOKENS = 64
HEADER_STRUCT_BYTES = 8 + 4 + 4 + 4 * 8 + 5 * 32


def make_entry(start: int = 3, num_tokens: int = 5, seed: int = 0, layout: EntryLayout = LAYOUT) -> Entry:
    rng = np.random.default_rng(seed)
    tokens = tuple(rng.integers(0, 256, part.nbytes * num_tokens, dtype=np.uint8) for part in layout.token_parts)
    state = tuple(rng.integers(0, 256, part.nbytes, dtype=np.uint8) for part in layout.state_parts)
    return Entry(layout, rng.bytes(32), rng.bytes(32), start, start + num_tokens, tokens, state)


def encoded(entry: Entry) -> bytes:
    return b"".join(encode(entry))


def same(a: Entry, b: Entry) -> bool:
    assert a.state is not None
    assert b.state is not None
    names = ("key", "parent", "start", "end")
    arrays = zip((*a.tokens, *a.state), (*b.tokens, *b.state), strict=True)
    return all(getattr(a, n) == getattr(b, n) for n in names) and all(np.array_equal(x, y) for x, y in arrays)


@given(st.integers(0, 1 << 20), st.integers(1, MAX_TOKENS), st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_what_is_written_is_read(start: int, num_tokens: int, seed: int) -> None:
    entry = make_entry(start, num_tokens, seed)
    data = encoded(entry)
    assert len(data) == encoded_bytes(entry) == read_header(io.BytesIO(data)).nbytes
    assert same(read_entry(io.BytesIO(data), LAYOUT, MAX_TOKENS), entry)
    check_payload(io.BytesIO(data[read_header(io.BytesIO(data)).header_bytes :]), read_header(io.BytesIO(data)))


def test_kv_is_read_without_the_state() -> None:
    entry = make_entry()
    data = encoded(entry)[: -LAYOUT.state_bytes]  # a connection may end here
    read = read_entry(io.BytesIO(data), LAYOUT, MAX_TOKENS, with_state=False)
    assert read.state is None
    assert all(np.array_equal(a, b) for a, b in zip(read.tokens, entry.tokens, strict=True))
    with pytest.raises(ValueError, match="without its state"):
        list(encode(read))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_damage_is_found(data: st.DataObject) -> None:
    """A byte that changes, is lost or is added, anywhere: an error, and never another entry."""
    good = encoded(make_entry())
    at = data.draw(st.integers(0, len(good) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "drop", "insert"]))
    bit = 1 << data.draw(st.integers(0, 7))
    bad = {
        "flip": good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :],
        "cut": good[:at],
        "drop": good[:at] + good[at + 1 :],
        "insert": good[:at] + bytes([bit]) + good[at:],
    }[kind]
    if bad[: len(good)] == good:
        return  # a byte behind the end, or one that equals its neighbour
    with pytest.raises(EntryError):
        read_entry(io.BytesIO(bad), LAYOUT, MAX_TOKENS)


@given(st.binary(max_size=600))
@settings(max_examples=100, deadline=None)
def test_noise_is_no_entry(noise: bytes) -> None:
    for data in (noise, b"SPMENTRY" + noise, encoded(make_entry())[:HEADER_STRUCT_BYTES] + noise):
        with pytest.raises(EntryError):
            read_entry(io.BytesIO(data), LAYOUT, MAX_TOKENS)


def with_fields(**fields: int) -> bytes:
    """A header that lies, with a digest that fits."""
    good = encoded(make_entry())
    names = ("version", "layout_bytes", "start", "end", "token_bytes", "state_bytes")
    values = dict(zip(names, struct.unpack_from("<II4Q", good, 8), strict=True)) | fields
    fixed = b"SPMENTRY" + struct.pack("<II4Q", *values.values()) + good[48:HEADER_STRUCT_BYTES]
    layout = good[HEADER_STRUCT_BYTES:][: len(LAYOUT.description)]
    header = fixed + layout
    return header + hashlib.sha256(header).digest() + good[len(header) + 32 :]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"token_bytes": 1 << 62}, "damaged"),
        ({"state_bytes": 1 << 62}, "damaged"),
        ({"end": 1 << 40, "token_bytes": (1 << 40) * LAYOUT.token_bytes}, "damaged"),
        ({"end": 3 + MAX_TOKENS + 1, "token_bytes": (MAX_TOKENS + 1) * LAYOUT.token_bytes}, "damaged"),
        ({"start": 8}, "damaged"),
        ({"layout_bytes": 1 << 31}, "damaged"),
        ({"version": 2}, "format"),
    ],
)
def test_sizes_are_checked_before_memory_is_taken(fields: dict[str, int], fault: str) -> None:
    data = with_fields(**fields)
    tracemalloc.start()
    with pytest.raises(EntryError) as caught:
        read_entry(io.BytesIO(data), LAYOUT, MAX_TOKENS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.fault == fault
    assert peak < 1 << 20


def test_other_layouts_have_other_fingerprints() -> None:
    other = EntryLayout({"weights": "abd"}, LAYOUT.token_parts, LAYOUT.state_parts)
    wider = EntryLayout(LAYOUT.identity, (*LAYOUT.token_parts[:2], Part("none", "int8", 1, (0, 5))), LAYOUT.state_parts)
    for layout in (other, wider):
        with pytest.raises(EntryError) as caught:
            read_entry(io.BytesIO(encoded(make_entry(layout=layout))), LAYOUT, MAX_TOKENS)
        assert caught.value.fault == "fingerprint"


def test_an_entry_must_have_the_sizes_of_its_layout() -> None:
    entry = make_entry()
    short = Entry(LAYOUT, entry.key, entry.parent, 3, 9, entry.tokens, entry.state)
    with pytest.raises(ValueError, match="the layout says"):
        encoded(short)


def test_entries_go_through_a_connection() -> None:
    """The codec needs no file: another machine can be the source."""
    entry, (reading, writing) = make_entry(), os.pipe()
    os.write(writing, encoded(entry) + b"what follows")
    with os.fdopen(reading, "rb") as stream:
        assert same(read_entry(stream, LAYOUT, MAX_TOKENS), entry)
        assert stream.read(12) == b"what follows"
    os.close(writing)
