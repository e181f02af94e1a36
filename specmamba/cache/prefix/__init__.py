"""The prefix cache of hybrid models: KV that is shared at any length, and states to go on from, which cannot rewind."""

from __future__ import annotations

from itertools import islice

from specmamba.cache.page_allocator import PageAllocator
from specmamba.cache.prefix.eviction import Costs, PolicyName, make_policy
from specmamba.cache.prefix.inspection import CacheStats, Counters, Outline, check_tree, outline, render_tree, summarize
from specmamba.cache.prefix.node import (
    Insertion,
    Match,
    MissReason,
    Node,
    Tokens,
    TokenSlots,
    Way,
    follow,
    slots_between,
)
from specmamba.cache.prefix.radix_tree import RadixTree
from specmamba.cache.state_pool import StatePool

MAX_SALTS_ASKED = 32


class MambaRadixCache:
    """Texts that were run, as a tree of tokens: every node has KV pages, some have the recurrent state at their end.

    The rules:

    - A text can go on from the deepest node with a state on its path; all KV up to there is shared. Edges end anywhere,
      pages or not: two nodes that meet inside a page both hold it.
    - Splitting an edge leaves the state below, where it stands, and a *tombstone* above: KV without a state.
    - KV is locked from a node to the root. A state is locked by itself; such a lock holds the node's KV too, as a state
      without it is worth nothing.
    - KV is evicted leaf by leaf, with the state and with the tombstones above that have no other child. States are
      evicted from any node, which becomes a tombstone, or goes if it is a leaf that nobody locks.
    - Salts share nothing: each has its own root.

    The cache allocates nothing; it holds pages and takes states that others have allocated, and lets go of them.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        states: StatePool,
        costs: Costs,
        policy: PolicyName = "lru",
    ) -> None:
        self.policy: PolicyName = policy
        self._allocator = allocator
        self._states = states
        self._tree = RadixTree(allocator, page_size, states)
        self._recency = self._tree.recency
        self._policy = make_policy(policy, costs)
        self._counters = Counters()

    @property
    def num_evictable_states(self) -> int:
        """States that nobody locks."""
        return len(self._recency.states)

    @property
    def stats(self) -> CacheStats:
        """What is there, and what has happened since the start."""
        return self._counters.stats(self._tree)

    def root(self, extra_key: str | None) -> Node:
        """Where the texts of a salt begin. A root that is neither locked nor used can be forgotten after a while."""
        return self._tree.root(extra_key)

    def match(self, tokens: Tokens, extra_key: str | None = None) -> Match:
        """The longest beginning of ``tokens`` [n] int64 that ends in a state; its KV and that state are recent now.

        Nothing is locked: whoever wants to keep what was matched locks ``node`` before anything can be evicted.
        """
        way = follow(self._tree.root(extra_key), tokens)
        node = way.deepest_state
        self._recency.touch(node)
        if node.state_slot is not None:
            self._recency.touch_state(node)
        return Match(node, slots_between(way.start, node), way.end, self._why_no_longer(way, node, tokens))

    def peek(self, tokens: Tokens, extra_key: str | None = None) -> tuple[int, int]:
        """(length, kv_length) of a match of ``tokens`` [n] int64; changes nothing."""
        root = self._tree.roots.get(extra_key)
        if root is None:
            return 0, 0
        way = follow(root, tokens)
        return way.deepest_state.end, way.end

    def insert(self, start: Node, tokens: Tokens, slots: TokenSlots, state_slot: int | None) -> Insertion:
        """Store the tokens that follow ``start``, and a state at their end.

        Args:
            start: a root, or a node that the caller has locked.
            tokens: [n] int64, those of positions start.end..start.end+n-1; none: only a state is left, on ``start``.
            slots: [n] int64, where their KV lies, in pages that the caller holds. Where the tree has the tokens
                already it keeps its own slots, and the caller may let go of these.
            state_slot: the prefix cache's (by ``StatePool.fork`` or ``donate``), standing at start.end + n. None: the
                caller is going to lock the node, which nobody could go on from otherwise.

        Raises:
            ValueError: tokens and slots differ in number, or a state is offered to a root.
            StateOwnershipError: the slot is not the prefix cache's, stands elsewhere or is another node's.
            RuntimeError: ``start`` was evicted, or a page of ``slots`` is free. Nothing has changed.
        """
        self._check_insertion(start, tokens, slots, state_slot)
        way = follow(start, tokens)
        known = way.end - start.end
        pages = self._tree.hold(slots[known:])
        node = way.last if way.partial is None else self._tree.split(way.partial, way.partial_length)
        if known < len(tokens):
            node = self._tree.append(node, tokens[known:], slots[known:], pages)
            self._counters.inserted_tokens += len(tokens) - known
        self._recency.touch(node)
        takes_state = state_slot is not None and node.state_slot is None
        if state_slot is not None and takes_state:
            self._tree.put_state(node, state_slot)
        elif state_slot is not None:
            self._counters.duplicate_states += 1
            self._recency.touch_state(node)
        return Insertion(node, slots_between(start, node), takes_state)

    def lock(self, node: Node) -> None:
        """Keep the KV of a node and of all above it. Raises RuntimeError: the node was evicted."""
        self._tree.check_attached(node)
        self._tree.lock(node)

    def unlock(self, node: Node) -> None:
        """Undo a ``lock``; a leaf without a state goes when nobody locks it any more. Raises RuntimeError: no lock."""
        self._check_locked(node)
        self._tree.unlock(node)
        if node.is_useless:
            self._remove_branch(node)

    def move_lock(self, node: Node, below: Node) -> None:
        """As ``lock(below)`` and ``unlock(node)``, for a node at or below ``node``: O(nodes between), not O(depth).

        Raises:
            RuntimeError: ``node`` has no lock, or ``below`` is not below it. Nothing has changed.
        """
        self._check_locked(node)
        if all(each is not node for each in below.path()):
            raise RuntimeError(f"{below} is not below {node}, from where a lock was to be moved to it")
        self._tree.lock(below, above=node)
        node.users -= 1

    def lock_state(self, node: Node) -> None:
        """Keep a node's state, and with it its KV. Raises RuntimeError: it has none, or was evicted."""
        if node.state_slot is None:
            raise RuntimeError(f"{node} has no state to lock")
        self.lock(node)
        node.state_locks += 1
        self._recency.states.pop(node, None)

    def unlock_state(self, node: Node) -> None:
        """Undo a ``lock_state``. Raises RuntimeError: no lock."""
        if not node.state_locks:
            raise RuntimeError(f"the state of {node} was unlocked more often than it was locked")
        node.state_locks -= 1
        if not node.state_locks:
            self._recency.add_state(node)
        self.unlock(node)

    def give_state(self, node: Node) -> int:
        """Give the state of a node, whose KV is locked, away: the node is a tombstone, the slot the caller's to take.

        Raises:
            RuntimeError: it has none, its state is locked, or its KV is not.
        """
        if node.state_slot is None or node.state_locks or not node.kv_locks:
            raise RuntimeError(f"{node} cannot give its state away: it has none, or the locks do not allow it")
        node.lost_state = True
        self._counters.evicted_states += 1
        return self._tree.give_state(node)

    def evict_pages(self, count: int) -> bool:
        """Make ``count`` pages free, by evicting leaves; False, and nothing is evicted, where that is out of reach."""
        if self._allocator.num_available < count:
            return False
        if self._allocator.num_free < count:
            for leaf in self._policy.leaves(self._recency):
                self._remove_branch(leaf)
                if self._allocator.num_free >= count:
                    break
        return self._allocator.num_free >= count

    def evict_states(self, count: int) -> bool:
        """Make ``count`` state slots free; False, and nothing is evicted, where that is out of reach."""
        missing = count - self._states.num_free
        if missing > self.num_evictable_states:
            return False
        for node in islice(self._policy.states(self._recency), max(missing, 0)):
            if node.children or node.kv_locks:
                self._tree.drop_state(node)
                node.lost_state = True
                self._counters.evicted_states += 1
            else:
                self._remove_branch(node)
        return True

    def reset(self) -> int:
        """Drop everything that nobody locks, as if it had never been there; the number of tokens dropped."""
        num_tokens = self._tree.num_tokens
        for node in list(self._recency.states):
            self._tree.drop_state(node)
        for node in list(self._recency.nodes):  # children are less recent than their parents
            self._tree.remove(node)
        for node in self._tree.nodes():
            node.evicted.clear()
            node.lost_state = False
        return num_tokens - self._tree.num_tokens

    def count_request(self, num_tokens: int, match: Match) -> None:
        """Add a request that was admitted, with this many tokens and this match, to the statistics."""
        self._counters.count_request(num_tokens, match)

    def check(self, row_pages: dict[int, int] | None = None) -> None:
        """Verify every link, count, lock, list, page and slot stamp.

        Args:
            row_pages: how many rows hold (and pin) each page; None: not known, and pages are checked less strictly.

        Raises:
            RuntimeError: naming what is wrong.
        """
        check_tree(self._tree, row_pages)

    def render_text(self, max_nodes: int = 200) -> str:
        """The tree for people, the most recent branches first."""
        return render_tree(self._tree, max_nodes)

    def outline(self, max_nodes: int = 200) -> Outline:
        """The tree for pictures, the most recent branches first."""
        return outline(self._tree, max_nodes)

    def summary(self) -> dict[str, object]:
        """Statistics and sizes, ready for JSON."""
        return {"policy": self.policy, **summarize(self._tree, self.stats)}

    def _remove_branch(self, node: Node) -> None:
        """Evict a leaf, and what above it is of no use without it."""
        while True:
            self._counters.evicted_tokens += len(node.key)
            self._counters.evicted_states += node.state_slot is not None
            node = self._tree.remove(node)
            if not node.is_useless:
                return

    def _check_locked(self, node: Node) -> None:
        if node.users <= node.state_locks:
            raise RuntimeError(f"{node} was unlocked more often than it was locked")

    def _check_insertion(self, start: Node, tokens: Tokens, slots: TokenSlots, state_slot: int | None) -> None:
        self._tree.check_attached(start)
        if len(tokens) != len(slots):
            raise ValueError(f"{len(tokens)} tokens cannot lie in {len(slots)} slots")
        if state_slot is None:
            return
        if start.end + len(tokens) == 0:
            raise ValueError("a root takes no state: before any token there is nothing to cache")
        self._tree.check_state(state_slot, start.end + len(tokens))

    def _why_no_longer(self, way: Way, node: Node, tokens: Tokens) -> MissReason | None:
        """Why a match ends at ``node``."""
        if node.end == len(tokens):
            return None
        lost = any(each.lost_state for each in way.nodes if each.end > node.end)
        if lost or (way.partial is None and way.end < len(tokens) and int(tokens[way.end]) in way.last.evicted):
            return "evicted"
        if node is way.start and self._another_salt_has(tokens, way.start):
            return "salt"
        return "never_stored"

    def _another_salt_has(self, tokens: Tokens, root: Node) -> bool:
        """Whether ``tokens`` would have matched with another salt: the newest ones are asked."""
        newest = islice(reversed(self._tree.roots.values()), MAX_SALTS_ASKED)
        return any(follow(other, tokens).deepest_state is not other for other in newest if other is not root)
