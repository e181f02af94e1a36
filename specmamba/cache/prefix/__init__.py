"""The prefix cache of hybrid models: KV can be shared at any length, recurrent states only where one was stored."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice

from specmamba.cache.kv_pool import PageAllocator
from specmamba.cache.prefix.eviction import Costs, PolicyName, Victims, make_policy
from specmamba.cache.prefix.inspection import (
    WHOLE,
    CacheStats,
    Counters,
    Outline,
    Places,
    RequestStats,
    View,
    outline,
    render_tree,
    summarize,
)
from specmamba.cache.prefix.invariants import check_tree
from specmamba.cache.prefix.node import (
    Insertion,
    Match,
    MissReason,
    Node,
    Root,
    Tokens,
    TokenSlots,
    Way,
    follow,
    has_state,
    slots_between,
)
from specmamba.cache.prefix.radix_tree import RadixTree
from specmamba.cache.split import Split
from specmamba.cache.state_pool import StatePool

MAX_SALTS_ASKED = 32


class MambaRadixCache:
    """Texts that were run, as a radix tree of tokens: every node has KV, some have the recurrent state at their end.

    The rules:

    - A text can continue from the deepest node with a state on its path; it shares all KV up to there. Edges may end
      inside a page: then the nodes on both sides hold that page.
    - Splitting an edge leaves the state at the lower node; the new upper node is a *tombstone*: KV without a state.
    - A KV lock covers all nodes from the locked one to the root. A state is locked separately; such a lock includes a
      KV lock, because a state is useless without the KV before it.
    - KV is evicted leaf by leaf, with the leaf's state and with the tombstones above it that have no other child. A
      state can be evicted from any node, which becomes a tombstone, or is removed if it is an unlocked leaf.
    - Tenants share nothing, and neither do the salts of a tenant: each salt has its own root.

    The cache allocates nothing. It holds pages and takes over states that its callers have allocated, and frees them.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        states: StatePool,
        costs: Costs,
        policy: PolicyName = "lru",
        split: Split | None = None,
    ) -> None:
        """Start empty, on pools that others share; ``split`` is the line between them; None: their sizes are fixed."""
        self.policy: PolicyName = policy
        self.split = split
        self._allocator = allocator
        self._states = states
        self._tree = RadixTree(allocator, page_size, states)
        if split is not None:
            split.followers.append(self._tree)
        self._recency = self._tree.recency
        self._policy = make_policy(policy, costs)
        self._counters = Counters()
        self._counters_of: dict[str | None, Counters] = {}  # requests only, by tenant
        self.on_evict: Callable[[Node], None] | None = None  # gets every node that is about to lose its state to others

    @property
    def num_evictable_states(self) -> int:
        """Number of unlocked states."""
        return len(self._recency.states)

    @property
    def num_spare(self) -> int:
        """Number of spare states that are in the tree now."""
        return len(self._tree.spare)

    @property
    def stats(self) -> CacheStats:
        """Sizes now, and counts since the start."""
        return self._counters.stats(self._tree)

    def forget_figures(self) -> None:
        """Count from now on."""
        self._counters = Counters()
        self._counters_of.clear()

    def root(self, extra_key: str | None, tenant: str | None = None) -> Node:
        """Return the root of a tenant's salt. A root without children and locks may be dropped by later calls."""
        return self._tree.root(extra_key, tenant)

    def match(self, tokens: Tokens, extra_key: str | None = None, tenant: str | None = None) -> Match:
        """Find the longest prefix of ``tokens`` [n] int64 that ends in a state, and mark its KV and that state as used.

        Nothing is locked: a caller that needs the match must lock ``node`` before the next eviction.
        """
        way = follow(self._tree.root(extra_key, tenant), tokens)
        node = way.deepest_state
        self._recency.touch(node)
        if node.state_slot is not None:
            self._recency.touch_state(node)
        return Match(node, slots_between(way.start, node), way.end, self._why_no_longer(way, node, tokens))

    def peek(self, tokens: Tokens, extra_key: str | None = None, tenant: str | None = None) -> tuple[int, int]:
        """Return (length, kv_length) of a match of ``tokens`` [n] int64 without marking anything as used."""
        root = self._tree.roots.get((tenant, extra_key))
        if root is None:
            return 0, 0
        way = follow(root, tokens)
        return way.deepest_state.end, way.end

    def insert(self, start: Node, tokens: Tokens, slots: TokenSlots, state_slot: int | None) -> Insertion:
        """Store the tokens that follow ``start``, and a state at their end.

        Args:
            start: a root, or a node that the caller has locked.
            tokens: [n] int64, at positions start.end..start.end+n-1; n may be 0 to store only a state, at ``start``.
            slots: [n] int64, token slots of their KV, in pages that the caller holds. For tokens that the tree has
                already it keeps its own slots, and the caller may release these.
            state_slot: a slot that the prefix cache owns (by ``StatePool.fork`` or ``donate``), with the state after
                start.end + n tokens. None: the caller must lock the node, as unlocked leaves without a state are
                removed.

        Raises:
            ValueError: tokens and slots differ in number, or a state is offered to a root.
            StateOwnershipError: the prefix cache does not own the slot, it has another position, or another node has
                it.
            RuntimeError: ``start`` was evicted, or a page of ``slots`` is free. Nothing was changed.
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
        """Lock the KV of a node and of all nodes above it. Raises RuntimeError: the node was evicted."""
        self._tree.check_attached(node)
        self._tree.lock(node)

    def unlock(self, node: Node) -> None:
        """Undo a ``lock``; an unlocked leaf without a state is removed. Raises RuntimeError: there is no lock."""
        self._check_locked(node)
        self._tree.unlock(node)
        if node.is_useless:
            self._remove_branch(node)

    def move_lock(self, node: Node, below: Node) -> None:
        """Do ``lock(below)`` and ``unlock(node)``, for a node at or below ``node``, in O(nodes between), not O(depth).

        Raises:
            RuntimeError: ``node`` has no lock, or ``below`` is not below it. Nothing was changed.
        """
        self._check_locked(node)
        if all(each is not node for each in below.path()):
            raise RuntimeError(f"{below} is not below {node}, from where a lock was to be moved to it")
        self._tree.lock(below, above=node)
        node.users -= 1

    def lock_state(self, node: Node) -> None:
        """Lock a node's state and its KV. Raises RuntimeError: it has no state, or was evicted."""
        if node.state_slot is None:
            raise RuntimeError(f"{node} has no state to lock")
        self.lock(node)
        node.state_locks += 1
        self._recency.remove_state(node)

    def unlock_state(self, node: Node) -> None:
        """Undo a ``lock_state``. Raises RuntimeError: there is no lock."""
        if not node.state_locks:
            raise RuntimeError(f"the state of {node} was unlocked more often than it was locked")
        node.state_locks -= 1
        if not node.state_locks:
            self._recency.add_state(node)
        self.unlock(node)

    def give_state(self, node: Node) -> int:
        """Detach the state of a node whose KV is locked, and return its slot for the caller to take over.

        Raises:
            RuntimeError: the node has no state, its state is locked, or its KV is not locked.
        """
        if node.state_slot is None or node.state_locks or not node.kv_locks:
            raise RuntimeError(f"{node} cannot give its state away: it has none, or the locks do not allow it")
        self._tell_eviction(node)
        node.lost_state = True
        self._counters.evicted_states += 1
        return self._tree.give_state(node)

    def can_have(self, num_pages: int, num_slots: int) -> bool:
        """Whether there are so many free pages and state slots, once all is evicted that is not locked."""
        allocator = self._allocator
        if self.split is None:
            return num_pages <= allocator.num_available and num_slots <= self.num_available_states
        return self.split.bounds.fits(allocator.num_pinned + num_pages, self.num_used_states + num_slots)

    @property
    def num_used_states(self) -> int:
        """State slots that cannot be freed by eviction."""
        return self._states.num_slots - self._states.num_free - self.num_evictable_states

    @property
    def num_available_states(self) -> int:
        """State slots that are free or can be freed by eviction, or become slots in place of pages that can."""
        most = self._states.num_slots if self.split is None else self.split.most_slots(self._allocator.num_pinned)
        return most - self.num_used_states

    @property
    def most_pages(self) -> int:
        """Pages that there are, or could be beside the states that are used now."""
        return self._allocator.num_pages if self.split is None else self.split.most_pages(self.num_used_states)

    def make_room(self, num_pages: int, num_slots: int) -> bool:
        """Evict, and move the line between the pools, until so many pages and state slots are free together.

        Pages and slots get other numbers then: what the caller knows of them by number has to be read again. For a few
        free pages (``Split.spares``) the line stays, and states are evicted for slots.

        Returns:
            False, with no change, if that is impossible.
        """
        if not self.can_have(num_pages, num_slots):
            return False
        if self.split is None:
            return self.evict_pages(num_pages) and self.evict_states(num_slots)
        self._evict_until_they_fit(self.split, num_pages, num_slots)
        if self._states.num_free < num_slots and self.split.spares(self._allocator.num_free - num_pages):
            self.evict_states(num_slots)
        if (lacking := num_slots - self._states.num_free) > 0:  # a few more, so that the next requests need no move
            self.split.gain_slots(max(lacking, self.split.affordable_slots(num_pages) // 2), num_pages)
        if (lacking := num_pages - self._allocator.num_free) > 0:
            self.split.gain_pages(lacking, num_slots)
        if self._states.num_free < num_slots or self._allocator.num_free < num_pages:
            raise RuntimeError(f"there is no room for {num_pages} pages and {num_slots} states after all")
        return True

    def evict_pages(self, count: int) -> bool:
        """Evict leaves until ``count`` pages are free. Returns False and evicts nothing if that is impossible."""
        if self._allocator.num_available < count:
            return False
        if self._allocator.num_free < count:
            for leaf in self._policy.leaves(self._recency):
                self._remove_branch(leaf)
                if self._allocator.num_free >= count:
                    break
        return self._allocator.num_free >= count

    def evict_states(self, count: int) -> bool:
        """Evict states until ``count`` slots are free. Returns False and evicts nothing if that is impossible."""
        missing = count - self._states.num_free
        if missing > self.num_evictable_states:
            return False
        for node in islice(self._policy.states(self._recency), max(missing, 0)):
            self._evict(node, is_leaf=False)
        return True

    def mark_spare(self, node: Node, most: int) -> None:
        """Note that the state of a node is spare; of more than ``most`` the oldest is dropped, unless it is locked."""
        node.is_spare = True
        self._tree.spare[node] = None
        oldest = next(iter(self._tree.spare))
        if self.num_spare <= most or oldest.state_locks:
            return
        if oldest.kv_locks or oldest.children:
            self._tree.drop_state(oldest)
        else:
            self._remove_branch(oldest)

    def touch_branches(self, node: Node, above: Node) -> None:
        """Mark states where texts part as used, from ``node``, which a request has left, up to ``above`` on its path.

        So a state that several requests have gone on from stays longer than what the last of them has left behind it,
        which most texts of its kind do not share. In a chat, where nothing parts, the newest state stays longest.
        Under ``flops`` nothing changes: it weighs what states save, and a mix of workloads had fewer hits with this.
        """
        if self.policy == "flops":
            return
        for each in node.path():
            if _is_branch(each) and each in self._recency.states:
                self._recency.touch_state(each)
            if each is above:
                return

    def pass_state(self, node: Node) -> None:
        """Let the state of a node be evicted before others, if it has one: its text has gone on to a state below it.

        A request that goes on with this text needs the state below alone: each turn of a chat, and each chunk of a
        prompt, passes the state before it. What was passed serves only texts that part from this one behind it. A state
        from which several have gone on stays. One that was passed goes first until it is used again, also when the
        state below it has gone. Under ``flops`` nothing changes: it weighs what each state saves.
        """
        if self.policy != "flops" and node.state_slot is not None and not _is_branch(node):
            self._recency.pass_state(node)

    def keep_spare(self, node: Node) -> None:
        """Note that a request goes on from a spare state, which is one like others now."""
        node.is_spare = False
        self._tree.spare.pop(node, None)

    def nodes_with_state(self) -> Collection[Node]:
        """Return all nodes with a state, in no order, without a walk through the tree."""
        return self._tree.state_nodes.values()

    def state_nodes(self) -> list[Node]:
        """Return all nodes with a state, parents before their children."""
        return [node for node in self._tree.nodes() if node.state_slot is not None]

    def reset(self) -> int:
        """Drop everything that is not locked and all memory of evictions; return the number of tokens dropped."""
        num_tokens = self._tree.num_tokens
        for node in list(self._recency.states):
            self._tree.drop_state(node)
        for node in list(self._recency.nodes):  # children are less recent than their parents
            self._tree.remove(node)
        for node in self._tree.nodes():
            node.evicted.clear()
            node.lost_state = False
        return num_tokens - self._tree.num_tokens

    def count_request(self, num_tokens: int, match: Match, tenant: str | None = None) -> None:
        """Count an admitted request with this many tokens and this match in the statistics."""
        match.node.hits += 1
        for counters in (self._counters, self._counters_of.setdefault(tenant, Counters())):
            counters.count_request(num_tokens, match)

    def check(self, row_pages: dict[int, int] | None = None) -> None:
        """Check every link, count, lock, list, page and slot stamp.

        Args:
            row_pages: how many rows hold (and pin) each page; None: unknown, and pages are checked less strictly.

        Raises:
            RuntimeError: an invariant is violated; the message names it.
        """
        check_tree(self._tree, row_pages)

    def requests_of(self, tenant: str | None) -> RequestStats:
        """Return the figures of one tenant's requests since the start."""
        return self._counters_of.get(tenant, Counters()).of_requests()

    def render_text(self, max_nodes: int = 200, view: View = WHOLE) -> str:
        """Render the tree as text, the most recent branches first."""
        return render_tree(self._tree, max_nodes, view)

    def outline(self, max_nodes: int = 200, view: View = WHOLE, tiers_of: Places = lambda _: {}) -> Outline:
        """Return the shape of the tree for drawing, the most recent branches first; ``tiers_of``: see ``outline``."""
        return outline(self._tree, max_nodes, view, tiers_of)

    def summary(self) -> dict[str, object]:
        """Return policy, statistics and sizes, ready for JSON."""
        return {"policy": self.policy, **summarize(self._tree, self.stats)}

    def _evict_until_they_fit(self, split: Split, num_pages: int, num_slots: int) -> None:
        """Evict until so many pages and slots more than what is held fit the bounds, wherever the line is now.

        The line moves once, afterwards: with each victim it would move again, and often back for the next one.
        """
        victims, bounds = Victims(self._policy, self._recency), split.bounds
        while True:
            pages = num_pages + self._allocator.num_pages - self._allocator.num_free
            slots = num_slots + self._states.num_slots - self._states.num_free
            if bounds.fits(pages, slots):
                return
            # pages are all that lacks, and there can be no more: a state alone would not help
            only_leaves = pages > bounds.most_pages and bounds.fits(bounds.most_pages, slots)
            victim = victims.next(only_leaves)
            if victim is None:
                raise RuntimeError(f"{num_pages} pages and {num_slots} state slots should fit, and do not")
            self._evict(*victim)

    def _evict(self, node: Node, is_leaf: bool) -> None:
        """Evict an unlocked leaf, or the state of a node, which is removed if it is such a leaf."""
        if not is_leaf and (node.children or node.kv_locks):
            self._tell_eviction(node)
            self._tree.drop_state(node)
            node.lost_state = True
            self._counters.evicted_states += 1
        else:
            self._remove_branch(node)

    def _remove_branch(self, node: Node) -> None:
        """Evict a leaf and the tombstones above it that only lead to it."""
        self._tell_eviction(node)
        while True:
            self._counters.evicted_tokens += len(node.key)
            self._counters.evicted_states += node.state_slot is not None
            node = self._tree.remove(node)
            if not node.is_useless:
                return

    def _tell_eviction(self, node: Node) -> None:
        if self.on_evict is not None and node.state_slot is not None:
            self.on_evict(node)

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
        """Return why a match ends at ``node``; None: it covers the whole text."""
        if node.end == len(tokens):
            return None
        lost = any(each.lost_state for each in way.nodes if each.end > node.end)
        if lost or (way.partial is None and way.end < len(tokens) and int(tokens[way.end]) in way.last.evicted):
            return "evicted"
        if isinstance(way.start, Root) and node is way.start and self._another_salt_has(tokens, way.start):
            return "salt"
        return "never_stored"

    def _another_salt_has(self, tokens: Tokens, root: Root) -> bool:
        """Whether ``tokens`` would match under one of the tenant's newest other salts.

        Other tenants are not asked: the time of this answer must not depend on their texts.
        """
        newest = islice(reversed(self._tree.roots.values()), MAX_SALTS_ASKED)
        others = (other for other in newest if other is not root and other.tenant == root.tenant)
        return any(has_state(other, tokens) for other in others)


def _is_branch(node: Node) -> bool:
    """Whether several requests have gone on from a node, or several texts part there."""
    return node.hits > 1 or len(node.children) + len(node.evicted) > 1
