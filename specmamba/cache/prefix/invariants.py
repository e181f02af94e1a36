"""A check of all that the prefix cache keeps up to date."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from specmamba.cache.prefix.node import MAX_EVICTED_CHILDREN, Node, Root
from specmamba.cache.prefix.radix_tree import MAX_IDLE_ROOTS, RadixTree
from specmamba.cache.state_pool import PREFIX_CACHE


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
    _require(recency.passed.keys() <= recency.states.keys(), "a passed state is not in the list of evictable states")
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
    _same("the list of spare states", tree.spare, [node for node in with_state if node.is_spare])
    for slot, node in tree.state_nodes.items():
        tree.states.check(slot, PREFIX_CACHE, node.end)
        _require(1 <= slot <= tree.states.num_slots, node, "has a state in the slot", slot, "behind the last one")


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
    behind = sum(allocator.holders(page) for page in range(allocator.num_pages + 1, allocator.most_pages + 1))
    _require(not behind, behind, "holders of pages behind the last one")
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
