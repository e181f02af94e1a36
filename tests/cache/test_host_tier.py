"""Entries in host memory: one block for all of them, and what leaves it when it is full."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specmamba.cache.pool_memory.lazy_memory import ALIGNMENT
from specmamba.cache.tiers import saving, tier_setup
from specmamba.cache.tiers.disk_tier import DiskTier
from specmamba.cache.tiers.entry import Entry
from specmamba.cache.tiers.host_arena import HostArena, aligned
from specmamba.cache.tiers.host_tier import HostTier
from specmamba.cache.tiers.prefix_hash import HEAD_TOKENS, PrefixHasher
from specmamba.cache.tiers.saving import Saving
from specmamba.cache.tiers.tier_writer import TierWriter
from specmamba.config import EngineConfig
from specmamba.errors import ConfigError
from tests.cache.test_disk_tier import LAYOUT, SECRET, TEXT
from tests.radix import array


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_pieces_of_an_arena_never_overlap(data: st.DataObject) -> None:
    arena = HostArena(20 * ALIGNMENT, is_pinned=False)
    pieces: dict[int, int] = {}
    for number in range(data.draw(st.integers(1, 30))):
        is_freed: bool = data.draw(st.booleans())
        if pieces and is_freed:
            offset = data.draw(st.sampled_from(sorted(pieces)))
            assert (arena.view(offset, pieces[offset]) == offset % 251).all()
            arena.free(offset, pieces.pop(offset))
        elif (place := arena.allocate(size := data.draw(st.integers(1, 6 * ALIGNMENT)))) is not None:
            pieces[place] = size
            arena.view(place, size)[:] = place % 251
        else:  # a hole may be too small, but not all of them together where there is one piece less
            assert arena.num_free < 20 * ALIGNMENT, number
        assert arena.num_free == 20 * ALIGNMENT - sum(map(aligned, pieces.values()))
    for offset, size in pieces.items():
        assert (arena.view(offset, size) == offset % 251).all()
        arena.free(offset, size)
    assert arena.allocate(20 * ALIGNMENT) == 0  # all holes are one again


def put(tier: HostTier, text: tuple[int, ...]) -> Entry | None:
    """Put the last segment of a text behind those that the tier has; None: there is no room."""
    hasher = PrefixHasher(SECRET, None, None, array(text))
    chain = tier.find(hasher)
    hasher.restart()
    head = hasher.digest(HEAD_TOKENS)
    start, parent = (chain[-1].end, chain[-1].key) if chain else (0, head)
    buffers = tier.allocate(len(text) - start, parent)
    if buffers is None:
        return None
    buffers[0][0][:], buffers[1][0][:] = text[-1], text[-1]
    entry = Entry(LAYOUT, hasher.digest(len(text)), parent, start, len(text), *buffers)
    tier.put(entry)
    return entry


def ends(tier: HostTier, text: tuple[int, ...]) -> list[int]:
    return [entry.end for entry in tier.find(PrefixHasher(SECRET, None, None, array(text)))]


def test_what_was_used_longest_ago_leaves_behind_what_it_continues() -> None:
    tier = HostTier(LAYOUT, 5 * 192, is_pinned=False)  # five segments of up to 32 tokens
    left: list[list[int]] = []
    tier.on_evict = lambda chain: left.append([entry.end for entry in chain])
    others = [tuple(range(first, first + 30)) for first in (0, 30, 210)]
    for text in (TEXT[:30], TEXT[:60], TEXT[:90], *others[:2]):
        assert put(tier, text)
    assert put(tier, others[2])
    assert (left, ends(tier, TEXT)) == ([[30, 60, 90]], [30, 60])
    load = tier.load(tier.find(PrefixHasher(SECRET, None, None, array(TEXT))))
    assert isinstance(load.result, tuple)
    assert [int(entry.tokens[0][0]) for entry in load.result] == [TEXT[29], TEXT[59]]
    for first in (60, 90, 120):  # what is being loaded stays
        assert put(tier, tuple(range(first, first + 30)))
    assert ends(tier, TEXT) == [30, 60]
    tier.release(load)
    assert put(tier, TEXT[:90])  # so do those that an entry continues
    stats = tier.stats()
    assert (stats.num_entries, stats.evictions, stats.num_bytes) == (5, 5, 5 * 192)
    assert put(tier, tuple(range(250))) is None
    assert tier.stats().lost_writes["too_large"] == 1
    assert tier.stats().num_entries == 5
    tier.forget()
    assert (ends(tier, TEXT), tier.stats().num_bytes) == ([], 0)


def test_nothing_leaves_for_an_entry_that_what_stays_leaves_no_hole_for() -> None:
    tier = HostTier(LAYOUT, 5 * 192, is_pinned=False)
    others = [tuple(range(first, first + 30)) for first in (0, 30, 210)]
    for text in (*others[:2], TEXT[:30], others[2], TEXT[:60]):  # the third piece is continued by the fifth,
        assert put(tier, text)
    load = tier.load(tier.find(PrefixHasher(SECRET, None, None, array(TEXT)))[1:])  # which is being loaded
    head = b"of another text"
    assert tier.allocate(128, head) is None  # as large as three
    stats = tier.stats()
    assert (stats.num_entries, stats.evictions, stats.lost_writes["busy"]) == (5, 0, 1)
    assert put(tier, tuple(range(80, 0, -1)))  # as two
    assert ([ends(tier, text) for text in others], ends(tier, TEXT)) == ([[], [], [30]], [30, 60])
    tier.release(load)
    assert tier.allocate(128, head) is not None


def test_a_save_in_many_calls_takes_each_entry_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "MAX_PAUSE_S", 0.0)  # a call for each entry
    host = HostTier(LAYOUT, 1 << 16, is_pinned=False)
    disk = DiskTier(tmp_path / "prefixes", LAYOUT, 6000, 1000)
    long = tuple(number % 200 for number in range(1600))
    for text in (TEXT[:30], long[:1570], TEXT[:60], long, TEXT[:90]):  # the long one is too large for the disk
        assert put(host, text)
    unused: Any = None
    writer = TierWriter(unused, [host, disk], lambda *text: PrefixHasher(SECRET, None, None, text[0]))
    save, calls, asked = Saving([], [host], disk, writer), 0, list[bytes]()
    get = host.get

    def noted(key: bytes) -> Entry | None:
        asked.append(key)
        return get(key)

    monkeypatch.setattr(host, "get", noted)
    deadline = time.monotonic() + 60
    while not save.go_on():
        calls += 1
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert calls >= 5
    assert asked == host.held()
    assert [entry.end for entry in disk.find(PrefixHasher(SECRET, None, None, array(TEXT)))] == [30, 60, 90]
    stats = disk.stats()
    assert (stats.writes, stats.lost_writes["too_large"]) == (3, 1)  # what continues the long one is no use without it
    disk.close()


def size_of(device: str, **flags: Any) -> int:
    plan: Any = SimpleNamespace(kv_bytes=3000, state_bytes=2000, total_bytes=9000, weight_bytes=1000)
    return tier_setup._host_bytes(EngineConfig(**flags), plan, torch.device(device))


def test_the_size_of_host_memory() -> None:
    assert size_of("cpu") == size_of("cuda") == size_of("cuda", hicache_storage_dir="x") == 0
    assert size_of("cpu", hicache_ratio=0.5) == size_of("cuda", hicache_ratio=0.5) == 2500
    assert size_of("cpu", hicache_size=0.001) == int(0.001 * (1 << 30))
    assert size_of("cuda", enable_hierarchical_cache=True) == 2 * 5000  # as SGLang's
    assert size_of("cpu", enable_hierarchical_cache=True, hicache_storage_dir="x") == 0
    with pytest.raises(ConfigError, match="on a CPU the pools are in host memory already"):
        size_of("cpu", enable_hierarchical_cache=True)


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--hicache-size.*are free beside the pools.*--hicache-storage-size"):
        size_of("cpu", hicache_size=1 << 20)
    with pytest.raises(ConfigError, match="--hicache-size"):
        HostArena(1 << 55, is_pinned=False)
