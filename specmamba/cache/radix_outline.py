"""The shape of the prefix cache's tree, for pictures of it: lengths, states, hits and locks, but no tokens."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from specmamba.cache.radix_node import Node, Root
from specmamba.cache.radix_tree import RadixTree


@dataclass(frozen=True, slots=True)
class OutlineNode:
    """A node as it is drawn."""

    depth: int  # 0 for a root
    start: int
    end: int
    has_state: bool  # False for a root and for a tombstone
    hits: int  # requests whose match ended here
    locks: int  # of its KV: running requests that stand on it or below
    state_locks: int
    age: int  # uses of any node since its last one


@dataclass(frozen=True, slots=True)
class Outline:
    """A tree from the most recent branch on, every node after its parent."""

    nodes: tuple[OutlineNode, ...]
    num_left: int  # that the tree has besides


def outline(tree: RadixTree, max_nodes: int) -> Outline:
    """At most ``max_nodes`` nodes, roots counted. Nothing below them is looked at: the engine waits meanwhile."""
    roots = islice((root for root in reversed(tree.roots.values()) if root not in tree.idle_roots), max_nodes)
    nodes = tuple(islice(_walk(list(roots), tree.recency.clock, max_nodes), max_nodes))
    return Outline(nodes, tree.num_nodes + len(tree.roots) - len(tree.idle_roots) - len(nodes))


def _walk(roots: list[Root], clock: int, max_children: int) -> Iterator[OutlineNode]:
    todo: list[tuple[int, Node]] = [(0, root) for root in reversed(roots)]
    while todo:
        depth, node = todo.pop()
        yield OutlineNode(
            depth,
            node.start,
            node.end,
            node.state_slot is not None,
            node.hits,
            node.kv_locks,
            node.state_locks,
            0 if node.kv_locks or isinstance(node, Root) else clock - node.last_access,
        )
        youngest = heapq.nlargest(max_children, node.children.values(), key=_recency)
        todo += ((depth + 1, child) for child in reversed(youngest))


def _recency(node: Node) -> tuple[bool, int]:
    """Locked nodes are in use, and come first."""
    return node.kv_locks > 0, node.last_access
