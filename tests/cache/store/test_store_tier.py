"""Entries in a store of several machines: found, loaded and shared, and never wrong whatever happens to the store.

The store is one in memory with the calls of Mooncake's library; ``test_store_exact.py`` has the real one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specmamba.cache.tiers import threaded_tier
from specmamba.cache.tiers import tier as tier_module
from specmamba.cache.tiers.entry import Entry, EntryLayout
from specmamba.cache.tiers.prefix_hash import HEAD_TOKENS, PrefixHasher, grid_below
from specmamba.cache.tiers.store import object_store, store_tier
from specmamba.cache.tiers.store.object_store import ObjectStore, open_store, require_store
from specmamba.cache.tiers.store.store_settings import StoreKeys, StoreSettings
from specmamba.cache.tiers.store.store_tier import StoreTier
from specmamba.errors import ConfigError
from tests.cache.store.memory_store import MemoryStore, StoreMemory, library_on
from tests.cache.test_disk_tier import LAYOUT, OTHER, SECRET, TEXT, loaded
from tests.radix import array

LONG = tuple(number % 250 for number in range(400))
KEY = b"signing key of the test"

NewTier = Callable[..., StoreTier]


@pytest.fixture
def memory() -> StoreMemory:
    return StoreMemory()


@pytest.fixture
def new_tier(memory: StoreMemory) -> Iterator[NewTier]:
    tiers: list[StoreTier] = []

    def new(layout: EntryLayout = LAYOUT, key: bytes = KEY, max_object: int = 1 << 20) -> StoreTier:
        tiers.append(StoreTier(ObjectStore(MemoryStore(memory), max_object), layout, key, 1000))
        return tiers[-1]

    yield new
    memory.answers.set()
    for tier in tiers:
        tier.close()


def hash_of(text: tuple[int, ...], salt: str | None = None) -> PrefixHasher:
    return PrefixHasher(SECRET, None, salt, array(text))


def put(tier: StoreTier, text: tuple[int, ...], start: int | None = None) -> None:
    """Put the last segment of a text, behind ``start``, or behind what the tier knows."""
    hasher = hash_of(text)
    if start is None:
        chain = tier.find(hasher)
        start = chain[-1].end if chain else 0
    hasher.restart()
    parent = hasher.digest(start or HEAD_TOKENS)
    hasher.restart()
    grid, key = hasher.digest(grid_below(len(text))), hasher.digest(len(text))
    tokens = (np.repeat(np.array(text[start:], dtype=np.uint8), 4),)
    tier.put(Entry(tier.layout, key, parent, start, len(text), tokens, (np.full(64, text[-1], dtype=np.uint8),), grid))


def look(tier: StoreTier, text: tuple[int, ...], salt: str | None = None) -> list[int]:
    """Where the entries of a text end, after a look into the store."""
    asked, deadline = tier.look(hash_of(text, salt)), time.monotonic() + 60
    while asked is not None and not asked.is_over:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return [entry.end for entry in tier.find(hash_of(text, salt))]


def fetch(tier: StoreTier, text: tuple[int, ...]) -> object:
    """What a load of a text brings, as ``loaded`` has it."""
    return loaded(tier, tier.find(hash_of(text)))


def stored(tier: StoreTier, *texts: tuple[int, ...]) -> None:
    for text in texts:
        put(tier, text)
    assert tier.drain()


def test_a_chain_is_found_by_another_engine(new_tier: NewTier, memory: StoreMemory) -> None:
    first = new_tier()
    stored(first, LONG[:20], LONG[:64], LONG[:150], LONG[:300])
    assert fetch(first, LONG) == (LONG[:300], LONG[299])
    other = new_tier()
    assert [entry.end for entry in other.find(hash_of(LONG))] == []
    assert look(other, LONG) == [20, 64, 150, 300]
    assert fetch(other, LONG) == (LONG[:300], LONG[299])
    assert look(new_tier(), LONG[:299]) == [20, 64, 150]
    assert look(new_tier(), LONG[:64]) == [20, 64]
    assert look(new_tier(), (*LONG[:200], 7, *LONG[201:])) == [20, 64, 150]
    assert look(new_tier(), (7, *LONG)) == look(new_tier(), LONG[:19]) == look(new_tier(), LONG, "salt") == []
    assert first.stats().writes == 4
    assert first.stats().written_bytes == sum(map(len, memory.objects.values())) - len(memory.names("mark"))
    content = b"".join(memory.objects.values()) + "".join(memory.objects).encode()
    for width in (np.int32, np.int64):
        assert array(LONG[:8]).astype(width).tobytes() not in content  # token ids


def test_texts_that_part_inside_a_step_of_the_grid_are_all_found(new_tier: NewTier) -> None:
    first = new_tier()
    texts = [(*LONG[:130], *range(10 * number, 10 * number + 10)) for number in (1, 2, 3)]
    stored(first, *texts)
    for text in texts:
        other = new_tier()
        assert look(other, text) == [140]
        assert fetch(other, text) == (text, text[-1])


def test_what_is_known_is_not_asked_again(new_tier: NewTier, memory: StoreMemory) -> None:
    tier = new_tier()
    stored(tier, LONG[:300])
    assert tier.look(hash_of(LONG[:310])) is None
    look(tier, LONG[:316])
    before = memory.calls["get"]
    assert look(tier, LONG[:316]) == [300]
    assert memory.calls["get"] == before  # headers that are known are not read


def test_models_and_keys_find_nothing_of_each_other(new_tier: NewTier) -> None:
    stored(new_tier(), TEXT[:50])
    other = new_tier(OTHER)
    assert look(other, TEXT) == []
    assert other.why_absent(hash_of(TEXT)) == "absent"
    stranger = new_tier(key=b"another key")
    assert look(stranger, TEXT) == []
    assert stranger.stats().damaged == 1


def of(memory: StoreMemory, kind: str, number: int = 0) -> str:
    """The name of a header, of the KV, or of the state: parts differ by their sizes."""
    if kind == "header":
        return memory.names("entry")[number]
    size = 200 if kind == "kv" else 64
    return next(name for name in memory.names("part") if len(memory.objects[name]) == size)


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize(("kind", "at"), [("header", 5), ("header", 60), ("header", -3), ("kv", 7), ("state", -1)])
def test_damage_is_a_miss(new_tier: NewTier, memory: StoreMemory, kind: str, at: int, is_restarted: bool) -> None:
    tier = new_tier()
    stored(tier, TEXT[:50])
    memory.flip(of(memory, kind), at)
    tier = new_tier() if is_restarted else tier
    if is_restarted and kind == "header":
        assert look(tier, TEXT) == []
    else:
        assert look(tier, TEXT) == [50]
        assert fetch(tier, TEXT) == "damaged"
    assert (tier.stats().damaged, look(tier, TEXT), memory.names("entry")) == (1, [], [])
    stored(tier, TEXT[:50])
    assert fetch(tier, TEXT) == (TEXT[:50], TEXT[49])


@pytest.mark.parametrize("data", [b"", b"x" * 31, b"x" * 4000])
def test_foreign_objects_are_damage(new_tier: NewTier, memory: StoreMemory, data: bytes) -> None:
    tier = new_tier()
    stored(tier, TEXT[:50])
    memory.objects[of(memory, "header")] = data
    assert fetch(tier, TEXT) == "damaged"
    stored(tier, TEXT[:50])
    memory.objects[of(memory, "kv")] = data
    assert fetch(tier, TEXT) == "damaged"


def test_an_entry_under_the_name_of_another_is_damaged(new_tier: NewTier, memory: StoreMemory) -> None:
    tier = new_tier()
    stored(tier, TEXT[:50], tuple(range(50)))
    first, second = memory.names("entry")
    memory.objects[first] = memory.objects[second]
    results = [fetch(tier, TEXT), fetch(tier, tuple(range(50)))]
    assert max(map(str, results)) == "damaged"
    assert (TEXT[:50], TEXT[49]) in results or (tuple(range(50)), 49) in results


@pytest.mark.parametrize("kind", ["header", "kv", "state"])
def test_what_the_store_has_evicted_is_a_miss_and_is_written_again(
    new_tier: NewTier, memory: StoreMemory, kind: str
) -> None:
    tier = new_tier()
    stored(tier, TEXT[:50])
    del memory.objects[of(memory, kind)]
    assert fetch(tier, TEXT) == "vanished"
    assert (look(tier, TEXT), tier.stats().evictions) == ([], 1)
    stored(tier, TEXT[:50])
    assert fetch(tier, TEXT) == (TEXT[:50], TEXT[49])
    del memory.objects[of(memory, kind)]
    other = new_tier()
    stored(other, TEXT[:50])  # another engine computes it again, and does not know what is missing
    assert fetch(other, TEXT) == (TEXT[:50], TEXT[49])


def test_a_beginning_that_is_gone_hides_what_continues_it(new_tier: NewTier, memory: StoreMemory) -> None:
    tier = new_tier()
    stored(tier, LONG[:100], LONG[:300])
    beginning = hash_of(LONG).digest(100).hex()
    del memory.objects[next(name for name in memory.names("entry") if name.endswith(beginning))]
    assert look(new_tier(), LONG) == []
    tier.note_use(tier.find(hash_of(LONG)))  # of entries that were used a moment ago nothing is asked
    assert look(tier, LONG[:316]) == [100, 300]
    assert fetch(tier, LONG) == "vanished"
    assert look(tier, LONG) == []


def test_use_is_noted_and_what_is_gone_is_forgotten(
    new_tier: NewTier, memory: StoreMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threaded_tier, "TOUCH_INTERVAL_NS", 0)
    tier = new_tier()
    stored(tier, TEXT[:50])
    memory.objects.pop(of(memory, "state"))
    tier.note_use(tier.find(hash_of(TEXT)))
    deadline = time.monotonic() + 60
    while tier.find(hash_of(TEXT)):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert tier.stats().evictions == 1


def test_two_engines_write_the_same_text_at_once(new_tier: NewTier, memory: StoreMemory) -> None:
    """Their bits may differ, and their segments too; each object is one of either, and so is what is read."""
    one, other = new_tier(), new_tier()
    memory.answers.clear()
    put(one, LONG[:100], start=0)
    put(other, LONG[:60], start=0)
    put(other, LONG[:100], start=60)
    memory.answers.set()
    assert one.drain()
    assert other.drain()
    for tier in (one, other, new_tier()):
        assert look(tier, LONG)[-1] == 100
        if (result := fetch(tier, LONG)) == "vanished":  # it has other segments than the store, and asks again
            assert look(tier, LONG)[-1] == 100
            result = fetch(tier, LONG)
        assert result == (LONG[:100], LONG[99])
    assert len(memory.names("entry")) == 2


def test_a_full_store_and_a_large_entry_lose_writes(new_tier: NewTier, memory: StoreMemory) -> None:
    tier = new_tier(max_object=300)
    assert tier.allocate(100, b"") is None
    assert tier.allocate(70, b"") is not None
    memory.max_bytes = 500
    stored(tier, TEXT[:50])
    lost = tier.stats().lost_writes
    assert (lost["too_large"], lost["store_full"], look(tier, TEXT)) == (1, 1, [])
    memory.max_bytes = 1 << 20
    stored(tier, TEXT[:50])
    assert fetch(tier, TEXT) == (TEXT[:50], TEXT[49])


def test_a_master_that_is_gone_costs_misses_and_writes(
    new_tier: NewTier, memory: StoreMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = new_tier()
    stored(tier, TEXT[:50])
    memory.is_away = True
    assert fetch(tier, TEXT) == "unreachable"
    calls = memory.calls.total()
    assert tier.look(hash_of(LONG)) is None  # nothing is asked for a time
    assert tier.why_absent(hash_of(LONG)) == "unreachable"
    assert tier.allocate(20, b"") is None
    put(tier, LONG[:50])
    assert tier.drain()
    assert tier.stats().lost_writes["unreachable"] == 2
    assert fetch(tier, TEXT) == "unreachable"
    assert memory.calls.total() == calls
    monkeypatch.setattr(tier, "_retry_at", 0.0)
    put(tier, LONG[:50])
    assert tier.drain()
    assert (tier.stats().lost_writes["unreachable"], tier.is_away) == (3, True)
    monkeypatch.setattr(tier, "_retry_at", 0.0)
    assert look(tier, LONG) == []  # is asked, in vain
    assert tier.is_away
    memory.is_away = False
    monkeypatch.setattr(tier, "_retry_at", 0.0)
    assert look(tier, LONG) == []
    assert (tier.why_absent(hash_of(LONG)), fetch(tier, TEXT)) == ("absent", (TEXT[:50], TEXT[49]))


def test_a_store_that_hangs_delays_one_request(
    new_tier: NewTier, memory: StoreMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = new_tier()
    stored(tier, TEXT[:50])
    for module in (threaded_tier, tier_module, store_tier):
        monkeypatch.setattr(module, "MAX_LOAD_S", 0.05)
    memory.answers.clear()
    asked = tier.look(hash_of(LONG))
    assert asked is not None
    time.sleep(0.1)
    assert asked.is_over
    assert tier.look(hash_of(LONG)) is None
    assert tier.why_absent(hash_of(LONG)) == "unreachable"
    memory.answers.set()
    deadline = time.monotonic() + 60
    while tier.is_away:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    monkeypatch.undo()
    assert look(tier, LONG) == []
    assert fetch(tier, TEXT) == (TEXT[:50], TEXT[49])


def test_the_index_is_bounded(new_tier: NewTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tier, "MAX_KNOWN", 3)
    tier = new_tier()
    texts = [tuple(range(first, first + 30)) for first in range(6)]
    stored(tier, *texts)
    assert tier.stats().num_entries == 3
    for text in texts:  # what is not known is found again
        assert look(tier, text) == [30]
        assert fetch(tier, text) == (text, text[-1])


def settings(**given: object) -> StoreSettings:
    return StoreSettings.of('{"master_server_address": "localhost:50051"}', {name: str(v) for name, v in given.items()})


def test_settings_are_those_of_sglang() -> None:
    found = StoreSettings.of(
        '{"master_server_address": "node:50051", "global_segment_size": "4gb", "protocol": "rdma"}',
        {"MOONCAKE_MASTER": "other:1", "MOONCAKE_LOCAL_HOSTNAME": "me", "MOONCAKE_LOCAL_BUFFER_SIZE": "64MB"},
    )
    assert found.master == ("node", 50051)
    assert (found.global_segment_size, found.local_buffer_size) == (4 << 30, 64 << 20)
    assert (found.local_hostname, found.protocol, found.metadata_server) == ("me", "rdma", "P2PHANDSHAKE")
    assert StoreSettings.of(None, {"MOONCAKE_MASTER": "[::1]:5"}).master == ("::1", 5)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (None, "where is its master"),
        ("{", "this is no JSON"),
        ("[1]", "give a JSON object"),
        ('{"master": "a:1"}', "it has master; there are master_server_address"),
        ('{"master_server_address": "a"}', "is not host:port"),
        ('{"master_server_address": "a:99999"}', "is not host:port"),
        ('{"master_server_address": "a:1", "global_segment_size": "4 pb"}', "is no size"),
        ('{"master_server_address": "a:1", "global_segment_size": -1}', "is no size"),
        ('{"master_server_address": "a:1", "local_buffer_size": 0}', "local_buffer_size is 0"),
        ('{"master_server_address": "a:1", "protocol": 3}', "protocol is a text"),
    ],
)
def test_bad_settings_are_refused(extra: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StoreSettings.of(extra, {})


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot be read"):
        StoreKeys.read(file)
    file.write_text("short")
    with pytest.raises(ConfigError, match="16 characters or more"):
        StoreKeys.read(file)
    file.write_text("a key of many characters\n")
    keys = StoreKeys.read(file)
    file.write_text("a key of many characters")
    assert keys == StoreKeys.read(file)
    assert keys.texts != keys.entries


def test_what_cannot_be_joined_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "import_module", lambda name: library_on(StoreMemory()))
    with pytest.raises(ConfigError, match=r"no master is reached at localhost:1 .*start mooncake_master"):
        require_store(StoreSettings.of('{"master_server_address": "localhost:1"}', {}))
    monkeypatch.setattr(MemoryStore, "setup", lambda *given: -900)
    with pytest.raises(ConfigError, match="cannot be joined"):
        open_store(settings())

    def fail(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(object_store, "import_module", fail)
    with pytest.raises(ConfigError, match=r"libibverbs.*specmamba\[mooncake\]"):
        require_store(settings())


def test_a_text_whose_beginning_is_gone_is_written_anew(new_tier: NewTier, memory: StoreMemory) -> None:
    """Though its last entry is there, as another engine has cut it."""
    stored(new_tier(), LONG[:128])
    beginning = set(memory.objects)
    second = new_tier()
    assert look(second, LONG) == [128]
    stored(second, LONG[:256])
    for name in beginning:
        memory.objects.pop(name, None)
    third = new_tier()
    assert look(third, LONG) == []
    stored(third, LONG[:256])
    assert fetch(third, LONG) == (LONG[:256], LONG[255])
    assert look(new_tier(), LONG) == [256]


def test_what_waits_is_not_taken_for_other_segments_of_its_text(new_tier: NewTier, memory: StoreMemory) -> None:
    """While it waits, the index may come to know how another engine has cut the text."""
    first, other = new_tier(), new_tier()
    stored(first, LONG[:192], LONG[:256])
    memory.answers.clear()
    put(other, LONG[:128])
    put(other, LONG[:256], 128)
    (waiting,) = (entry for entry in other._coming.values() if entry.start == 128)
    memory.answers.set()
    assert other.drain()
    third = new_tier()
    assert look(third, LONG) == [192, 256]
    third._coming[waiting.key] = waiting
    assert fetch(third, LONG) == (LONG[:256], LONG[255])
