"""The body of the prefix cache: nodes, the pages and states that they hold, and locks. Rules are in radix_cache.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from specmamba.cache.page_allocator import PageAllocator, Pages
from specmamba.cache.prefix.eviction import Recency
from specmamba.cache.prefix.node import Node, Root, Tokens, TokenSlots, new_root
from specmamba.cache.state_pool import PREFIX_CACHE, StateOwnershipError, StatePool

MAX_IDLE_ROOTS = 1024


class RadixTree:
    """One tree per salt. A change leaves links, holders, pins, lists and counts in agreement, or changes nothing."""

    def __init__(self, allocator: PageAllocator, page_size: int, states: StatePool) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.states = states
        self.recency = Recency()
        self.roots: dict[str | None, Root] = {}
        self.idle_roots: dict[Root, None] = {}  # without children and locks, the one that was asked for last at the end
        self.state_nodes: dict[int, Node] = {}  # by state slot
        self.num_nodes = 0
        self.num_tokens = 0
        self.num_locked_tokens = 0

    def root(self, extra_key: str | None) -> Root:
        """The root of a salt. Of idle ones the oldest are forgotten when there are too many."""
        root = self.roots.get(extra_key)
        if root is None:
            root = self.roots[extra_key] = new_root(extra_key)
        self._set_idle(root)
        return root

    def nodes(self) -> Iterator[Node]:
        """All nodes, roots too, parents before their children."""
        todo: list[Node] = list(self.roots.values())
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def check_attached(self, node: Node) -> None:
        """Make sure that a node is still part of the tree.

        Raises:
            RuntimeError: it was evicted, because nobody had locked it.
        """
        if node.parent is None and not (isinstance(node, Root) and self.roots.get(node.extra_key) is node):
            raise RuntimeError(f"{node} is no part of the prefix cache any more: it was not locked when it was evicted")

    def hold(self, slots: TokenSlots) -> Pages:
        """Hold the pages of these slots [n] for a node that is going to be appended; the pages, each once.

        Raises:
            RuntimeError: a page is free, or none of the pool.
        """
        pages = self._pages(slots)
        self.allocator.hold(pages, pinned=False)
        return pages

    def append(self, parent: Node, tokens: Tokens, slots: TokenSlots, pages: Pages) -> Node:
        """A new leaf below ``parent``, over tokens and slots [n >= 1] and the pages that ``hold`` has answered."""
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
        """Divide an edge after ``length`` tokens; the new upper node, a tombstone. The state stays where it stands.

        An upper node that nobody locks is more recent than its parent now: the caller has to touch it.
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
        """Take a leaf that nobody locks out of the tree, with its state; its parent."""
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
        """A slot of the prefix cache, which stands at the node's end, is the node's state."""
        node.state_slot, node.lost_state = slot, False
        self.state_nodes[slot] = node
        self.recency.add_state(node)

    def drop_state(self, node: Node) -> None:
        """Free a node's state, which nobody locks."""
        self.states.free(self.give_state(node), PREFIX_CACHE)

    def give_state(self, node: Node) -> int:
        """Let go of a node's state, which nobody locks; its slot is still the prefix cache's."""
        slot = node.state_slot
        assert slot is not None
        node.state_slot = None
        del self.state_nodes[slot], self.recency.states[node]
        return slot

    def check_state(self, slot: int, position: int) -> None:
        """Make sure that a slot holds a state at ``position`` that is the prefix cache's, but no node's yet.

        Raises:
            StateOwnershipError: it does not.
        """
        self.states.check(slot, PREFIX_CACHE, position)
        if slot in self.state_nodes:
            raise StateOwnershipError(
                f"state slot {slot} is offered to {position}, but is that of {self.state_nodes[slot]}"
            )

    def lock(self, node: Node, above: Node | None = None) -> None:
        """One more user of a node's KV and of all above, or of all below ``above``: none of it can be evicted."""
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
        """One user less. What nobody uses any more is as recent as can be."""
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

    def _set_idle(self, root: Root) -> None:
        if not root.children and not root.kv_locks:
            self.idle_roots.pop(root, None)
            self.idle_roots[root] = None
            if len(self.idle_roots) > MAX_IDLE_ROOTS:
                oldest = next(iter(self.idle_roots))
                del self.idle_roots[oldest], self.roots[oldest.extra_key]

    def _pages(self, slots: TokenSlots) -> Pages:
        """The pages of token slots [n], each once and in ascending order."""
        pages = _without_repeats(slots // self.page_size)
        # Mostly they are in order, and np.unique takes ten times as long as all the rest of an insertion.
        return pages if (pages[1:] > pages[:-1]).all() else _without_repeats(np.sort(pages))


def _without_repeats(pages: Pages) -> Pages:
    is_first = np.ones(len(pages), dtype=np.bool_)
    np.not_equal(pages[1:], pages[:-1], out=is_first[1:])
    return pages[is_first]


def _copy(values: Tokens) -> Tokens:
    """So that no node keeps a caller's (or another node's) larger array alive, or changes with it."""
    return np.array(values, dtype=np.int64)
