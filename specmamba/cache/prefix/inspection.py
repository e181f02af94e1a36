"""Views of the prefix cache: its statistics, its tree as text and as an outline."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice

from specmamba.cache.prefix.node import MISS_REASONS, Match, MissReason, Node, Root
from specmamba.cache.prefix.radix_tree import RadixTree


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Sizes of the cache now, and counts since the start."""

    num_nodes: int  # without roots
    num_tombstones: int
    num_tokens: int
    num_states: int
    num_locked_tokens: int
    query_tokens: int
    hit_tokens: int
    misses: dict[MissReason, int]  # requests whose match was not their whole prompt, by reason
    inserted_tokens: int
    evicted_tokens: int
    evicted_states: int
    duplicate_states: int  # states that were offered to a node that had one already


@dataclass(frozen=True, slots=True)
class View:
    """Whose part of the cache is shown: one tenant's, or all of it."""

    tenant: str | None = None
    is_whole: bool = False

    def shows(self, tenant: str | None) -> bool:
        return self.is_whole or tenant == self.tenant


WHOLE = View(is_whole=True)


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Figures of one tenant's requests since the start.

    They do not say whether another salt has a prefix: "never_stored" includes these misses.
    """

    query_tokens: int
    hit_tokens: int
    hit_rate: float
    misses: dict[MissReason, int]


@dataclass(slots=True)
class Counters:
    """Counts since the start; ``stats`` adds the sizes of the tree."""

    query_tokens: int = 0
    hit_tokens: int = 0
    misses: Counter[MissReason] = field(default_factory=Counter)
    inserted_tokens: int = 0
    evicted_tokens: int = 0
    evicted_states: int = 0
    duplicate_states: int = 0

    def count_request(self, num_tokens: int, match: Match) -> None:
        """Count an admitted request with this many tokens and this match."""
        self.query_tokens += num_tokens
        self.hit_tokens += match.length
        if match.miss is not None:
            self.misses[match.miss] += 1

    def of_requests(self) -> RequestStats:
        """Return the counts that a tenant may see."""
        misses = without_salts({reason: self.misses[reason] for reason in MISS_REASONS})
        rate = hit_rate(self.hit_tokens, self.query_tokens)
        return RequestStats(self.query_tokens, self.hit_tokens, rate, misses)

    def stats(self, tree: RadixTree) -> CacheStats:
        """Return these counts with the sizes of the tree."""
        num_states = len(tree.state_nodes)
        return CacheStats(
            num_nodes=tree.num_nodes,
            num_tombstones=tree.num_nodes - num_states,
            num_tokens=tree.num_tokens,
            num_states=num_states,
            num_locked_tokens=tree.num_locked_tokens,
            misses={reason: self.misses[reason] for reason in MISS_REASONS},
            **{count.name: getattr(self, count.name) for count in fields(self) if count.name != "misses"},
        )


def hit_rate(hit_tokens: int, query_tokens: int) -> float:
    """The share of tokens that hits spared; 0 before the first request."""
    return hit_tokens / query_tokens if query_tokens else 0.0


def without_salts(misses: Mapping[MissReason, int]) -> dict[MissReason, int]:
    """The misses by reason, without telling whether another salt has the text: that would reveal the text."""
    never = misses["never_stored"] + misses["salt"]
    return {**misses, "never_stored": never, "salt": 0}


MAX_BEGINNING = 24  # tokens of a node that its drawing shows


@dataclass(frozen=True, slots=True)
class OutlineNode:
    """A node of the drawing, with the first tokens of its piece of text."""

    depth: int  # 0 for a root
    start: int
    end: int
    has_state: bool  # False for a root and for a tombstone
    hits: int  # requests whose match ended here
    locks: int  # KV locks: running requests that use this node or one below it
    state_locks: int
    age: int  # accesses of any node since its last one, or only of those shown; 0 for a root and while it is locked
    beginning: tuple[int, ...] | None  # at most ``MAX_BEGINNING`` tokens; None: a text under a salt in a tenant's view
    tiers: tuple[str, ...] = ()  # below the pools, that have the text up to its end and the state there


@dataclass(frozen=True, slots=True)
class Outline:
    """The shape of a tree, the most recent branches first, every node after its parent."""

    nodes: tuple[OutlineNode, ...]
    num_left: int  # nodes that are not among ``nodes``; 0 in the view of one tenant


Places = Callable[[Sequence[Node]], Mapping[Node, tuple[str, ...]]]


def outline(tree: RadixTree, max_nodes: int, view: View = WHOLE, tiers_of: Places = lambda _: {}) -> Outline:
    """The most recent ``max_nodes`` nodes of a tree, roots counted, parents first, the most recent branch first.

    ``tiers_of``: the tiers below the pools that have nodes, of nodes in this order; those in none may be left out.
    """
    nodes: list[OutlineNode] = []
    shows_texts = True
    shown = _recent_first(tree, max_nodes, view)
    tiers = tiers_of([node for _, node, _ in shown])
    for depth, node, age in shown:
        if isinstance(node, Root):  # the clients of one key may be kept apart by salts
            shows_texts = view.is_whole or node.extra_key is None
        nodes.append(_outline_node(depth, node, age, shows_texts, tiers.get(node, ())))
    return Outline(tuple(nodes), _num_visible(tree) - len(nodes) if view.is_whole else 0)


def _ages(tree: RadixTree, nodes: Sequence[Node], view: View) -> list[int]:
    """The age of each node. In a tenant's view only accesses of nodes that are shown count, not those of others."""
    idle = [node for node in nodes if not (node.kv_locks or isinstance(node, Root))]
    if view.is_whole:
        ages = {node: tree.recency.clock - node.last_access for node in idle}
    else:
        newest_first = sorted(idle, key=lambda node: node.last_access, reverse=True)
        ages = {node: age for age, node in enumerate(newest_first)}
    return [ages.get(node, 0) for node in nodes]


def _outline_node(depth: int, node: Node, age: int, shows_text: bool, tiers: tuple[str, ...]) -> OutlineNode:
    has_state = node.state_slot is not None
    beginning = tuple(node.key[:MAX_BEGINNING].tolist()) if shows_text else None
    return OutlineNode(
        depth, node.start, node.end, has_state, node.hits, node.kv_locks, node.state_locks, age, beginning, tiers
    )


def render_tree(tree: RadixTree, max_nodes: int, view: View = WHOLE) -> str:
    """One line per node, indented by depth, the most recent branches first; at most ``max_nodes`` nodes.

    A salt is a secret between a client and the server, so only a digest of it is shown.
    """
    shown = _recent_first(tree, max_nodes, view)
    lines = ["  " * depth + _line(node, age, view) for depth, node, age in shown]
    if view.is_whole and (num_left := _num_visible(tree) - len(lines)):
        lines.append(f"... and {num_left} more")
    return "\n".join(lines) if lines else "empty"


def _recent_first(tree: RadixTree, max_nodes: int, view: View) -> list[tuple[int, Node, int]]:
    """The nodes that are shown with their depths and ages, in the order of ``_walk``."""
    shown = list(_walk(tree, max_nodes, view))
    ages = _ages(tree, [node for _, node in shown], view)
    return [(depth, node, age) for (depth, node), age in zip(shown, ages, strict=True)]


def _walk(tree: RadixTree, max_nodes: int, view: View) -> Iterator[tuple[int, Node]]:
    """At most ``max_nodes`` nodes with their depths, parents before children, the most recently used branch first.

    The work is bounded by the nodes that are shown and their children, because the engine waits meanwhile.
    """
    busy = (root for root in reversed(tree.roots.values()) if root not in tree.idle_roots)
    roots: Iterator[Node] = (root for root in busy if view.shows(root.tenant))
    todo = [(0, root) for root in islice(roots, max_nodes)][::-1]
    for num_wanted in range(max_nodes, 0, -1):
        if not todo:
            return
        depth, node = todo.pop()
        yield depth, node
        youngest = heapq.nlargest(num_wanted - 1, node.children.values(), key=_recency)
        todo += ((depth + 1, child) for child in reversed(youngest))  # so the youngest is popped first


def _recency(node: Node) -> tuple[bool, int]:
    """Sort key by last use; locked nodes are in use, so they count as the most recent."""
    return node.kv_locks > 0, node.last_access


def _num_visible(tree: RadixTree) -> int:
    """Number of nodes, roots included but for idle ones, which are never shown."""
    return tree.num_nodes + len(tree.roots) - len(tree.idle_roots)


def summarize(tree: RadixTree, stats: CacheStats) -> dict[str, object]:
    """Return statistics and the sizes to compare them with, ready for JSON."""
    allocator, states = tree.allocator, tree.states
    return {
        **asdict(stats),
        "num_salts": sum(1 for root in tree.roots.values() if root.children),
        "hit_rate": hit_rate(stats.hit_tokens, stats.query_tokens),
        "page_size": tree.page_size,
        "num_pages": allocator.num_pages,
        "num_free_pages": allocator.num_free,
        "num_evictable_pages": allocator.num_evictable,
        "num_state_slots": states.num_slots,
        "num_free_state_slots": states.num_free,
        "num_evictable_states": len(tree.recency.states),
    }


def _line(node: Node, age: int, view: View) -> str:
    if isinstance(node, Root):
        parts = ["no salt" if node.extra_key is None else f"salt {_digest(node.extra_key)}"]
        parts += [] if node.tenant is None else [f"tenant {node.tenant[:8]}"]
    else:
        slot = f" {node.state_slot}" if view.is_whole else ""  # slots are those of all tenants
        state = "tombstone" if node.state_slot is None else f"state{slot}"
        parts = [f"[{node.start}:{node.end})", _count(node.end - node.start, "token"), state]
    parts += [_count(node.kv_locks, "lock")] if node.kv_locks else []
    parts += [_count(node.state_locks, "state lock")] if node.state_locks else []
    parts += [_count(node.hits, "hit")] if node.hits else []
    parts += [] if isinstance(node, Root) or node.kv_locks else [f"age {age}"]
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _digest(extra_key: str) -> str:
    # A key from JSON can have half of a surrogate pair in it, which strict UTF-8 has no bytes for.
    return hashlib.sha256(extra_key.encode("utf-8", "surrogatepass")).hexdigest()[:8]
