"""Memory of packed weights: chunks that weights share, for as long as one of them is there."""

import gc
import mmap
from itertools import pairwise
from pathlib import Path
from threading import Thread
from weakref import ref

import pytest
import torch
from torch import Tensor

from specmamba.kernels.native import packed_memory as memory
from specmamba.kernels.native.packed_memory import CHUNK, HUGE_PAGE, packed_memory


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[ref[mmap.mmap]]:
    """No chunk at first; the chunks that a test makes."""
    monkeypatch.setattr(memory._Chunks, "newest", None)
    make, made = memory._new_chunk, list[ref[mmap.mmap]]()

    def make_and_say(size: int) -> tuple[mmap.mmap, int]:
        chunk, begin = make(size)
        made.append(ref(chunk))
        return chunk, begin

    monkeypatch.setattr(memory, "_new_chunk", make_and_say)
    return made


def span(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + x.nbytes


def test_weights_lie_side_by_side_from_a_huge_page_on(chunks: list[ref[mmap.mmap]]) -> None:
    weights = [packed_memory(n, t) for n, t in ((1000, torch.bfloat16), (7, torch.int8), (333, torch.float32))]
    assert len(chunks) == 1
    assert weights[0].data_ptr() % HUGE_PAGE == 0
    assert [x.data_ptr() - weights[0].data_ptr() for x in weights] == [0, 2048, 2112]  # cache lines of 64 bytes
    assert [(x.dtype, x.numel()) for x in weights] == [(torch.bfloat16, 1000), (torch.int8, 7), (torch.float32, 333)]
    for i, x in enumerate(weights):
        x.fill_(i + 1)
    assert [set(x.tolist()) for x in weights] == [{1}, {2}, {3}]


def test_a_chunk_is_full_and_large_weights_have_their_own(chunks: list[ref[mmap.mmap]]) -> None:
    size = CHUNK // 2
    weights = [packed_memory(size, torch.uint8) for _ in range(5)]
    assert len(chunks) == 3
    spans = sorted(map(span, weights))
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    large = packed_memory(size + 1, torch.uint8)
    assert len(chunks) == 4
    assert large.data_ptr() % HUGE_PAGE == 0
    large[-1] = 1  # it ends inside of its memory
    packed_memory(size // 4, torch.uint8)
    assert len(chunks) == 4  # beside the fifth one: the large one has not taken its place


def test_a_chunk_goes_with_its_last_weight(chunks: list[ref[mmap.mmap]]) -> None:
    first, second = (packed_memory(100, torch.float32) for _ in range(2))
    del first
    gc.collect()
    assert chunks[0]() is not None
    second.fill_(5)
    del second
    gc.collect()
    assert chunks[0]() is None
    third = packed_memory(100, torch.float32)
    assert len(chunks) == 2
    assert third.tolist() == [0] * 100


def test_threads_get_memory_of_their_own() -> None:
    weights: list[Tensor] = []
    threads = [
        Thread(target=lambda: weights.extend(packed_memory(50, torch.bfloat16) for _ in range(200))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = sorted(map(span, weights))
    assert len(spans) == 800
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_a_chunk_asks_for_huge_pages() -> None:
    weight = packed_memory(HUGE_PAGE, torch.uint8)
    maps = Path("/proc/self/smaps")
    if not maps.exists() or not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("this system has no huge pages, or does not tell of them")
    lines = maps.read_text("utf8").splitlines()
    begin, end = next(i for i, line in enumerate(lines) if _has(line, weight.data_ptr())), len(lines)
    (flags,) = [line for line in lines[begin : min(end, begin + 40)] if line.startswith("VmFlags:")][:1]
    assert "hg" in flags.split()


def _has(line: str, address: int) -> bool:
    """Whether a line of smaps begins the mapping that has an address."""
    first, dash, _ = line.partition(" ")[0].partition("-")
    if not dash or any(c not in "0123456789abcdef" for c in first):
        return False
    return int(first, 16) <= address < int(line.partition(" ")[0].partition("-")[2], 16)


def test_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="0 numbers are no weight"):
        packed_memory(0, torch.float32)
