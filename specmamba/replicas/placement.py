"""Which replica gets a request: the one that has the least to compute before it can answer.

A hybrid model goes on from where a recurrent state was left, not from any cached token. So replicas publish the hashes
of exactly those beginnings of texts whose state they hold, and a prompt is compared with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specmamba.cache.tiers.prefix_hash import PrefixHasher

# Tokens of a prompt whose computing takes about as long as a running request takes from the others: it shares their
# steps. A guess; it matters between replicas that would compute about as much.
RUNNING_COST = 32


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


class Texts:
    """Finds what replicas have of prompts."""

    def __init__(self, secret: bytes) -> None:
        """``secret``: the key of all hashes, which the replicas have too."""
        self._secret = secret

    def resumable(
        self,
        prompt: Sequence[int],
        tenant: str | None,
        extra_key: str | None,
        published: Mapping[int, PublishedPrefixes],
    ) -> dict[int, int]:
        """Tokens of a prompt that each replica need not compute; ``published`` by replica."""
        longest = len(prompt) - 1  # the last token is always run
        lengths = sorted({n for prefixes in published.values() for n in prefixes.lengths if n <= longest})
        found = dict.fromkeys(published, 0)
        if not lengths:
            return found
        hasher = PrefixHasher(self._secret, tenant, extra_key, np.array(prompt[: lengths[-1]], dtype=np.int64))
        for length in lengths:
            digest = hasher.digest(length).hex()
            found |= {index: length for index, prefixes in published.items() if prefixes.has(length, digest)}
        return found


def choose(num_prompt: int, resumable: Mapping[int, int], work: Mapping[int, Work]) -> int:
    """Choose a replica.

    Args:
        num_prompt: tokens of the prompt.
        resumable: tokens of it that each replica need not compute.
        work: what each has to do already.

    Returns:
        The replica with the fewest tokens to compute up to the end of this prompt, running requests counted as
        ``RUNNING_COST``; of equal ones that with the fewest requests, then the first.
    """

    def cost(index: int) -> tuple[int, int, int]:
        own = num_prompt - resumable[index]
        return own + work[index].queued_tokens, work[index].num_requests, index

    return min(resumable, key=cost)
