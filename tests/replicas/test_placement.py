"""Where requests go: what replicas publish, what is compared with a prompt, and what is weighed against it."""

from __future__ import annotations

import numpy as np
import pytest

from specmamba.cache.tiers.prefix_hash import PrefixHasher
from specmamba.replicas.placement import RUNNING_COST, PublishedPrefixes, Texts, Work, choose

SECRET = b"k" * 32
TEXT = list(range(100, 200))


def digest(length: int, tenant: str | None = None, salt: str | None = None, text: list[int] = TEXT) -> tuple[int, str]:
    hasher = PrefixHasher(SECRET, tenant, salt, np.array(text, dtype=np.int64))
    return length, hasher.digest(length).hex()


def prefixes(*left: tuple[int, str]) -> PublishedPrefixes:
    found = PublishedPrefixes()
    found.update(left, ())
    return found


def test_the_longest_beginning_with_a_state_counts() -> None:
    published = {0: prefixes(digest(16), digest(64)), 1: prefixes(digest(80)), 2: prefixes()}
    assert Texts(SECRET).resumable(TEXT, None, None, published) == {0: 64, 1: 80, 2: 0}


def test_the_last_token_is_always_computed() -> None:
    published = {0: prefixes(digest(64), digest(100))}
    assert Texts(SECRET).resumable(TEXT, None, None, published) == {0: 64}


@pytest.mark.parametrize(("tenant", "salt", "secret"), [("a", None, SECRET), (None, "s", SECRET), (None, None, b"x")])
def test_tenants_salts_and_servers_find_nothing_of_each_other(
    tenant: str | None, salt: str | None, secret: bytes
) -> None:
    assert Texts(secret).resumable(TEXT, tenant, salt, {0: prefixes(digest(64))}) == {0: 0}
    own = {0: prefixes(digest(64, tenant, salt))}
    assert Texts(SECRET).resumable(TEXT, tenant, salt, own) == {0: 64}


def test_another_text_of_the_same_length_is_no_beginning() -> None:
    other = [*TEXT[:50], 7, *TEXT[51:]]
    assert Texts(SECRET).resumable(other, None, None, {0: prefixes(digest(40), digest(64))}) == {0: 40}


def test_what_is_evicted_is_forgotten() -> None:
    found = prefixes(digest(16), digest(64))
    found.update([digest(80)], [digest(64), digest(16)])
    assert list(found.lengths) == [80]
    assert not found.has(*digest(64))


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
    ],
)
def test_the_choice(resumable: dict[int, int], waiting: dict[int, int], running: dict[int, int], chosen: int) -> None:
    assert choose(1000, resumable, {index: Work(running[index], waiting[index]) for index in resumable}) == chosen
