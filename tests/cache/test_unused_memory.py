"""Memory that a process does not need goes back: pages of libraries, and pools that hold nothing."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba import LLM, SamplingParams
from specmamba.cache.pool_memory import entries_of_layer, lazy_memory
from specmamba.cache.pool_memory.lazy_memory import (
    STABLE_FITS,
    LazyLayers,
    give_back_zeros,
    lazy_zeros,
    whole_huge_pages,
)
from specmamba.engine import cost_measurement
from specmamba.processes import unused_memory
from specmamba.processes.unused_memory import HUGE_PAGE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the calls are Linux's")

CPU = torch.device("cpu")
PART = 1 << 20
# Maps a library as the loader does (code, constants, relocations, data), and a file without code. Prints for each the
# resident KiB before and after, and whether its bytes stay.
CHILD = """
import ctypes, hashlib, json, mmap, sys
import numpy as np
from specmamba.processes.unused_memory import drop_library_pages

PART = 1 << 20
READ, WRITE, EXEC = mmap.PROT_READ, mmap.PROT_WRITE, mmap.PROT_EXEC

def map_parts(name, *access):
    with open(name, "rb") as file:
        return [
            np.frombuffer(mmap.mmap(file.fileno(), PART, mmap.MAP_PRIVATE, prot, offset=index * PART), np.uint8)
            for index, prot in enumerate(access)
        ]

def resident():
    sizes = {}
    for line in open("/proc/self/smaps"):
        words = line.split()
        if "-" in words[0]:
            begin = int(words[0].split("-")[0], 16)
        elif words[0] == "Rss:":
            sizes[begin] = int(words[1])
    return [sizes[part.ctypes.data] for part in parts]

parts = map_parts(sys.argv[1], READ | EXEC, READ, READ | WRITE, READ | WRITE) + map_parts(sys.argv[2], READ)
for part in parts[2:4]:
    part[20_000] ^= 255
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(parts[2].ctypes.data), ctypes.c_size_t(PART), READ) == 0
digests = [hashlib.sha256(part).hexdigest() for part in parts]
before = resident()
dropped = drop_library_pages()
after = resident()
print(json.dumps([dropped, before, after, [hashlib.sha256(part).hexdigest() for part in parts] == digests]))
"""


def test_clean_pages_of_libraries_go_and_come_back(tmp_path: Path) -> None:
    """Code and constants; relocations and data have a page of their own, and files without code are mapped to read."""
    library, other = tmp_path / "library.so", tmp_path / "weights"
    library.write_bytes(os.urandom(4 * PART))
    other.write_bytes(os.urandom(PART))
    os.sync()  # pages that are not on the disk yet count as dirty
    command = [sys.executable, "-c", CHILD, str(library), str(other)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    dropped, before, after, are_same = json.loads(output)
    assert before == [1024] * 5
    assert after == [0, 0, 1024, 1024, 1024]
    assert are_same
    assert dropped >= 2 * PART


def test_nothing_happens_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    zeros = lazy_zeros((PART,), torch.uint8, CPU).fill_(1)
    give_back_zeros(zeros)
    assert zeros.all()
    assert unused_memory.drop_library_pages() == 0


def test_a_system_without_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "open", refuse)
    assert unused_memory.drop_library_pages() == 0


def test_zeros_take_no_memory_again() -> None:
    zeros = lazy_zeros((48, PART), torch.uint8, CPU)
    assert _resident_bytes(zeros) < 4 * PART
    zeros.fill_(1)
    assert _resident_bytes(zeros) == whole_pages(zeros).nbytes
    give_back_zeros(zeros)
    assert _resident_bytes(zeros) < 4 * PART
    assert not whole_pages(zeros).any()


@pytest.mark.parametrize(
    ("count", "entry_bytes", "whole"),
    [
        (8537, 512, 12288),
        (12288, 512, 12288),
        (4095, 512, 4095),  # less than a huge page
        (40, 65536, 64),
        (300, 9216, 300),  # 2048 entries, nine huge pages, would be the next whole number
        (3, 3 << 20, 3),
        (7, 3 << 20, 7),
        (7, 0, 7),
    ],
)
def test_layers_that_grow_begin_with_a_huge_page(count: int, entry_bytes: int, whole: int) -> None:
    assert whole_huge_pages(count, entry_bytes) == whole
    assert entries_of_layer(count, count - 1, None, 8, entry_bytes) == (whole if entry_bytes else count)
    assert entries_of_layer(count, count, None, 8, entry_bytes) == count
    layers = LazyLayers((2, whole, entry_bytes), torch.uint8, CPU, grows=True)
    are_aligned = [layer.data_ptr() % HUGE_PAGE == 0 for layer in layers.tensor if layer.nbytes]
    assert all(are_aligned) == (whole * entry_bytes % HUGE_PAGE == 0)


def test_what_has_grown_behind_a_huge_page_becomes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a layer has had all of it for a while: what has grown there in small steps has small pages.

    Where memory is scattered the system can refuse single joins: the layer keeps its small pages then.
    """
    joined: list[int] = []

    def join(address: int) -> None:
        before = _huge_bytes(layers.tensor)
        grown = {0, HUGE_PAGE} if unused_memory.join_pages(address) else {0}  # or the system was first
        assert _huge_bytes(layers.tensor) - before in grown
        joined.append((address - layers.tensor.data_ptr()) // HUGE_PAGE)

    monkeypatch.setattr(lazy_memory, "join_pages", join)
    layers = LazyLayers((2, 4 * 512, 4096), torch.uint8, CPU, grows=True)  # four huge pages of 512 entries each
    few = STABLE_FITS - 1
    for counts, expected in (
        ([700, 1000, 1100], []),  # the second page is whole: not for long yet
        ([1100] * (few - 1), []),
        ([1100], [1, 5]),
        ([2000, 1100, 2000] + [2048, 1100] * few, []),  # the end comes back into the third page again and again
        ([2000] * few, []),
        ([2000], [2, 6]),  # the fourth is not whole yet
        ([700, 2048, 700] + [1024] * few, []),
        ([1024], [1, 5]),
    ):
        joined.clear()
        for count in counts:
            layers.fit(count)
            layers.tensor[:, :count, 7] = torch.arange(count) % 251
        assert sorted(joined) == expected
        assert torch.equal(layers.tensor[1, :count, 7], (torch.arange(count) % 251).to(torch.uint8))
        assert _resident_bytes(layers.tensor[0, count:]) == 0


def test_measuring_at_the_start_leaves_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools are zeros again in all of their whole pages; as soon as a prefix is cached they stay as they are."""
    monkeypatch.setattr(cost_measurement, "_cache_file", lambda: tmp_path / "times.json")
    flags: dict[str, Any] = {"dtype": "float32", "max_running_requests": 2, "context_length": 256}
    with LLM(**flags, speculative_adaptive="auto") as llm:
        pools: Any = llm.engine.pools
        kept = (*pools.kv.k, *pools.kv.v, pools.states.recurrent, pools.states.conv)
        kept += (pools.state_buffers.k, pools.state_buffers.u, pools.state_buffers.conv_inputs)
        assert not any(whole_pages(x).any() for x in kept)
        first = llm.generate("def add(a, b):", SamplingParams(max_tokens=16, temperature=0.0))[0]
        assert whole_pages(pools.states.recurrent).any()
        before = pools.states.recurrent.clone()
        pools.give_back()
        assert torch.equal(pools.states.recurrent, before)
        llm.engine.flush_cache()
        pools.give_back()
        assert not whole_pages(pools.states.recurrent).any()
        second = llm.generate("def add(a, b):", SamplingParams(max_tokens=16, temperature=0.0))[0]
        assert first.token_ids == second.token_ids


def _huge_bytes(x: Tensor) -> int:
    """The bytes of huge pages in the mappings that a tensor lies in."""
    begin, end, found, is_own = x.data_ptr(), x.data_ptr() + x.nbytes, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            first, last = (int(number, 16) for number in words[0].split("-"))
            is_own = first < end and begin < last
        elif words[0] == "AnonHugePages:" and is_own:
            found += 1024 * int(words[1])
    return found


def whole_pages(x: Tensor) -> Tensor:
    """The bytes of a tensor that lie in pages of its own."""
    begin, content = x.data_ptr(), x.reshape(-1).view(torch.uint8)
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE - begin
    last = (begin + x.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    return content[first:last]


def _resident_bytes(x: Tensor) -> int:
    """The bytes of a tensor's whole pages that are in memory: other memory of this process comes and goes."""
    pages = whole_pages(x)
    found = (ctypes.c_ubyte * (pages.nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(pages.data_ptr()), ctypes.c_size_t(pages.nbytes), found) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in found)
