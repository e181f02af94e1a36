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
from specmamba.cache.pool_memory.lazy_memory import give_back_zeros, lazy_zeros
from specmamba.engine import cost_measurement
from specmamba.processes import unused_memory

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
