"""The prefix cache for people (``GET /cache?format=text``) and for programs (``GET /cache``)."""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import asdict
from itertools import islice

from specmamba.cache.radix_node import Node, Root
from specmamba.cache.radix_stats import CacheStats
from specmamba.cache.radix_tree import RadixTree


def render_tree(tree: RadixTree, max_nodes: int) -> str:
    """One line per node, indented by depth, the most recent branches first; at most ``max_nodes`` of them.

    A salt is a secret between a client and the server, so only a digest of it is shown. Nodes below those that are
    shown are not looked at: the engine waits meanwhile.
    """
    roots = (root for root in reversed(tree.roots.values()) if root not in tree.idle_roots)
    todo: list[tuple[int, Node]] = [(0, root) for root in islice(roots, max_nodes)]
    todo.reverse()
    lines: list[str] = []
    while todo and len(lines) < max_nodes:
        depth, node = todo.pop()
        lines.append("  " * depth + _line(node, tree.recency.clock))
        youngest = heapq.nlargest(max_nodes - len(lines), node.children.values(), key=_recency)
        todo += ((depth + 1, child) for child in reversed(youngest))  # and so the youngest is taken first
    left = tree.num_nodes + len(tree.roots) - len(tree.idle_roots) - len(lines)
    if left:
        lines.append(f"... and {left} more")
    return "\n".join(lines) if lines else "empty"


def summarize(tree: RadixTree, stats: CacheStats) -> dict[str, object]:
    """Statistics and the sizes that they are to be seen against, ready for JSON."""
    allocator, states = tree.allocator, tree.states
    return {
        **asdict(stats),
        "num_salts": sum(1 for root in tree.roots.values() if root.children),
        "hit_rate": stats.hit_tokens / stats.query_tokens if stats.query_tokens else 0.0,
        "page_size": tree.page_size,
        "num_pages": allocator.num_pages,
        "num_free_pages": allocator.num_free,
        "num_evictable_pages": allocator.num_evictable,
        "num_state_slots": states.num_slots,
        "num_free_state_slots": states.num_free,
        "num_evictable_states": len(tree.recency.states),
    }


def _line(node: Node, clock: int) -> str:
    if isinstance(node, Root):
        parts = ["no salt" if node.extra_key is None else f"salt {_digest(node.extra_key)}"]
    else:
        state = "tombstone" if node.state_slot is None else f"state {node.state_slot}"
        parts = [f"[{node.start}:{node.end})", _count(node.end - node.start, "token"), state]
    parts += [_count(node.kv_locks, "lock")] if node.kv_locks else []
    parts += [_count(node.state_locks, "state lock")] if node.state_locks else []
    parts += [_count(node.hits, "hit")] if node.hits else []
    parts += [] if isinstance(node, Root) or node.kv_locks else [f"age {clock - node.last_access}"]
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _recency(node: Node) -> tuple[bool, int]:
    """Locked nodes are in use, and come first."""
    return node.kv_locks > 0, node.last_access


def _digest(extra_key: str) -> str:
    # A key from JSON can have half of a surrogate pair in it, which strict UTF-8 has no bytes for.
    return hashlib.sha256(extra_key.encode("utf-8", "surrogatepass")).hexdigest()[:8]
