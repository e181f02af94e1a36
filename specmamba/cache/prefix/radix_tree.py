"""The data structure of the prefix cache: nodes, the pages and states that they hold, and their locks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from specmamba.cache.kv_pool import PageAllocator, Pages
from specmamba.cache.prefix.eviction import Recency
from specmamba.cache.prefix.node import Node, Root, Tokens, TokenSlots, new_root
from specmamba.cache.state_pool import PREFIX_CACHE, StateOwnershipError, StatePool

MAX_IDLE_ROOTS = 1024


class RadixTree:
    """One radix tree per tenant and salt.

    Every method keeps links, page holders and pins, recency lists and counts consistent, or raises before any change.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, states: StatePool) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.states = states
        self.recency = Recency()
        self.roots: dict[tuple[str | None, str | None], Root] = {}  # by tenant and salt
        self.idle_roots: dict[Root, None] = {}  # roots without children and locks; the last one asked for is at the end
        self.state_nodes: dict[int, Node] = {}  # by state slot
        self.spare: dict[Node, None] = {}  # nodes with spare states, the oldest first
        self.num_nodes = 0
        self.num_tokens = 0
        self.num_locked_tokens = 0

    def root(self, extra_key: str | None, tenant: str | None = None) -> Root:
        """Return the root of a tenant's salt. When there are too many idle roots, the oldest ones are dropped."""
        root = self.roots.get((tenant, extra_key))
        if root is None:
            root = self.roots[tenant, extra_key] = new_root(extra_key, tenant)
        self._set_idle(root)
        return root

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes including roots, parents before their children."""
        todo: list[Node] = list(self.roots.values())
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def check_attached(self, node: Node) -> None:
        """Check that a node is still part of the tree.

        Raises:
            RuntimeError: it was evicted because it was not locked.
        """
        if node.parent is None and not (
            isinstance(node, Root) and self.roots.get((node.tenant, node.extra_key)) is node
        ):
            raise RuntimeError(f"{node} is no part of the prefix cache any more: it was not locked when it was evicted")

    def hold(self, slots: TokenSlots) -> Pages:
        """Hold the pages of these slots [n] for a node that will be appended, and return them without repeats.

        Raises:
            RuntimeError: a page is free or does not belong to the pool.
        """
        pages = self._pages(slots)
        self.allocator.hold(pages, pinned=False)
        return pages

    def append(self, parent: Node, tokens: Tokens, slots: TokenSlots, pages: Pages) -> Node:
        """Add a leaf below ``parent`` with tokens and slots [n >= 1] and the pages that ``hold`` returned."""
        node = Node(parent, _copy(tokens), _copy(slots), pages, parent.end, parent.end + len(tokens))
        first_token = int(tokens[0])
        parent.children[first_token] = node
        parent.evicted.pop(first_token, None)
        self.recency.add(node)
        self.num_nodes += 1
        self.num_tokens += len(tokens)
        if isinstance(parent, Root):
            self.idle_roots.pop(parent, None)
        return node

    def split(self, node: Node, length: int) -> Node:
        """Split an edge after ``length`` tokens; the lower node keeps its state, the new upper one is a tombstone.

        Returns the upper node. If it is not locked it is now more recent than its parent, so the caller must touch it.
        """
        parent, pinned = node.parent, node.kv_locks > 0
        assert parent is not None
        slots = node.slots
        upper_pages, lower_pages = self._pages(slots[:length]), self._pages(slots[length:])
        for pages in (upper_pages, lower_pages):
            self.allocator.hold(pages, pinned)
        self.allocator.release(node.pages, pinned)
        upper = Node(
            parent, _copy(node.key[:length]), _copy(slots[:length]), upper_pages, node.start, node.start + length
        )
        upper.kv_locks = node.kv_locks
        parent.children[int(node.key[0])] = upper
        node.parent, node.start, node.pages = upper, upper.end, lower_pages
        node.key, node.slots = _copy(node.key[length:]), _copy(slots[length:])
        upper.children[int(node.key[0])] = node
        if not pinned:
            self.recency.add(upper)
        self.num_nodes += 1
        return upper

    def remove(self, leaf: Node) -> Node:
        """Remove an unlocked leaf and its state from the tree; return its parent."""
        parent = leaf.parent
        assert parent is not None
        if leaf.state_slot is not None:
            self.drop_state(leaf)
        self.allocator.release(leaf.pages, pinned=False)
        del self.recency.nodes[leaf], parent.children[int(leaf.key[0])]
        parent.remember_evicted(int(leaf.key[0]))
        leaf.parent = None
        self.num_nodes -= 1
        self.num_tokens -= len(leaf.key)
        if isinstance(parent, Root):
            self._set_idle(parent)
        return parent

    def put_state(self, node: Node, slot: int) -> None:
        """Give a node its state: a slot that the prefix cache owns, with the state after ``node.end`` tokens."""
        node.state_slot, node.lost_state, node.is_spare = slot, False, False
        self.state_nodes[slot] = node
        self.recency.add_state(node)

    def drop_state(self, node: Node) -> None:
        """Free the unlocked state of a node."""
        self.states.free(self.give_state(node), PREFIX_CACHE)

    def give_state(self, node: Node) -> int:
        """Detach the unlocked state of a node and return its slot, which the prefix cache still owns."""
        slot = node.state_slot
        assert slot is not None
        node.state_slot, node.is_spare = None, False
        self.spare.pop(node, None)
        del self.state_nodes[slot]
        self.recency.remove_state(node)
        return slot

    def check_state(self, slot: int, position: int) -> None:
        """Check that a slot holds a state at ``position`` that the prefix cache owns and that no node has yet.

        Raises:
            StateOwnershipError: it does not.
        """
        self.states.check(slot, PREFIX_CACHE, position)
        if slot in self.state_nodes:
            raise StateOwnershipError(
                f"state slot {slot} is offered to {position}, but is that of {self.state_nodes[slot]}"
            )

    def lock(self, node: Node, above: Node | None = None) -> None:
        """Lock the KV of a node and of all nodes above it (up to ``above``, exclusive), so that none is evicted."""
        node.users += 1
        for each in node.path():
            if each is above:
                break
            each.kv_locks += 1
            if each.kv_locks > 1:
                continue
            if isinstance(each, Root):
                self.idle_roots.pop(each, None)
            else:
                self.allocator.pin(each.pages)
                del self.recency.nodes[each]
                self.num_locked_tokens += len(each.key)

    def unlock(self, node: Node) -> None:
        """Undo one ``lock``. Nodes that are not locked any more become the most recently used."""
        node.users -= 1
        for each in node.path():
            each.kv_locks -= 1
            if each.kv_locks:
                continue
            if isinstance(each, Root):
                self._set_idle(each)
            else:
                self.allocator.unpin(each.pages)
                self.recency.add(each)
                self.num_locked_tokens -= len(each.key)

    def pages_moved(self, now: Pages) -> None:
        """Point all nodes at pages that have moved; ``now`` [pages + 1]: by page, what it is now."""
        size, first = self.page_size, int(np.flatnonzero(now != np.arange(len(now)))[0])
        for node in self.nodes():
            if len(node.pages) and node.pages[-1] >= first:
                node.slots = now[node.slots // size] * size + node.slots % size
                node.pages = np.sort(now[node.pages])

    def state_moved(self, slot: int, now: int) -> bool:
        """Note that a state has moved; returns whether it is one of the tree."""
        node = self.state_nodes.pop(slot, None)
        if node is None:
            return False
        node.state_slot = now
        self.state_nodes[now] = node
        return True

    def _set_idle(self, root: Root) -> None:
        if not root.children and not root.kv_locks:
            self.idle_roots.pop(root, None)
            self.idle_roots[root] = None
            if len(self.idle_roots) > MAX_IDLE_ROOTS:
                oldest = next(iter(self.idle_roots))
                del self.idle_roots[oldest], self.roots[oldest.tenant, oldest.extra_key]

    def _pages(self, slots: TokenSlots) -> Pages:
        """Return the pages of token slots [n] in ascending order, without repeats."""
        pages = _without_repeats(slots // self.page_size)
        # The slots are usually in order, and np.unique takes ten times as long as the rest of an insertion.
        return pages if (pages[1:] > pages[:-1]).all() else _without_repeats(np.sort(pages))


def _without_repeats(pages: Pages) -> Pages:
    is_first = np.ones(len(pages), dtype=np.bool_)
    np.not_equal(pages[1:], pages[:-1], out=is_first[1:])
    return pages[is_first]


def _copy(values: Tokens) -> Tokens:
    """Copy, so that a node neither keeps a larger array alive nor changes when its caller's array changes."""
    return np.array(values, dtype=np.int64)
