"""Where requests go: what replicas publish, what is compared with a prompt, and what is weighed against it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from specmamba.cache.tiers.entry_index import Stored
from specmamba.cache.tiers.prefix_hash import HEAD_TOKENS, PrefixHasher
from specmamba.replicas.placement import RUNNING_COST, Published, Texts, Work, choose, own_cost
from specmamba.replicas.published_entries import Found, PublishedEntries, TierIdentity, lines_of

SECRET = b"k" * 32
TEXT = list(range(100, 200))


def digest(length: int, tenant: str | None = None, salt: str | None = None, text: list[int] = TEXT) -> tuple[int, str]:
    hasher = PrefixHasher(SECRET, tenant, salt, np.array(text, dtype=np.int64))
    return length, hasher.digest(length).hex()


def prefixes(*left: tuple[int, str]) -> Published:
    found = Published(None, None)
    found.update({"left": left, "gone": ()})
    return found


def in_pools(
    text: list[int], tenant: str | None, salt: str | None, published: dict[int, Published], secret: bytes = SECRET
) -> dict[int, int]:
    found = Texts(secret).found(text, tenant, salt, published)
    assert all(each.in_tiers == each.in_pools for each in found.values())
    return {index: each.in_pools for index, each in found.items()}


def test_the_longest_beginning_with_a_state_counts() -> None:
    published = {0: prefixes(digest(16), digest(64)), 1: prefixes(digest(80)), 2: prefixes()}
    assert in_pools(TEXT, None, None, published) == {0: 64, 1: 80, 2: 0}


def test_the_last_token_is_always_computed() -> None:
    published = {0: prefixes(digest(64), digest(100))}
    assert in_pools(TEXT, None, None, published) == {0: 64}


@pytest.mark.parametrize(("tenant", "salt", "secret"), [("a", None, SECRET), (None, "s", SECRET), (None, None, b"x")])
def test_tenants_salts_and_servers_find_nothing_of_each_other(
    tenant: str | None, salt: str | None, secret: bytes
) -> None:
    assert in_pools(TEXT, tenant, salt, {0: prefixes(digest(64))}, secret) == {0: 0}
    own = {0: prefixes(digest(64, tenant, salt))}
    assert in_pools(TEXT, tenant, salt, own) == {0: 64}


def test_another_text_of_the_same_length_is_no_beginning() -> None:
    other = [*TEXT[:50], 7, *TEXT[51:]]
    assert in_pools(other, None, None, {0: prefixes(digest(40), digest(64))}) == {0: 40}


def test_what_is_evicted_is_forgotten() -> None:
    found = prefixes(digest(16), digest(64))
    found.update({"left": [digest(80)], "gone": [digest(64), digest(16)]})
    assert list(found.prefixes.lengths) == [80]
    assert not found.prefixes.has(*digest(64))


@pytest.mark.parametrize(
    ("resumable", "waiting", "running", "chosen"),
    [
        ({0: 0, 1: 900}, {0: 0, 1: 0}, {0: 0, 1: 0}, 1),  # a prefix
        ({0: 0, 1: 900}, {0: 0, 1: 800}, {0: 0, 1: 0}, 1),  # that is worth waiting for
        (
            {0: 0, 1: 900},
            {0: 0, 1: 1000},
            {0: 0, 1: 0},
            0,
        ),  # and one that is not: a hot prefix does not leave the others idle
        ({0: 0, 1: 0}, {0: 0, 1: 0}, {0: 1, 1: 0}, 1),
        ({0: 64, 1: 0}, {0: 0, 1: 0}, {0: 4, 1: 0}, 1),
        ({0: 0, 1: 0}, {0: RUNNING_COST, 1: 0}, {0: 0, 1: 1}, 0),  # equal: the fewest requests
        ({0: 0, 1: 0}, {0: 0, 1: 0}, {0: 0, 1: 0}, 0),
        ({0: 900, 1: 0}, {0: 0, 1: 0}, {0: 7, 1: 0}, 0),  # all run
        ({0: 900, 1: 0}, {0: 0, 1: 0}, {0: 8, 1: 0}, 1),  # one would have to end before
        ({0: 900, 1: 0}, {0: 0, 1: 300}, {0: 8, 1: 1}, 1),  # so that the other one fills up,
        ({0: 900, 1: 0}, {0: 0, 1: 0}, {0: 8, 1: 8}, 0),  # and the prefix counts again where requests wait at both
    ],
)
def test_the_choice(resumable: dict[int, int], waiting: dict[int, int], running: dict[int, int], chosen: int) -> None:
    costs = {index: own_cost(1000, Found(number, number)) for index, number in resumable.items()}
    assert choose(costs, {index: Work(running[index], waiting[index]) for index in resumable}, 8) == chosen


def test_a_prefix_that_is_worth_a_wait_is_waited_for() -> None:
    """How long a request waits for another one to end is not known; a long prompt takes longer."""
    costs = {0: own_cost(9000, Found(8000, 8000)), 1: own_cost(9000, Found())}
    filled = {count: {0: Work(8 + count, 0), 1: Work()} for count in range(12)}
    chosen = {count: choose(costs, work, 8) for count, work in filled.items()}
    assert {count for count, index in chosen.items() if index == 0} == set(range(7))


# ---- tiers -----------------------------------------------------------------------------------------------------------

IDENTITY = TierIdentity(b"f" * 32, b"p" * 32)


def entry(start: int, end: int, text: list[int] = TEXT, tenant: str | None = None) -> Stored:
    hasher = PrefixHasher(IDENTITY.secret, tenant, None, np.array(text, dtype=np.int64))
    parent = hasher.digest(start or HEAD_TOKENS)
    return Stored(IDENTITY.fingerprint, hasher.digest(end), parent, start, end, 0, 0, 0, 0)


def coming(*entries: Stored) -> list[Any]:
    return json.loads(json.dumps(lines_of([(each.name, each) for each in entries])))


def going(*entries: Stored) -> list[Any]:
    return lines_of([(each.name, None) for each in entries])


def two_with_a_folder() -> dict[int, Published]:
    folder = PublishedEntries(IDENTITY)
    return {index: Published(IDENTITY, folder) for index in range(2)}


def publish(replica: Published, **tiers: Any) -> None:
    replica.update({"left": [], "gone": [], **tiers})


def test_what_host_memory_has_counts_for_one_replica_and_a_folder_for_all() -> None:
    published = two_with_a_folder()
    publish(published[0], host=coming(entry(0, 32), entry(32, 80)))
    publish(published[1], disk=coming(entry(0, 48)))
    found = Texts(SECRET).found(TEXT, None, None, published)
    assert found == {0: Found(0, 80), 1: Found(0, 48, (entry(0, 48).key,))}
    publish(published[0], host=going(entry(32, 80)))
    found = Texts(SECRET).found(TEXT, None, None, published)
    assert {index: each.in_tiers for index, each in found.items()} == {0: 48, 1: 48}
    assert len(found[0].keys) == 1
    publish(published[0], disk=going(entry(0, 48)))
    assert Texts(SECRET).found(TEXT, None, None, published) == {0: Found(0, 32), 1: Found()}


def test_a_chain_must_be_whole_and_add_enough() -> None:
    published = two_with_a_folder()
    publish(published[0], host=coming(entry(32, 64)))
    assert Texts(SECRET).found(TEXT, None, None, published)[0] == Found()
    publish(published[0], host=coming(entry(0, 32)), left=[digest(50)])
    assert Texts(SECRET).found(TEXT, None, None, published)[0] == Found(50, 50)  # 14 tokens are not loaded
    publish(published[0], gone=[digest(50)], left=[digest(48)])
    assert Texts(SECRET).found(TEXT, None, None, published)[0] == Found(48, 64)
    assert Texts(SECRET).found(TEXT[:64], None, None, published)[0] == Found(48, 48)  # the last token is computed


@pytest.mark.parametrize(("tenant", "text"), [("a", TEXT), (None, [7, *TEXT[1:]])])
def test_tiers_find_nothing_of_other_tenants_and_texts(tenant: str | None, text: list[int]) -> None:
    published = two_with_a_folder()
    publish(published[0], host=coming(entry(0, 64)))
    assert Texts(SECRET).found(text, tenant, None, published)[0] == Found()


def test_a_replica_without_a_folder_takes_nothing_of_it() -> None:
    published = {**two_with_a_folder(), 2: Published(IDENTITY, None), 3: Published(None, None)}
    publish(published[0], disk=coming(entry(0, 48)))
    publish(published[2], disk=coming(entry(0, 80)))
    publish(published[3], host=coming(entry(0, 80)))
    found = Texts(SECRET).found(TEXT, None, None, published)
    assert [found[index].in_tiers for index in range(4)] == [48, 48, 0, 0]


@pytest.mark.parametrize(
    ("found", "waiting", "chosen"),
    [
        ({0: Found(0, 900), 1: Found(900, 900)}, {0: 0, 1: 0}, 1),  # the pools before a tier
        ({0: Found(0, 900), 1: Found(0, 0)}, {0: 0, 1: 0}, 0),  # a tier before computing
        ({0: Found(0, 900), 1: Found(900, 900)}, {0: 0, 1: 100}, 0),  # and before a short wait
        ({0: Found(0, 900), 1: Found(900, 900)}, {0: 0, 1: 50}, 1),
        ({0: Found(0, 900), 1: Found(500, 500)}, {0: 0, 1: 0}, 0),
        ({0: Found(0, 900), 1: Found(880, 880)}, {0: 0, 1: 0}, 1),
    ],
)
def test_a_token_of_a_tier_costs_a_little(found: dict[int, Found], waiting: dict[int, int], chosen: int) -> None:
    costs = {index: own_cost(1000, each) for index, each in found.items()}
    assert choose(costs, {index: Work(0, waiting[index]) for index in found}, 8) == chosen
