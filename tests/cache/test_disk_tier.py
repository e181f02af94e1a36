"""Entries on disk: found by their prefixes, kept within a budget, and never wrong whatever happens to the files."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmamba.cache.tiers import disk_tier, threaded_tier
from specmamba.cache.tiers import tier as tier_module
from specmamba.cache.tiers.codec import encoded_bytes
from specmamba.cache.tiers.disk_tier import DiskTier
from specmamba.cache.tiers.entry import Entry, EntryLayout, Part
from specmamba.cache.tiers.entry_folder import EntryFolder
from specmamba.cache.tiers.entry_index import EntryIndex, Stored
from specmamba.cache.tiers.mover import Mover
from specmamba.cache.tiers.prefix_hash import HEAD_TOKENS, PrefixHasher
from specmamba.cache.tiers.tier import Load, Tier
from specmamba.errors import ConfigError
from tests.radix import array

LAYOUT = EntryLayout({"weights": "a"}, (Part("kv", "uint8", 1, (1, 4)),), (Part("state", "uint8", 1, (64,)),))
OTHER = EntryLayout({"weights": "b"}, LAYOUT.token_parts, LAYOUT.state_parts)
TEXT = tuple(range(100, 200))
SECRET = bytes(32)

NewTier = Callable[..., DiskTier]


@pytest.fixture
def new_tier(tmp_path: Path) -> Iterator[NewTier]:
    tiers: list[DiskTier] = []

    def new(layout: EntryLayout = LAYOUT, max_bytes: int = 1 << 20, max_tokens: int = 1000) -> DiskTier:
        tiers.append(DiskTier(tmp_path / "prefixes", layout, max_bytes, max_tokens))
        return tiers[-1]

    yield new
    for tier in tiers:
        tier.close()


def hash_of(tier: DiskTier, text: tuple[int, ...], salt: str | None, tenant: str | None) -> PrefixHasher:
    return PrefixHasher(tier.secret, tenant, salt, array(text))


def put(tier: DiskTier, text: tuple[int, ...], salt: str | None = None) -> Entry:
    """Put the last segment of a text, behind those that the tier has."""
    hasher = hash_of(tier, text, salt, None)
    chain = tier.find(hasher)
    hasher.restart()
    head = hasher.digest(HEAD_TOKENS)
    start, parent = (chain[-1].end, chain[-1].key) if chain else (0, head)
    tokens = (np.repeat(np.array(text[start:], dtype=np.uint8), 4),)
    state = (np.full(64, text[-1], dtype=np.uint8),)
    entry = Entry(tier.layout, hasher.digest(len(text)), parent, start, len(text), tokens, state)
    tier.put(entry)
    return entry


def ends(tier: DiskTier, text: tuple[int, ...], salt: str | None = None) -> list[int]:
    return [entry.end for entry in tier.find(hash_of(tier, text, salt, None))]


def fetch(tier: DiskTier, text: tuple[int, ...]) -> object:
    """What a load of a text brings, as ``loaded`` has it."""
    return loaded(tier, tier.find(hash_of(tier, text, None, None)))


def loaded(tier: Tier, chain: Sequence[Stored]) -> object:
    """What a load of a chain brings: (tokens, value of the state), or the reason of a miss."""
    load = tier.load(chain)
    assert load is not None
    result = wait_for(load)
    tier.release(load)
    if isinstance(result, str):
        return result
    assert isinstance(result, tuple)
    assert result[-1].state is not None
    tokens = np.concatenate([entry.tokens[0] for entry in result])[::4]
    return tuple(map(int, tokens)), int(result[-1].state[0][0])


def wait_for(load: Load) -> object:
    deadline = time.monotonic() + 60
    while load.result is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return load.result


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "prefixes").glob("*.entry"))


def test_what_comes_and_goes_is_told_once(new_tier: NewTier) -> None:
    tier = new_tier()
    entries = [put(tier, TEXT[:end]) for end in (20, 50, 90)]
    assert [entry and entry.end for _, entry in tier.changes(2)] == [20, 50]
    assert [entry and entry.end for _, entry in tier.changes(9)] == [90]
    assert tier.changes(9) == []
    fourth = put(tier, TEXT[:99])
    tier._index.remove((LAYOUT.fingerprint, entries[2].key))
    assert [(name[1], entry and entry.end) for name, entry in tier.changes(9)] == [
        (fourth.key, 99),
        (entries[2].key, None),
    ]
    assert tier.drain()
    others = new_tier(OTHER)
    assert [entry for _, entry in others.changes(9)] == []  # those of other models are not told
    own = put(others, TEXT[:30])
    assert [name[1] for name, _ in others.changes(9)] == [own.key]


def test_a_tier_learns_of_what_another_has_just_written(new_tier: NewTier) -> None:
    tier, other = new_tier(), new_tier()
    keys = [put(other, TEXT[:end]).key for end in (20, 50)]
    assert other.drain()
    tier._scanned = time.monotonic()  # it looks again in two seconds
    assert ends(tier, TEXT) == []
    tier.learn([b"?" * 32, *keys], 5.0)
    assert ends(tier, TEXT) == [20, 50]
    assert fetch(tier, TEXT[:50]) == (TEXT[:50], TEXT[49])
    assert tier.stats().damaged == 0


def test_an_index_forgets_what_is_gone(new_tier: NewTier) -> None:
    index = EntryIndex()
    for number in range(1000):
        entry = Stored(b"f", number.to_bytes(4), b"", 0, 20, 0, 0, 0, number)
        index.add(entry)
        index.remove(entry.name)
    assert len(index._by_use) <= 2 * len(index) + 65


def test_a_chain_is_written_found_and_loaded_also_after_a_restart(new_tier: NewTier, tmp_path: Path) -> None:
    tier = new_tier()
    for end in (20, 50, 90):
        put(tier, TEXT[:end])
    assert tier.drain()
    for each in (tier, new_tier()):
        assert ends(each, TEXT) == [20, 50, 90]
        assert ends(each, TEXT[:89]) == [20, 50]
        assert ends(each, (*TEXT[:60], 7)) == [20, 50]
        assert ends(each, TEXT[:19]) == ends(each, (7, *TEXT)) == []
        assert fetch(each, TEXT) == (TEXT[:90], TEXT[89])
        assert fetch(each, TEXT[:70]) == (TEXT[:50], TEXT[49])
    assert stat.S_IMODE((tmp_path / "prefixes").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "prefixes").iterdir()} == {0o600}
    content = b"".join(file.read_bytes() for file in files(tmp_path))
    for width in (np.int32, np.int64):
        assert array(TEXT[:8]).astype(width).tobytes() not in content  # token ids
    assert new_tier().stats().num_bytes == len(content)


def test_salts_tenants_and_models_find_nothing_of_each_other(new_tier: NewTier) -> None:
    tier = new_tier()
    put(tier, TEXT[:50])
    tier.drain()
    assert ends(tier, TEXT, salt="other") == []
    assert tier.find(hash_of(tier, TEXT, None, "tenant")) == []
    assert tier.why_absent(hash_of(tier, TEXT, "other", None)) == "absent"
    other = new_tier(OTHER)
    assert ends(other, TEXT) == []
    assert other.why_absent(hash_of(other, TEXT, None, None)) == "fingerprint"
    assert other.stats().num_entries == 1  # whose bytes count


def test_without_the_secret_hashes_say_nothing() -> None:
    digests = {
        PrefixHasher(secret, tenant, salt, array(TEXT)).digest(50)
        for secret in (SECRET, bytes([1] * 32))
        for tenant in (None, "a", "null")
        for salt in (None, "a")
    }
    assert len(digests) == 12


def test_the_oldest_leaf_makes_room(new_tier: NewTier) -> None:
    first = new_tier()
    size = encoded_bytes(put(first, TEXT[:50])) + 100
    first.drain()
    tier = new_tier(max_bytes=4 * size)
    branches = [(*TEXT[:50], *range(first, first + 40)) for first in (0, 50, 200)]
    for text in branches:
        put(tier, text)
        tier.drain()
    assert fetch(tier, branches[0]) == (branches[0], branches[0][-1])  # used last
    put(tier, tuple(range(60)))
    tier.drain()
    stats = tier.stats()
    assert (stats.evictions, stats.num_entries) == (1, 4)
    assert stats.num_bytes <= stats.max_bytes
    assert [len(ends(tier, text)) for text in branches] == [2, 1, 2]
    again = new_tier(max_bytes=4 * size)  # the order of use outlives the process
    put(again, tuple(range(30, 90)))
    again.drain()
    assert [len(ends(again, text)) for text in branches] == [2, 1, 1]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_after_the_clock_went_back_old_entries_make_room_for_new_ones(
    new_tier: NewTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    tier = new_tier()
    old = [tuple(range(first, first + 30)) for first in (100, 150, 200)]
    sizes = [encoded_bytes(put(tier, text)) for text in old]
    tier.drain()
    max_bytes = sum(sizes) + 40
    running = new_tier(max_bytes=max_bytes)
    ahead = time.time_ns() + 10**15  # the time at which all of it was used: eleven days from now
    for stored in running._index:
        stored.used = ahead
        os.utime(running._folder.file(stored.name), ns=(ahead, ahead))
    tier = new_tier(max_bytes=max_bytes) if is_restarted else running
    monkeypatch.setattr(disk_tier, "SCAN_INTERVAL_S", 0.0)
    new = [tuple(range(first, first + 30)) for first in (10, 40, 60)]
    for text in new:
        put(tier, text)
        tier.drain()
        assert fetch(tier, text) == (text, text[-1])
    assert [ends(tier, text) for text in new] == [[30]] * 3
    assert tier.stats().num_entries == 3
    assert all(file.stat().st_mtime_ns < time.time_ns() + 10**9 for file in files(tmp_path))


def test_what_is_used_in_memory_stays_on_disk(new_tier: NewTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beginning that many texts have is seldom loaded, since it is in memory; it is used all the same."""
    monkeypatch.setattr(threaded_tier, "TOUCH_INTERVAL_NS", 0)
    tier = new_tier(max_bytes=1400)
    put(tier, TEXT[:30])
    put(tier, tuple(range(30)))
    tier.drain()
    tier.note_use(tier.find(hash_of(tier, TEXT, None, None)))
    put(tier, tuple(range(50, 80)))
    tier.drain()
    assert tier.stats().evictions == 1
    assert (ends(tier, TEXT), ends(tier, tuple(range(30)))) == ([30], [])


def test_what_does_not_fit_is_not_written(new_tier: NewTier, tmp_path: Path) -> None:
    tier = new_tier(max_bytes=300)
    assert tier.allocate(100, b"") is None
    put(tier, TEXT)  # its header does not fit
    tier.drain()
    assert tier.stats().lost_writes["too_large"] == 2
    assert (ends(tier, TEXT), files(tmp_path), tier.stats().num_bytes) == ([], [], 0)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def make_folder_of(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "header": lambda file: flip(file, 60),
    "layout": lambda file: flip(file, 300),
    "digest": lambda file: flip(file, -64 - 200 - 3),
    "kv": lambda file: flip(file, -70),
    "state": lambda file: flip(file, -3),
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file: os.truncate(file, 0),
    "no file": make_folder_of,
}


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_a_miss(new_tier: NewTier, tmp_path: Path, kind: str, is_restarted: bool) -> None:
    tier = new_tier()
    put(tier, TEXT[:50])
    tier.drain()
    DAMAGE[kind](files(tmp_path)[0])
    tier = new_tier() if is_restarted else tier
    chain = tier.find(hash_of(tier, TEXT, None, None))
    if kind in ("kv", "state") or not is_restarted:
        assert fetch(tier, TEXT) == ("unreadable" if kind == "no file" else "damaged")
    else:
        assert chain == []
    if kind != "no file":
        assert (ends(tier, TEXT), files(tmp_path), tier.stats().damaged) == ([], [], 1)
        put(tier, TEXT[:50])
        assert fetch(tier, TEXT) == (TEXT[:50], TEXT[49])


def test_a_file_under_the_name_of_another_is_damaged(new_tier: NewTier, tmp_path: Path) -> None:
    tier = new_tier()
    put(tier, TEXT[:50])
    put(tier, tuple(range(50)))
    tier.drain()
    first, second = files(tmp_path)
    first.write_bytes(second.read_bytes())
    results = [fetch(tier, TEXT), fetch(tier, tuple(range(50)))]
    assert max(map(str, results)) == "damaged"
    assert (TEXT[:50], TEXT[49]) in results or (tuple(range(50)), 49) in results


def test_vanished_files_and_folders_are_misses(new_tier: NewTier, tmp_path: Path) -> None:
    tier = new_tier()
    put(tier, TEXT[:50])
    tier.drain()
    files(tmp_path)[0].unlink()
    assert fetch(tier, TEXT) == "vanished"
    assert ends(tier, TEXT) == []
    for file in (tmp_path / "prefixes").iterdir():
        file.unlink()
    (tmp_path / "prefixes").rmdir()
    put(tier, TEXT[:50])
    tier.drain()
    assert tier.stats().lost_writes["failed"] == 1
    assert ends(tier, TEXT) == []


def test_a_full_disk_loses_a_write(new_tier: NewTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = new_tier()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("os.fdatasync", full)
    put(tier, TEXT[:50])
    tier.drain()
    assert tier.stats().lost_writes["disk_full"] == 1
    assert (ends(tier, TEXT), list((tmp_path / "prefixes").glob(".*"))) == ([], [])
    monkeypatch.undo()
    put(tier, TEXT[:50])
    tier.drain()
    assert ends(tier, TEXT) == [50]


def test_two_tiers_see_each_other(new_tier: NewTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "SCAN_INTERVAL_S", 0.0)
    first, second = new_tier(), new_tier()
    put(first, TEXT[:50])
    first.drain()
    deadline = time.monotonic() + 60
    while ends(second, TEXT) != [50]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert fetch(second, TEXT) == (TEXT[:50], TEXT[49])
    put(second, TEXT[:90])
    second.drain()
    while ends(first, TEXT) != [50, 90]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert fetch(first, TEXT) == (TEXT[:90], TEXT[89])


def test_what_is_written_while_the_folder_is_listed_stays_known(
    new_tier: NewTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "SCAN_INTERVAL_S", 1e9)
    tier, may_write = new_tier(), threading.Event()
    put(tier, other := tuple(range(50)))
    put(tier, TEXT[:30])
    assert tier.drain()
    write, look = EntryFolder.write, EntryFolder.list
    monkeypatch.setattr(EntryFolder, "write", lambda *given: (may_write.wait(60), write(*given))[1])
    put(tier, TEXT[:60])

    def look_too_early(folder: EntryFolder) -> list[object]:
        found = list(look(folder))
        may_write.set()
        put(tier, TEXT[:90])
        assert tier.drain()
        return [file for file in found if file.name != tier.find(hash_of(tier, other, None, None))[0].name]

    monkeypatch.setattr(EntryFolder, "list", look_too_early)
    tier._scan()
    assert (ends(tier, TEXT), ends(tier, other)) == ([30, 60, 90], [])  # the other one was removed


def test_what_waits_to_be_written_is_loaded_from_memory(new_tier: NewTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, may_write = new_tier(), threading.Event()
    real = EntryFolder.write
    monkeypatch.setattr(EntryFolder, "write", lambda *given: (may_write.wait(60), real(*given))[1])
    put(tier, TEXT[:50])
    assert fetch(tier, TEXT) == (TEXT[:50], TEXT[49])
    assert tier.stats().writes == 0
    may_write.set()
    assert tier.drain()
    assert tier.stats().writes == 1


def test_a_disk_that_hangs_delays_one_request(new_tier: NewTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, answers = new_tier(), threading.Event()
    put(tier, TEXT[:50])
    assert tier.drain()
    for module in (threaded_tier, tier_module):
        monkeypatch.setattr(module, "MAX_LOAD_S", 0.05)
    monkeypatch.setattr(EntryFolder, "touch", lambda *_: answers.wait(60))
    assert fetch(tier, TEXT) == "slow"
    time.sleep(0.05)  # since its thread began to read
    monkeypatch.setattr(tier_module, "MAX_LOAD_S", 1e9)
    assert fetch(tier, TEXT) == "slow"  # at once
    answers.set()
    deadline = time.monotonic() + 60
    while tier.hangs:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.undo()
    assert fetch(tier, TEXT) == (TEXT[:50], TEXT[49])


def test_unfinished_files_of_living_writers_stay(new_tier: NewTier, tmp_path: Path) -> None:
    new_tier()
    left, live = (tmp_path / "prefixes" / f".{name}.tmp" for name in ("1-a-0", "2-b-0"))
    left.write_bytes(b"x")
    with live.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        new_tier()
        assert (left.exists(), live.exists()) == (False, True)
    new_tier()
    assert not live.exists()


def test_a_file_that_is_removed_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process looks for leftovers between the two: of an entry, and of the secret."""
    lock, attempts, removed = fcntl.flock, itertools.count(), list[int]()

    def clean_up_first(file: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and next(attempts) % 2 == 0:
            removed.append(EntryFolder(tmp_path / "prefixes").remove_leftovers())
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", clean_up_first)
    folder, secret = EntryFolder.open(tmp_path / "prefixes")
    written = folder.write((bytes(32), bytes(32)), [memoryview(b"entry")])
    assert folder.file(written.name).read_bytes() == b"entry"
    assert folder.open(folder.path)[1] == secret
    assert removed == [1, 1]
    assert sorted(file.name for file in folder.path.iterdir()) == sorted([folder.file(written.name).name, "secret"])


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        EntryFolder.open(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be used"):
        EntryFolder.open(tmp_path / "file")
    _, secret = EntryFolder.open(tmp_path / "new" / "folder")
    assert EntryFolder.open(tmp_path / "new" / "folder")[1] == secret
    os.truncate(tmp_path / "new" / "folder" / "secret", 31)
    with pytest.raises(ConfigError, match="damaged"):
        EntryFolder.open(tmp_path / "new" / "folder")


def test_processes_that_come_together_share_one_secret(tmp_path: Path) -> None:
    secrets: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: secrets.append(EntryFolder.open(tmp_path / "prefixes")[1])) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(secrets) == 8
    assert len(set(secrets)) == 1
    assert [file.name for file in (tmp_path / "prefixes").iterdir()] == ["secret"]


def test_a_mover_bounds_what_it_holds() -> None:
    mover, may_run, ran = Mover("test", 100), threading.Event(), list[int]()

    def job(number: int) -> Callable[[], None]:
        def run() -> None:
            assert may_run.wait(60)
            ran.append(number)

        return run

    def fails() -> None:
        raise ValueError("a job fails")

    assert mover.put(job(0), 1000)  # the only one may be larger
    assert not mover.put(job(1), 1)
    may_run.set()
    assert mover.drain(5)
    assert mover.put(fails, 60)  # ends nothing
    assert mover.put(job(2), 40)
    assert mover.close(5)
    assert not mover.put(job(3), 1)
    assert ran == [0, 2]


WRITER = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from tests.cache.test_disk_tier import LAYOUT, TEXT, files, put
from specmamba.cache.tiers.disk_tier import DiskTier
from specmamba.cache.tiers.entry_folder import EntryFolder
from specmamba.cache.tiers.codec import encode
from specmamba.cache.tiers.entry import Entry, EntryLayout, Part

folder, _ = EntryFolder.open(Path(sys.argv[1]))
large = EntryLayout(LAYOUT.identity, (Part("kv", "uint8", 1, (1, 1 << 14)),), LAYOUT.state_parts)
random.seed(3)
for moment in range(20):
    child = os.fork()
    if not child:
        for number in range(1000):
            rng = np.random.default_rng((moment, number))
            tokens = rng.integers(0, 256, 20 << 14, dtype=np.uint8)
            entry = Entry(large, rng.bytes(32), rng.bytes(32), 0, 20, (tokens,), (tokens[:64],))
            folder.write((large.fingerprint, entry.key), encode(entry))
        os._exit(0)
    time.sleep(random.random() * 0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_kill_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """Twenty writers are killed at random moments: every file that has its name is whole, and the others go away."""
    folder = tmp_path / "prefixes"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", WRITER, str(folder)], check=True, env=environment, timeout=120)
    assert list(folder.glob(".*.tmp"))
    tier = DiskTier(folder, LAYOUT, 1 << 30, 1000)
    stats = tier.stats()
    tier.close()
    assert list(folder.glob(".*.tmp")) == []
    assert stats.damaged == 0
    assert stats.num_entries == len(list(folder.glob("*.entry"))) > 0
    from specmamba.cache.tiers.tier_command import main

    assert main(["verify", str(folder)]) == 0


Chain = tuple[tuple[int, ...], int]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_the_index_finds_what_a_search_of_all_entries_finds(data: st.DataObject) -> None:
    """Random texts over two tokens, entries that continue each other, some of them removed again."""
    index, fingerprint = EntryIndex(), b"f" * 32
    known: dict[bytes, tuple[Stored, tuple[int, ...]]] = {}
    head = tuple(range(HEAD_TOKENS))
    for number in range(data.draw(st.integers(1, 14))):
        text = head + tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6)))
        hasher = PrefixHasher(SECRET, None, None, array(text))
        parents = [each for each, parent in known.values() if text[: len(parent)] == parent and len(parent) < len(text)]
        parent = data.draw(st.sampled_from([None, *parents]))
        start, of_parent = (0, hasher.digest(HEAD_TOKENS)) if parent is None else (parent.end, parent.key)
        hasher.restart()
        key = hasher.digest(len(text))
        stored = Stored(fingerprint, key, of_parent, start, len(text), 1, 1, 10 + number, number)
        index.add(stored)
        known[key] = stored, text
        if data.draw(st.integers(0, 3)) == 0:
            gone = data.draw(st.sampled_from(sorted(known)))
            index.remove((fingerprint, gone))
            del known[gone]
    assert index.num_bytes == sum(stored.nbytes for stored, _ in known.values())
    asked = head + tuple(data.draw(st.lists(st.integers(0, 1), max_size=7)))

    def is_whole(stored: Stored) -> bool:
        return stored.start == 0 or (stored.parent in known and is_whole(known[stored.parent][0]))

    usable = [stored.end for stored, text in known.values() if asked[: len(text)] == text and is_whole(stored)]
    found = index.find(fingerprint, PrefixHasher(SECRET, None, None, array(asked)))
    assert (found[-1].end if found else 0) == max(usable, default=0)
    assert all(a.key == b.parent and a.end == b.start for a, b in itertools.pairwise(found))
    for number in itertools.count(1000):  # what was used longest ago leaves, though some was used meanwhile
        leaves = [s for s, _ in known.values() if all(other.parent != s.key for other, _ in known.values())]
        oldest = min(leaves, key=lambda s: s.used, default=None)
        assert index.oldest() is oldest
        if oldest is None:
            break
        if oldest.used < 1000 and data.draw(st.booleans()):
            oldest.used = number
            continue
        spared = data.draw(st.sampled_from(leaves))
        rest = [leaf for leaf in leaves if leaf is not spared]
        assert index.oldest({spared.name}) is min(rest, key=lambda s: s.used, default=None)
        index.remove(oldest.name)
        del known[oldest.key]
