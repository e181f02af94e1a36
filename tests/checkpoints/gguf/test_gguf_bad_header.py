"""Headers of GGUF files that would take memory or time without end: refused, with a sentence."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest

from specmamba.checkpoints.gguf import header
from specmamba.checkpoints.gguf.header import read_header
from specmamba.errors import CheckpointError

BYTE, UINT32, INT32, FLOAT32, TEXT, ARRAY, UINT64 = 0, 4, 5, 6, 8, 9, 10
ARCHITECTURE = b"general.architecture"
MOST_BYTES = 32 << 20  # of memory, for files of a few hundred bytes


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def write(folder: Path, entries: list[bytes], tensors: list[bytes], num_bytes: int = 64) -> Path:
    """A file with this metadata beside its architecture, these tensors, and so many bytes of weights."""
    entries = [entry(ARCHITECTURE, TEXT, text(b"qwen35")), *entries]
    counts = struct.pack("<IQQ", 3, len(tensors), len(entries))
    file = folder / "x.gguf"
    head = b"GGUF" + counts + b"".join(entries) + b"".join(tensors)
    file.write_bytes(head + bytes(-len(head) % 32 + num_bytes))
    return file


def refuse(file: Path, words: str) -> None:
    """It is refused in these words, and without much memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=words):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_that_a_good_one_is_read(tmp_path: Path) -> None:
    file = write(tmp_path, [entry(b"qwen35.block_count", UINT32, struct.pack("<I", 3))], [tensor(b"a", (4, 4))])
    found = read_header(file)
    assert found.metadata["qwen35.block_count"] == 3
    assert found.tensors["a"].shape == (4, 4)
    assert found.tensors["a"].num_bytes == 64


@pytest.mark.parametrize("count", [1 << 31, 1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize("kind", [BYTE, FLOAT32, UINT64, TEXT, ARRAY, 77])
def test_arrays_of_any_length(tmp_path: Path, kind: int, count: int) -> None:
    refuse(write(tmp_path, [entry(b"a", ARRAY, struct.pack("<IQ", kind, count))], []), "damaged or not a GGUF file")


@pytest.mark.parametrize("length", [1 << 31, 1 << 40, (1 << 64) - 1])
def test_texts_of_any_length(tmp_path: Path, length: int) -> None:
    refuse(write(tmp_path, [struct.pack("<Q", length)], []), "damaged or not a GGUF file")
    refuse(write(tmp_path, [entry(b"a", TEXT, struct.pack("<Q", length))], []), "damaged or not a GGUF file")
    refuse(write(tmp_path, [], [struct.pack("<Q", length)]), "damaged or not a GGUF file")


@pytest.mark.parametrize("count", [header.MAX_TENSORS + 1, 1 << 63])
@pytest.mark.parametrize("at", [8, 16])
def test_counts(tmp_path: Path, at: int, count: int) -> None:
    """Of tensors and of metadata, also where a large file would have room for them."""
    file = write(tmp_path, [], [tensor(b"a", (4, 4))])
    whole = bytearray(file.read_bytes())
    whole[at : at + 8] = struct.pack("<Q", count)
    file.write_bytes(whole)
    refuse(file, rf"it would have .*{count}.* are the most that is read")


def test_header_as_large_as_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array of bytes that is there: every byte of it would become a number of Python."""
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 1 << 16)
    array = struct.pack("<IQ", BYTE, 1 << 22) + bytes(1 << 22)
    refuse(write(tmp_path, [entry(b"a", ARRAY, array)], []), "damaged or not a GGUF file")


@pytest.mark.parametrize("key", [b"qwen35.block_count", b"qwen35.nextn_predict_layers"])
@pytest.mark.parametrize(
    ("kind", "value"), [(UINT32, struct.pack("<I", (1 << 31) - 1)), (INT32, struct.pack("<i", -1)), (TEXT, text(b"9"))]
)
def test_layers(tmp_path: Path, key: bytes, kind: int, value: bytes) -> None:
    """Configs have a list of them."""
    words = f"{key.decode()} is .* layers are the most|not supported between"
    refuse(write(tmp_path, [entry(key, kind, value)], []), words)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (UINT32, struct.pack("<I", 0)),
        (UINT64, struct.pack("<Q", 1 << 40)),
        (INT32, struct.pack("<i", -32)),
        (FLOAT32, struct.pack("<f", 0.5)),
        (TEXT, text(b"32")),
    ],
)
def test_alignment(tmp_path: Path, kind: int, value: bytes) -> None:
    refuse(write(tmp_path, [entry(b"general.alignment", kind, value)], []), "general.alignment is")


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ((), "a has the shape"),
        ((4, 0), "a has the shape"),
        ((1, 1, 1, 1, 1), "a has the shape"),
        ((1,) * 100_000, "a has the shape"),
        (((1 << 64) - 1,) * 4, "a has the shape"),
        ((1 << 32, 1 << 32), "a has the shape"),
        ((4, 8), "truncated: it ends before a does"),
    ],
)
def test_shapes(tmp_path: Path, dims: tuple[int, ...], words: str) -> None:
    refuse(write(tmp_path, [], [tensor(b"a", dims)]), words)


def test_more_dimensions_than_bytes(tmp_path: Path) -> None:
    refuse(write(tmp_path, [], [text(b"a") + struct.pack("<I", (1 << 32) - 1)]), "damaged or not a GGUF file")


@pytest.mark.parametrize("offset", [32, 1 << 40, (1 << 64) - 1])
def test_places(tmp_path: Path, offset: int) -> None:
    refuse(write(tmp_path, [], [tensor(b"a", (4, 4), offset=offset)]), "truncated: it ends before a does")


def test_tensors_over_each_other(tmp_path: Path) -> None:
    """A small file would become a large model."""
    tensors = [tensor(b"%d" % i, (4, 64)) for i in range(50)]
    refuse(write(tmp_path, [], tensors, num_bytes=1024), r"1 begins at byte \d+, but what is before it ends at")
