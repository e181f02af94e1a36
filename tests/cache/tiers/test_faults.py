"""Disks that are full or do not answer: what is lost, what is counted, and what must not pile up meanwhile."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specmamba.cache.tiers import disk_tier, threaded_tier
from specmamba.cache.tiers import tier as tier_module
from specmamba.cache.tiers.disk_tier import DiskTier
from specmamba.cache.tiers.entry_folder import EntryFolder
from tests.cache.test_disk_exact import forget, new_llm, run, stats, tiers
from tests.cache.test_disk_tier import LAYOUT, TEXT, ends, fetch, files, put
from tests.cache.test_prefix_exact import check_pools
from tests.fake_engine import wait_until

Tokens = tuple[int, ...]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    made = DiskTier(tmp_path / "prefixes", LAYOUT, 1 << 20, 1000)
    yield made
    made.close()


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """Let the system refuse what goes beyond this size of a file, in the middle of it, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_an_engine_hits_and_nothing_else(prompts: list[Tokens], tmp_path: Path) -> None:
    folder, prompt = tmp_path / "prefixes", next(each for each in prompts if len(each) > 120)[:120]
    with new_llm(folder) as llm:
        with small_files(100_000):
            cold = run(llm, prompt)
            assert tiers(llm).drain()
        found = stats(llm)
        assert found.lost_writes["disk_full"] > 0
        assert (found.writes, found.num_entries, found.num_bytes, found.bytes_in_flight) == (0, 0, 0, 0)
        assert [file.name for file in folder.iterdir()] == ["secret"]
        for num_cached in (0, len(prompt) - 1):  # there is room again: written, then found
            forget(llm)
            again = run(llm, prompt)
            assert (again.token_ids, again.spec) == (cold.token_ids, cold.spec)
            assert again.num_cached_tokens == num_cached
        check_pools(llm)


def test_a_disk_that_hangs_gathers_nothing(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it hangs in, no look at the folder, no note of use and no load waits behind it."""
    put(tier, TEXT[:50])
    assert tier.drain()
    monkeypatch.setattr(threaded_tier, "MAX_LOAD_S", 0.05)
    monkeypatch.setattr(tier_module, "MAX_LOAD_S", 1000.0)  # a load that waits is not slow in the time of this test
    monkeypatch.setattr(threaded_tier, "TOUCH_INTERVAL_NS", -1)
    monkeypatch.setattr(disk_tier, "SCAN_INTERVAL_S", 0.0)
    answers = threading.Event()
    monkeypatch.setattr(EntryFolder, "changed", lambda _: int(answers.wait(120)))
    assert ends(tier, TEXT) == [50]  # and the folder is looked at
    wait_until(lambda: tier.hangs, 30)
    for _ in range(50):
        assert ends(tier, TEXT) == [50]
        tier.note_use(list(tier._index))
    assert len(tier._reader._jobs) == 0
    assert fetch(tier, TEXT) == "slow"  # at once
    assert len(tier._reader._jobs) == 0
    answers.set()
    monkeypatch.undo()
    wait_until(lambda: tier._reader.began is None, 30)
    assert fetch(tier, TEXT) == (TEXT[:50], TEXT[49])


def test_a_write_that_ends_late_leaves_a_newer_entry_of_its_key(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text in other segments is put while the first one is being written and was given up."""
    real, may_write = EntryFolder.write, [threading.Event(), threading.Event()]
    turns = iter(may_write)
    monkeypatch.setattr(EntryFolder, "write", lambda *given: (next(turns).wait(60), real(*given))[1])
    first = put(tier, TEXT[:50])
    stored = tier._index.get((LAYOUT.fingerprint, first.key))
    assert stored is not None
    tier._forget(stored)
    second = put(tier, TEXT[:50])
    may_write[0].set()
    deadline = time.monotonic() + 60
    while tier.stats().writes < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert tier.waiting() == {second.key}
    assert fetch(tier, TEXT) == (TEXT[:50], TEXT[49])
    may_write[1].set()
    assert tier.drain()
    assert tier.waiting() == set()


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_another_engine_stores_a_text_in_other_segments(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_looked_at: bool
) -> None:
    """A file that was replaced by another one of the same text is no damage: it stays, and is found as it is now."""
    monkeypatch.setattr(disk_tier, "SCAN_INTERVAL_S", 1e9)
    other = DiskTier(tmp_path / "prefixes", LAYOUT, 1 << 20, 1000)
    try:
        for length in (30, 60, 90):
            put(tier, TEXT[:length])
        assert tier.drain()
        put(other, TEXT[:60])  # it knows of none of them
        assert other.drain()
        if is_looked_at:
            tier._scan()
            assert ends(tier, TEXT) == [60, 90]
        else:
            assert ends(tier, TEXT) == [30, 60, 90]
            assert fetch(tier, TEXT) == "vanished"
        assert fetch(tier, TEXT) == (TEXT[:90], TEXT[89])
        assert (tier.stats().damaged, len(files(tmp_path))) == (0, 3)
    finally:
        other.close()
