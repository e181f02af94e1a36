"""Views of the prefix cache: its statistics, its tree as text and as an outline, and a check of its invariants."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice, pairwise

import numpy as np

from specmamba.cache.prefix.node import MAX_EVICTED_CHILDREN, MISS_REASONS, Match, MissReason, Node, Root
from specmamba.cache.prefix.radix_tree import MAX_IDLE_ROOTS, RadixTree
from specmamba.cache.state_pool import PREFIX_CACHE


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
        rate = self.hit_tokens / self.query_tokens if self.query_tokens else 0.0
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


def without_salts(misses: Mapping[MissReason, int]) -> dict[MissReason, int]:
    """The misses by reason, without telling whether another salt has the text: that would reveal the text."""
    never = misses["never_stored"] + misses["salt"]
    return {**misses, "never_stored": never, "salt": 0}


@dataclass(frozen=True, slots=True)
class OutlineNode:
    """A node of the drawing. It has no tokens: texts of clients are not shown."""

    depth: int  # 0 for a root
    start: int
    end: int
    has_state: bool  # False for a root and for a tombstone
    hits: int  # requests whose match ended here
    locks: int  # KV locks: running requests that use this node or one below it
    state_locks: int
    age: int  # accesses of any node since its last one, or only of those shown; 0 for a root and while it is locked


@dataclass(frozen=True, slots=True)
class Outline:
    """The shape of a tree, the most recent branches first, every node after its parent."""

    nodes: tuple[OutlineNode, ...]
    num_left: int  # nodes that are not among ``nodes``; 0 in the view of one tenant


def outline(tree: RadixTree, max_nodes: int, view: View = WHOLE) -> Outline:
    """The most recent ``max_nodes`` nodes of a tree, roots counted, in the order of ``_recent_first``."""
    shown = list(_recent_first(tree, max_nodes, view))
    ages = _ages(tree, [node for _, node in shown], view)
    nodes = tuple(_outline_node(depth, node, age) for (depth, node), age in zip(shown, ages, strict=True))
    return Outline(nodes, _num_visible(tree) - len(nodes) if view.is_whole else 0)


def _ages(tree: RadixTree, nodes: Sequence[Node], view: View) -> list[int]:
    """The age of each node. In a tenant's view only accesses of nodes that are shown count, not those of others."""
    idle = [node for node in nodes if not (node.kv_locks or isinstance(node, Root))]
    if view.is_whole:
        ages = {node: tree.recency.clock - node.last_access for node in idle}
    else:
        newest_first = sorted(idle, key=lambda node: node.last_access, reverse=True)
        ages = {node: age for age, node in enumerate(newest_first)}
    return [ages.get(node, 0) for node in nodes]


def _outline_node(depth: int, node: Node, age: int) -> OutlineNode:
    has_state = node.state_slot is not None
    return OutlineNode(depth, node.start, node.end, has_state, node.hits, node.kv_locks, node.state_locks, age)


def render_tree(tree: RadixTree, max_nodes: int, view: View = WHOLE) -> str:
    """One line per node, indented by depth, the most recent branches first; at most ``max_nodes`` nodes.

    A salt is a secret between a client and the server, so only a digest of it is shown.
    """
    shown = list(_recent_first(tree, max_nodes, view))
    ages = _ages(tree, [node for _, node in shown], view)
    lines = ["  " * depth + _line(node, age, view) for (depth, node), age in zip(shown, ages, strict=True)]
    if view.is_whole and (num_left := _num_visible(tree) - len(lines)):
        lines.append(f"... and {num_left} more")
    return "\n".join(lines) if lines else "empty"


def _recent_first(tree: RadixTree, max_nodes: int, view: View) -> Iterator[tuple[int, Node]]:
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
        "hit_rate": stats.hit_tokens / stats.query_tokens if stats.query_tokens else 0.0,
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


def check_tree(tree: RadixTree, row_pages: dict[int, int] | None) -> None:
    """Recompute from the nodes everything that the tree keeps up to date, and compare.

    Args:
        tree: whose pages and states are held by its nodes and by rows of the request table only.
        row_pages: how many rows hold (and pin) each page; None: unknown, then a page may have more holders and pins
            than the nodes account for.

    Raises:
        RuntimeError: an invariant is violated; the message names the first one found.
    """
    nodes = list(tree.nodes())
    for node in nodes:
        _check_links(tree, node)
        _check_locks(node)
    _check_lists(tree, nodes)
    _check_states(tree, nodes)
    _check_pages(tree, nodes, row_pages)
    _check_counts(tree, nodes)


def _require(condition: bool, *message: object) -> None:
    if not condition:
        raise RuntimeError("prefix cache: " + " ".join(map(str, message)))


def _check_links(tree: RadixTree, node: Node) -> None:
    for first_token, child in node.children.items():
        _require(child.parent is node, child, "is a child of", node, "but its parent is", child.parent)
        _require(len(child.key) > 0, child, "has an empty edge")
        _require(int(child.key[0]) == first_token, child, "is stored under token", first_token, "not its first")
        _require(child.start == node.end, child, "does not start where", node, "ends")
        _require(first_token not in node.evicted, node, "has the child", child, "and remembers it as evicted")
    _require(node.end - node.start == len(node.key) == len(node.slots), node, "has another length than its tokens")
    _require(len(node.evicted) <= MAX_EVICTED_CHILDREN, node, "remembers too many evicted children")
    if isinstance(node, Root):
        found = tree.roots.get((node.tenant, node.extra_key))
        _require(found is node, "a root is stored under another salt than its own")
        _require((node.end, node.parent, node.state_slot) == (0, None, None), "a root has tokens, a parent or a state")
        return
    _require(not node.is_useless, node, "is an unlocked leaf without a state")


def _check_locks(node: Node) -> None:
    below = sum(child.kv_locks for child in node.children.values())
    expected = node.users + below
    _require(node.kv_locks == expected, node, "has", node.kv_locks, "locks, and", expected, "are expected")
    _require(0 <= node.state_locks <= node.users, node, "has", node.state_locks, "state locks,", node.users, "locks")
    _require(not node.state_locks or node.state_slot is not None, node, "has state locks and no state")


def _check_lists(tree: RadixTree, nodes: list[Node]) -> None:
    edges = [node for node in nodes if not isinstance(node, Root)]
    recency = tree.recency
    _same("the list of evictable nodes", recency.nodes, [node for node in edges if not node.kv_locks])
    with_state = [node for node in edges if node.state_slot is not None]
    _same("the list of evictable states", recency.states, [node for node in with_state if not node.state_locks])
    idle: list[Node] = [node for node in nodes if isinstance(node, Root) and not node.children and not node.kv_locks]
    _same("the list of idle roots", tree.idle_roots, idle)
    _require(len(idle) <= MAX_IDLE_ROOTS, "too many idle roots are kept")
    _ascending("the list of evictable nodes", [node.last_access for node in recency.nodes], recency.clock)
    _ascending("the list of evictable states", [node.state_access for node in recency.states], recency.clock)
    for node in recency.nodes:
        parent = node.parent
        in_order = parent not in recency.nodes or (parent is not None and parent.last_access > node.last_access)
        _require(in_order, node, "is more recent than its parent")


def _same(what: str, found: Iterable[Node], due: list[Node]) -> None:
    extra, missing = set(found) - set(due), set(due) - set(found)
    _require(not extra and not missing, what, "has wrongly", extra or "nothing", "and lacks", missing or "nothing")


def _ascending(what: str, access: list[int], clock: int) -> None:
    _require(all(a < b for a, b in pairwise([*access, clock + 1])), what, "is not in the order of access")


def _check_states(tree: RadixTree, nodes: list[Node]) -> None:
    with_state = {node for node in nodes if node.state_slot is not None}
    slots = {node.state_slot: node for node in with_state}
    _require(len(slots) == len(with_state), "two nodes have one state slot")
    _require(slots == tree.state_nodes, "the index of state slots does not fit the nodes")
    for slot, node in tree.state_nodes.items():
        tree.states.check(slot, PREFIX_CACHE, node.end)


def _check_pages(tree: RadixTree, nodes: list[Node], row_pages: dict[int, int] | None) -> None:
    holders: Counter[int] = Counter(row_pages or {})
    pins: Counter[int] = Counter(row_pages or {})
    for node in nodes:
        due = np.unique(node.slots // tree.page_size)
        _require(np.array_equal(node.pages, due), node, "holds the pages", node.pages, "for slots in", due)
        holders.update(due.tolist())
        if node.kv_locks:
            pins.update(due.tolist())
    allocator, is_exact = tree.allocator, row_pages is not None
    for page in range(1, allocator.num_pages + 1):
        counts = ("holders", allocator.holders(page), holders[page]), ("pins", allocator.pins(page), pins[page])
        for what, found, known in counts:
            fits = found == known if is_exact else found >= known
            _require(fits, "page", page, "has", found, what, "and", known, "are known")
    if is_exact:
        _require(allocator.num_free == allocator.num_pages - len(+holders), "the number of free pages is wrong")
        _require(allocator.num_pinned == len(+pins), "the number of pinned pages is wrong")


def _check_counts(tree: RadixTree, nodes: list[Node]) -> None:
    edges = [node for node in nodes if not isinstance(node, Root)]
    for what, found, due in (
        ("nodes", tree.num_nodes, len(edges)),
        ("tokens", tree.num_tokens, sum(len(node.key) for node in edges)),
        ("locked tokens", tree.num_locked_tokens, sum(len(node.key) for node in edges if node.kv_locks)),
    ):
        _require(found == due, found, what, "are counted, and", due, "are there")
