"""What the prefix cache counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from specmamba.cache.radix_node import MISS_REASONS, Match, MissReason
from specmamba.cache.radix_tree import RadixTree


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What is in the cache now, and what has happened since the start."""

    num_nodes: int  # without roots
    num_tombstones: int
    num_tokens: int
    num_states: int
    num_locked_tokens: int
    query_tokens: int
    hit_tokens: int
    misses: dict[MissReason, int]  # requests by why their hit was not longer
    inserted_tokens: int
    evicted_tokens: int
    evicted_states: int
    duplicate_states: int  # states that were offered for a place that had one


@dataclass(slots=True)
class Counters:
    """The counts of what has happened; ``stats`` adds what is there."""

    query_tokens: int = 0
    hit_tokens: int = 0
    misses: Counter[MissReason] = field(default_factory=Counter)
    inserted_tokens: int = 0
    evicted_tokens: int = 0
    evicted_states: int = 0
    duplicate_states: int = 0

    def count_request(self, num_tokens: int, match: Match) -> None:
        """A request with this many tokens was admitted with this match."""
        self.query_tokens += num_tokens
        self.hit_tokens += match.length
        match.node.hits += 1
        if match.miss is not None:
            self.misses[match.miss] += 1

    def stats(self, tree: RadixTree) -> CacheStats:
        """These counts, and the sizes of the tree."""
        num_states = len(tree.state_nodes)
        return CacheStats(
            num_nodes=tree.num_nodes,
            num_tombstones=tree.num_nodes - num_states,
            num_tokens=tree.num_tokens,
            num_states=num_states,
            num_locked_tokens=tree.num_locked_tokens,
            query_tokens=self.query_tokens,
            hit_tokens=self.hit_tokens,
            misses={reason: self.misses[reason] for reason in MISS_REASONS},
            inserted_tokens=self.inserted_tokens,
            evicted_tokens=self.evicted_tokens,
            evicted_states=self.evicted_states,
            duplicate_states=self.duplicate_states,
        )
