"""Which replica gets a request: the one that has the least to compute before it can answer.

A hybrid model goes on from where a recurrent state was left, not from any cached token. So replicas publish the hashes
of exactly those beginnings of texts whose state they hold, and a prompt is compared with them. What their tiers hold,
in host memory or in a folder that several may share, counts nearly as much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specmamba.cache.tiers.entry_index import Stored
from specmamba.cache.tiers.prefix_hash import PrefixHasher
from specmamba.replicas.published_entries import Found, PublishedEntries, TierIdentity

# Tokens of a prompt whose computing takes about as long as a running request takes from the others: it shares their
# steps. A guess; it matters between replicas that would compute about as much.
RUNNING_COST = 32
# Tokens whose computing takes about as long as one token takes from a tier. A guess too: it lets a replica that has a
# prefix in its pools go before one that has to load it, and one that loads go before one that computes.
LOADING_COST = 1 / 16
# Tokens that could be computed while a request waits for another one to end, where a replica has as many as it runs at
# a time. A guess, tried on simulated loads: it lets an idle replica compute a prefix for which others would wait.
WAITING_COST = 1000


@dataclass(frozen=True, slots=True)
class Work:
    """What a replica has to do."""

    num_requests: int = 0
    num_uncached: int = 0  # tokens of their prompts that are yet to be computed

    @property
    def queued_tokens(self) -> int:
        """The tokens, and what its requests take as tokens."""
        return self.num_uncached + RUNNING_COST * self.num_requests

    def and_one(self, num_uncached: int) -> Work:
        """This, and one more request."""
        return Work(self.num_requests + 1, self.num_uncached + num_uncached)


class PublishedPrefixes:
    """The beginnings of texts that one replica can go on from, by length and keyed hash."""

    def __init__(self) -> None:
        self._digests: dict[int, set[str]] = defaultdict(set)

    @property
    def lengths(self) -> Collection[int]:
        """Lengths in tokens that there are."""
        return self._digests.keys()

    def update(self, left: Iterable[tuple[int, str]], gone: Iterable[tuple[int, str]]) -> None:
        """Add what was left in the replica's cache, and drop what was evicted: length and hash of each."""
        for length, digest in gone:
            self._digests[length].discard(digest)
            if not self._digests[length]:
                del self._digests[length]
        for length, digest in left:
            self._digests[length].add(digest)

    def has(self, length: int, digest: str) -> bool:
        """Whether a beginning is there."""
        return digest in self._digests.get(length, ())


class Published:
    """What one replica can go on from: its pools, and its tiers."""

    def __init__(self, identity: TierIdentity | None, folder: PublishedEntries | None) -> None:
        """Know nothing yet.

        Args:
            identity: of its tiers; None: it has none.
            folder: what the replicas of its folder have published, where it has one.
        """
        self.prefixes = PublishedPrefixes()
        self.host = None if identity is None else PublishedEntries(identity)
        self.folder = folder

    def update(self, message: Mapping[str, Any]) -> None:
        """Take in what it says has come and gone."""
        self.prefixes.update(map(tuple, message["left"]), map(tuple, message["gone"]))
        for name, entries in (("host", self.host), ("disk", self.folder)):
            if entries is not None:
                entries.update(message.get(name, ()))


class Texts:
    """Finds what replicas have of prompts."""

    def __init__(self, secret: bytes) -> None:
        """``secret``: the key of all hashes, which the replicas have too."""
        self._secret = secret

    def found(
        self, prompt: Sequence[int], tenant: str | None, extra_key: str | None, published: Mapping[int, Published]
    ) -> dict[int, Found]:
        """What each replica has of a prompt; ``published`` by replica."""
        tokens = np.array(prompt[:-1], dtype=np.int64)  # the last token is always run
        in_pools = self._in_pools(PrefixHasher(self._secret, tenant, extra_key, tokens), published)
        chains: dict[PublishedEntries, list[Stored]] = {}
        hashers: dict[TierIdentity, PrefixHasher] = {}
        found = {index: Found(number, number) for index, number in in_pools.items()}
        for index, each in published.items():
            for entries in (each.host, each.folder):
                if entries is None or not len(entries):
                    continue
                if entries not in chains:
                    identity = entries.identity
                    if identity not in hashers:
                        hashers[identity] = PrefixHasher(identity.secret, tenant, extra_key, tokens)
                    chains[entries] = entries.find(hashers[identity])
                found[index] = found[index].or_chain(chains[entries], entries is each.folder)
        return found

    @staticmethod
    def _in_pools(text: PrefixHasher, published: Mapping[int, Published]) -> dict[int, int]:
        prefixes = {index: each.prefixes for index, each in published.items()}
        lengths = sorted({n for each in prefixes.values() for n in each.lengths if n <= text.num_tokens})
        found = dict.fromkeys(published, 0)
        for length in lengths:
            digest = text.digest(length).hex()
            found |= {index: length for index, each in prefixes.items() if each.has(length, digest)}
        return found


def own_cost(num_prompt: int, found: Found) -> float:
    """What a prompt takes at a replica, in tokens that are computed."""
    return num_prompt - found.in_tiers + LOADING_COST * (found.in_tiers - found.in_pools)


def choose(costs: Mapping[int, float], work: Mapping[int, Work], most_running: int) -> int:
    """Choose a replica.

    Args:
        costs: what a prompt takes at each, in tokens that are computed (``own_cost``).
        work: what each has to do already.
        most_running: how many requests one runs at a time; those above wait until others have ended.

    Returns:
        The replica with the fewest tokens to compute up to the end of this prompt, running requests counted as
        ``RUNNING_COST`` and those that end before as ``WAITING_COST``; of equal ones that with the fewest requests,
        then the first.
    """

    def cost(index: int) -> tuple[float, int, int]:
        num_requests = work[index].num_requests
        num_before = max(0, num_requests + 1 - most_running)
        return costs[index] + work[index].queued_tokens + WAITING_COST * num_before, num_requests, index

    return min(costs, key=cost)
