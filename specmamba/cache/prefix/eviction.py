"""What the prefix cache gives up first: recency lists, and the two policies that order them."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from specmamba.cache.prefix.node import Node

PolicyName = Literal["lru", "flops"]
MAX_CANDIDATES = 256
ALPHA = 1.0  # weight of compute saved per byte against recency, both between 0 and 1


class Recency:
    """The nodes that nobody locks, and the states that nobody locks, each from the least recently used on.

    A node is always less recent than its parent, so the first of ``nodes`` is a leaf.
    """

    def __init__(self) -> None:
        self.nodes: OrderedDict[Node, None] = OrderedDict()
        self.states: OrderedDict[Node, None] = OrderedDict()
        self.clock = 0

    def add(self, node: Node) -> None:
        """``node``, which nobody locks any more, is the most recent one now."""
        self._stamp(node)
        self.nodes[node] = None

    def add_state(self, node: Node) -> None:
        """The state of ``node``, which nobody locks any more, is the most recent one now."""
        self.states[node] = None
        self.touch_state(node)

    def touch(self, node: Node) -> None:
        """``node`` and all above it were used; parents end up more recent than their children."""
        for each in node.path():
            if each not in self.nodes:  # locked, as all above it then are, or a root
                break
            self._stamp(each)
            self.nodes.move_to_end(each)

    def touch_state(self, node: Node) -> None:
        """The state of ``node`` was used."""
        self.clock += 1
        node.state_access = self.clock
        if node in self.states:
            self.states.move_to_end(node)

    def _stamp(self, node: Node) -> None:
        self.clock += 1
        node.last_access = self.clock


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model's prefixes cost to keep and to compute again."""

    state_bytes: int
    kv_bytes_per_token: int
    flops_per_token: float
    flops_per_token_squared: float  # of attention, which looks at all tokens before

    def flops(self, start: int, end: int) -> float:
        """To compute positions start..end-1 from a state at ``start``."""
        return self.flops_per_token * (end - start) + self.flops_per_token_squared * (end**2 - start**2) / 2

    def efficiency(self, node: Node, frees_kv: bool) -> float:
        """Compute that the state of ``node`` saves, over the nearest state above it, per byte that evicting it frees.

        Args:
            node: with a state.
            frees_kv: it goes as a leaf, with its KV and the tombstones that are of no use without it, and not its state
                alone.
        """
        num_tokens = node.end - _kept_above(node).end if frees_kv else 0
        flops = self.flops(_state_above(node).end, node.end)
        return flops / (self.state_bytes + self.kv_bytes_per_token * num_tokens)


class EvictionPolicy(Protocol):
    """In which order things are evicted. What was yielded is evicted before the next is asked for."""

    def leaves(self, recency: Recency) -> Iterator[Node]:
        """Leaves that nobody locks, until there are none; a parent laid bare by an eviction is one too."""
        ...

    def states(self, recency: Recency) -> Iterator[Node]:
        """Nodes with a state that nobody locks, until there are none."""
        ...


class LruPolicy:
    """The least recently used first."""

    def leaves(self, recency: Recency) -> Iterator[Node]:
        while recency.nodes:
            yield next(iter(recency.nodes))

    def states(self, recency: Recency) -> Iterator[Node]:
        while recency.states:
            yield next(iter(recency.states))


class FlopsPolicy:
    """The lowest of recency + ALPHA * compute saved per byte first, both scaled to 0..1 over the candidates.

    After Marconi ("Prefix Caching for the Era of Hybrid LLMs", MLSys 2025, section 4.2), where only nodes with at most
    one child can be evicted; here the state of any node can. The candidates are the MAX_CANDIDATES least recently used,
    so that the work per eviction is bounded; they are judged once, as they were when the first of them was asked for.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def leaves(self, recency: Recency) -> Iterator[Node]:
        while recency.nodes:
            # A leaf that nobody locks has a state; so these are the leaves, and above them what will be leaves.
            with_state = (node for node in recency.nodes if node.state_slot is not None)
            nodes = list(islice(with_state, MAX_CANDIDATES))
            values = [self._costs.efficiency(node, frees_kv=True) for node in nodes]  # none goes before it is a leaf
            order = [nodes[i] for i in _order(values, [node.last_access for node in nodes])]
            rank = {node: r for r, node in enumerate(order)}
            leaves = [r for r, node in enumerate(order) if not node.children]  # ascending, and so a heap
            while leaves:
                node = order[heapq.heappop(leaves)]
                above = _state_above(node)
                yield node
                if above in rank and not above.children:
                    heapq.heappush(leaves, rank[above])

    def states(self, recency: Recency) -> Iterator[Node]:
        while recency.states:
            nodes = list(islice(recency.states, MAX_CANDIDATES))
            values = [self._costs.efficiency(node, not (node.children or node.kv_locks)) for node in nodes]
            yield from [nodes[i] for i in _order(values, [node.state_access for node in nodes])]


def make_policy(name: PolicyName, costs: Costs) -> EvictionPolicy:
    """The policy of ``--cache-eviction``."""
    return LruPolicy() if name == "lru" else FlopsPolicy(costs)


def _order(efficiency: Sequence[float], access: Sequence[int]) -> list[int]:
    """Indices of the candidates [n >= 1], from the one to evict first on."""
    scores = _scaled(np.array(access, dtype=np.float64)) + ALPHA * _scaled(np.array(efficiency, dtype=np.float64))
    return cast(list[int], scores.argsort(kind="stable").tolist())


def _scaled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """From 0 (the lowest) to 1 (the highest) of at least one value; 0 where all are alike."""
    span = values.max() - values.min()
    return (values - values.min()) / span if span > 0 else np.zeros_like(values)


def _state_above(node: Node) -> Node:
    """The nearest node above ``node`` that has a state; the root where there is none."""
    return next(above for above in _above(node) if above.state_slot is not None or above.parent is None)


def _kept_above(node: Node) -> Node:
    """The nearest node above ``node`` that keeps its KV when ``node`` and all below it are evicted."""
    above = _state_above(node)
    return next((each for each in _above(node) if each is above or len(each.children) > 1 or each.kv_locks), above)


def _above(node: Node) -> Iterator[Node]:
    """The nodes above ``node``, from its parent to the root."""
    return islice(node.path(), 1, None)
