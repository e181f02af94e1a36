"""The order of eviction from the prefix cache: lists by recency, and the policies LRU and compute saved per byte."""

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
    """The unlocked nodes and the unlocked states, each ordered from the least recently used on.

    A node is always less recent than its parent, so the first of ``nodes`` is a leaf. ``passed`` are those of
    ``states`` that go first, in the order in which they were passed (``MambaRadixCache.pass_state``).
    """

    def __init__(self) -> None:
        self.nodes: OrderedDict[Node, None] = OrderedDict()
        self.states: OrderedDict[Node, None] = OrderedDict()
        self.passed: OrderedDict[Node, None] = OrderedDict()
        self.clock = 0

    def add(self, node: Node) -> None:
        """Add a node whose last lock was released, as the most recent one."""
        self._stamp(node)
        self.nodes[node] = None

    def add_state(self, node: Node) -> None:
        """Add the state of ``node``, which is not locked (any more), as the most recent one."""
        self.states[node] = None
        self.touch_state(node)

    def touch(self, node: Node) -> None:
        """Mark ``node`` and all nodes above it as used; parents become more recent than their children."""
        for each in node.path():
            if each not in self.nodes:  # a root, or locked; then all nodes above it are locked too
                break
            self._stamp(each)
            self.nodes.move_to_end(each)

    def touch_state(self, node: Node) -> None:
        """Mark the state of ``node`` as used."""
        self.clock += 1
        node.state_access = self.clock
        self.passed.pop(node, None)
        if node in self.states:
            self.states.move_to_end(node)

    def remove_state(self, node: Node) -> None:
        """Remove the state of ``node``, which is locked or goes away; it may have been removed before."""
        self.states.pop(node, None)
        self.passed.pop(node, None)

    def pass_state(self, node: Node) -> None:
        """Let the state of ``node`` go before others, unless it is locked, until it is used again."""
        if node in self.states:
            self.passed[node] = None

    def _stamp(self, node: Node) -> None:
        self.clock += 1
        node.last_access = self.clock


@dataclass(frozen=True, slots=True)
class Costs:
    """What the prefixes of a model cost in memory, and in compute to run them again."""

    state_bytes: int
    kv_bytes_per_token: int
    flops_per_token: float
    flops_per_token_squared: float  # of attention, whose work per token grows with the number of tokens before it

    def flops(self, start: int, end: int) -> float:
        """FLOPs to compute positions start..end-1 from a state at ``start``."""
        return self.flops_per_token * (end - start) + self.flops_per_token_squared * (end**2 - start**2) / 2

    def efficiency(self, node: Node, frees_kv: bool) -> float:
        """FLOPs that the state of ``node`` saves over the nearest state above it, per byte that evicting it frees.

        Args:
            node: has a state.
            frees_kv: the node is evicted as a leaf: with its state, its KV and the tombstones that only lead to it.
                False: its state alone is evicted.
        """
        num_tokens = node.end - _kept_above(node).end if frees_kv else 0
        flops = self.flops(_state_above(node).end, node.end)
        return flops / (self.state_bytes + self.kv_bytes_per_token * num_tokens)


class EvictionPolicy(Protocol):
    """The order of eviction. The caller evicts each node that was yielded before it asks for the next one."""

    def leaves(self, recency: Recency) -> Iterator[Node]:
        """Iterate over unlocked leaves until there are none; parents become leaves when their last child goes."""
        ...

    def states(self, recency: Recency) -> Iterator[Node]:
        """Iterate over nodes with an unlocked state until there are none."""
        ...

    def takes_leaf(self, leaf: Node, node: Node) -> bool:
        """Whether a leaf is evicted before the state of a node, where either makes room."""
        ...


class LruPolicy:
    """Evict passed states first, then the least recently used leaves and states."""

    def leaves(self, recency: Recency) -> Iterator[Node]:
        while recency.nodes:
            yield next(iter(recency.nodes))

    def states(self, recency: Recency) -> Iterator[Node]:
        while recency.states:
            yield next(iter(recency.passed or recency.states))

    def takes_leaf(self, leaf: Node, node: Node) -> bool:
        return leaf.last_access < node.state_access


class FlopsPolicy:
    """Evict the lowest recency + ALPHA * compute saved per byte first, both scaled to 0..1 over the candidates.

    After Marconi ("Prefix Caching for the Era of Hybrid LLMs", MLSys 2025, section 4.2), where only nodes with at most
    one child can be evicted; here the state of any node can. The candidates are the MAX_CANDIDATES least recently used,
    so that the work per eviction is bounded. They are scored once, when the first of them is asked for.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def leaves(self, recency: Recency) -> Iterator[Node]:
        while recency.nodes:
            # Unlocked leaves always have a state, so these candidates are the leaves and nodes that may become leaves.
            with_state = (node for node in recency.nodes if node.state_slot is not None)
            nodes = list(islice(with_state, MAX_CANDIDATES))
            values = [self._costs.efficiency(node, frees_kv=True) for node in nodes]  # each is a leaf when evicted
            order = [nodes[i] for i in _order(values, [node.last_access for node in nodes])]
            rank = {node: r for r, node in enumerate(order)}
            leaves = [r for r, node in enumerate(order) if not node.children]  # ascending, which is a valid heap
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

    def takes_leaf(self, leaf: Node, node: Node) -> bool:
        frees_kv = not (node.children or node.kv_locks)
        values = self._costs.efficiency(leaf, frees_kv=True), self._costs.efficiency(node, frees_kv)
        return _order(values, (leaf.last_access, node.state_access))[0] == 0


class Victims:
    """Leaves and states in one order of eviction, for pools that take memory from each other.

    As with a policy the caller evicts each one before it asks for the next.
    """

    def __init__(self, policy: EvictionPolicy, recency: Recency) -> None:
        self._policy, self._recency = policy, recency
        self._leaves, self._states = policy.leaves(recency), policy.states(recency)
        self._leaf: Node | None = None  # the next ones
        self._node: Node | None = None

    def next(self, only_leaves: bool) -> tuple[Node, bool] | None:
        """Return a node and whether it is evicted as a leaf, else its state alone; None: nothing is left."""
        while (self._leaf is None or not self._is_leaf(self._leaf)) and self._recency.nodes:
            self._leaf = next(self._leaves)
        while (self._node is None or self._node not in self._recency.states) and self._recency.states:
            self._node = next(self._states)
        leaf = self._leaf if self._leaf is not None and self._is_leaf(self._leaf) else None
        node = self._node if self._node in self._recency.states and not only_leaves else None
        if leaf is not None and (node is None or self._takes_leaf(leaf, node)):
            return leaf, True
        return None if node is None else (node, False)

    def _takes_leaf(self, leaf: Node, node: Node) -> bool:
        return node not in self._recency.passed and self._policy.takes_leaf(leaf, node)

    def _is_leaf(self, node: Node) -> bool:
        return node in self._recency.nodes and not node.children


def make_policy(name: PolicyName, costs: Costs) -> EvictionPolicy:
    """Return the policy that ``--cache-eviction`` names."""
    return LruPolicy() if name == "lru" else FlopsPolicy(costs)


def _order(efficiency: Sequence[float], access: Sequence[int]) -> list[int]:
    """Return the indices of the candidates [n >= 1] in the order of eviction."""
    scores = _scaled(np.array(access, dtype=np.float64)) + ALPHA * _scaled(np.array(efficiency, dtype=np.float64))
    return cast(list[int], scores.argsort(kind="stable").tolist())


def _scaled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale values [n >= 1] linearly to 0 (the lowest) ... 1 (the highest); all 0 where they are equal."""
    span = values.max() - values.min()
    return (values - values.min()) / span if span > 0 else np.zeros_like(values)


def _state_above(node: Node) -> Node:
    """Return the nearest node above ``node`` that has a state, or the root."""
    return next(above for above in _above(node) if above.state_slot is not None or above.parent is None)


def _kept_above(node: Node) -> Node:
    """Return the nearest node above ``node`` that keeps its KV when ``node`` and all nodes below it are evicted."""
    above = _state_above(node)
    return next((each for each in _above(node) if each is above or len(each.children) > 1 or each.kv_locks), above)


def _above(node: Node) -> Iterator[Node]:
    """Iterate over the nodes above ``node``, from its parent to the root."""
    return islice(node.path(), 1, None)
