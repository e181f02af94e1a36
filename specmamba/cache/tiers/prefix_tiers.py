"""What lies below the prefix cache: its states are written to tiers, and come back where a match ends short."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.prefix import MambaRadixCache
from specmamba.cache.prefix.node import Node, Root, Tokens, TokenSlots
from specmamba.cache.state_pool import PREFIX_CACHE, StatePool
from specmamba.cache.tiers.entry import Entry
from specmamba.cache.tiers.entry_index import Stored
from specmamba.cache.tiers.host_tier import HostTier
from specmamba.cache.tiers.pool_transfer import PoolTransfer
from specmamba.cache.tiers.prefix_hash import PrefixHasher
from specmamba.cache.tiers.saving import Saving
from specmamba.cache.tiers.threaded_tier import CLOSE_S
from specmamba.cache.tiers.tier import Load, Look, Tier, TierName
from specmamba.cache.tiers.tier_stats import TierStats
from specmamba.cache.tiers.tier_writer import MIN_GAIN, Hashes, TierWriter

IDLE_WAIT_S = 0.002  # of an engine that has nothing to do until a load ends
MAX_REPEATS = 3  # of a request's load, where what it continues was evicted meanwhile


@dataclass(slots=True)
class TierWish:
    """What a waiting request wants of the tiers. It asks once, when it is considered for admission."""

    is_over: bool = False
    looks: list[Look] | None = None  # questions to tiers that need time for an answer; None: not asked yet
    load: Load | None = None  # its own,
    tier: Tier | None = None  # and where it comes from
    other: Load | None = None  # of another request, which brings a part of the same text
    refused_at: int | None = None  # loads that had ended when there was no room for its own
    failed: list[Tier] = field(default_factory=list)  # tiers whose loads have failed
    num_repeats: int = 0  # loads that came too late for what they continue
    num_stored: int | None = None  # tokens that the tiers had when they were first asked; None: not yet


class PrefixTiers:
    """Moves prefixes between ``MambaRadixCache`` and tiers. All calls come from the engine's thread."""

    def __init__(
        self,
        cache: MambaRadixCache,
        kv: KVPool,
        states: StatePool,
        transfer: PoolTransfer,
        tiers: Sequence[Tier],
        hashes: Hashes,
        secret: bytes | None = None,
    ) -> None:
        """Put tiers below a cache.

        Args:
            cache: the tree, on these pools.
            kv, states: the pools.
            transfer: between the pools and entries.
            tiers: of the transfer's layout, the fastest first.
            hashes: of texts, by which all of them find entries.
            secret: the key of the hashes, where other processes may be told what the tiers have.
        """
        self._cache, self._kv, self._states = cache, kv, states
        self.transfer, self.hashes, self.secret = transfer, hashes, secret
        self.tiers = tuple(tiers)
        self._writer = TierWriter(transfer, self.tiers, hashes)
        self._loads: list[Load] = []  # under way
        self._looks: list[Look] = []  # likewise
        self._num_ended = 0
        if self._writer.below(None) is not None:
            cache.on_evict = self._writer.write_evicted
        for tier in self.tiers:
            if isinstance(tier, HostTier) and (below := self._writer.below(tier)) is not None:
                tier.on_evict = partial(self._writer.copy, tier=below)

    @property
    def num_loads(self) -> int:
        """Loads and looks that are under way, and loads that their requests have not taken yet."""
        self._looks = [look for look in self._looks if not look.is_over]
        return len(self._loads) + len(self._looks)

    def add(self, tier: Tier) -> None:
        """Put a tier below the others, from which entries come and into which none is written."""
        self.tiers += (tier,)

    # ---- for the cache manager ---------------------------------------------------------------------------------------

    def is_loading(self, wish: TierWish, tokens: Tokens, extra_key: str | None, tenant: str | None) -> bool:
        """Bring what the tiers have of a text into the cache; True while that lasts, and the request should wait.

        Args:
            wish: of the request; new at first.
            tokens: [n] int64, of the text.
            extra_key, tenant: its scope.
        """
        while not wish.is_over:
            if any(not look.is_over for look in wish.looks or ()):
                return True
            if wish.other is not None and not wish.other.is_over and wish.other.result is None:
                return True
            if wish.refused_at == self._num_ended:
                return True
            if wish.load is None and not self._begin(wish, tokens, extra_key, tenant):
                return not wish.is_over
            load, tier = wish.load, wish.tier
            assert load is not None
            assert tier is not None
            if (result := load.result) is None:
                return True
            if isinstance(result, str):
                tier.count_miss(result)
                wish.failed.append(tier)  # another one may have some of it
            else:
                wish.is_over = self._insert(wish, result, tokens, extra_key, tenant)
            self._release(wish)
        return False

    def peek(self, wish: TierWish, tokens: Tokens, extra_key: str | None, tenant: str | None) -> int:
        """Return how many tokens of a text a load could bring; arguments as of ``is_loading``.

        They are looked up once for each wish. 0 when its load is over: what it has brought is in the cache.
        """
        if wish.is_over:
            return 0
        if wish.num_stored is None:
            text, wish.num_stored = self.hashes(tokens, extra_key, tenant), 0
            for tier in self.tiers:
                text.restart()
                chain = tier.find(text)
                wish.num_stored = max(wish.num_stored, chain[-1].end if chain else 0)
        return wish.num_stored

    def cancel(self, wish: TierWish) -> None:
        """Forget the load of a request that is gone."""
        wish.is_over = True
        self._release(wish)

    def wait(self) -> None:
        """Wait a short time for a load or an answer, when nothing else is to be done."""
        if self.num_loads and all(load.result is None for load in self._loads):
            time.sleep(IDLE_WAIT_S)

    def state_was_left(self, node: Node) -> None:
        """Write the state of a node that a request has just left, where that is the policy."""
        self._writer.write_where("write_through", node)

    def state_was_hit(self, node: Node) -> None:
        """Note that a request goes on from a node's state."""
        if node.state_slot is not None:
            self._writer.write_where("write_through_selective", node)

    def forget(self) -> None:
        """Drop what the tiers have in memory; what outlives the process stays."""
        for tier in self.tiers:
            tier.forget()

    def describe_lines(self) -> list[str]:
        """Return lines for the report at start."""
        return [tier.describe_line() for tier in self.tiers]

    def stats(self) -> dict[TierName, TierStats]:
        """Return the figures of each tier, by its name."""
        return {tier.name: tier.stats() for tier in self.tiers}

    def tiers_of(self, nodes: Sequence[Node]) -> dict[Node, tuple[TierName, ...]]:
        """Return the tiers that have the text up to the end of nodes, and the state there, as their indices say.

        Each token above the nodes is hashed once. ``nodes``: parents before their children, from the roots on.
        """
        texts: dict[Node, PrefixHasher] = {}
        found: dict[Node, tuple[TierName, ...]] = {}
        for node in nodes:
            if isinstance(node, Root):
                texts[node] = self.hashes(node.key, node.extra_key, node.tenant)
                continue
            assert node.parent is not None
            texts[node] = text = texts[node.parent].followed_by(node.key)
            key = text.digest(node.end)
            if names := tuple(tier.name for tier in self.tiers if tier.has(key)):
                found[node] = names
        return found

    def drain(self) -> bool:
        """Wait until all that was given to the tiers is stored; returns whether it is."""
        return all(tier.drain() for tier in self.tiers)

    def start_saving(self) -> Saving | None:
        """Return what writes everything to the tier that outlives the process; None: there is none."""
        tier = next((tier for tier in self.tiers if tier.outlives), None)
        if tier is None:
            return None
        above = self.tiers[: self.tiers.index(tier)]
        return Saving(self._cache.state_nodes(), above, tier, self._writer)

    def close(self) -> None:
        """Write what the policies leave for the end, and end the threads."""
        self._cache.on_evict = None
        saves = any(tier.outlives and tier.policy == "write_back" for tier in self.tiers)
        saving = self.start_saving() if saves else None
        if saving is not None:
            saving.go_on(CLOSE_S)
        for tier in self.tiers:
            tier.close()

    # ---- from a tier -------------------------------------------------------------------------------------------------

    def _begin(self, wish: TierWish, tokens: Tokens, extra_key: str | None, tenant: str | None) -> bool:
        """Begin a load for a request; False where it has to wait for another one, or has nothing to load."""
        known = self._cache.peek(tokens, extra_key, tenant)[0]
        may_gain = len(tokens) - known >= MIN_GAIN
        if may_gain and wish.looks is None:
            looks = (tier.look(self.hashes(tokens, extra_key, tenant)) for tier in self.tiers)
            wish.looks = [look for look in looks if look is not None]
            self._looks += wish.looks
            if wish.looks:
                return False
        found = self._longest(wish, tokens, extra_key, tenant, known) if may_gain else None
        if found is None:
            wish.is_over = True
            return False
        tier, chain = found
        keys = {entry.key for entry in chain}
        wish.other = next((load for load in self._loads if any(each.key in keys for each in load.chain)), None)
        if wish.other is not None:
            return False
        wish.load = tier.load(chain, known)
        if wish.load is None:
            wish.refused_at = self._num_ended
            return False
        wish.tier = tier
        self._loads.append(wish.load)
        return True

    def _longest(
        self, wish: TierWish, tokens: Tokens, extra_key: str | None, tenant: str | None, known: int
    ) -> tuple[Tier, list[Stored]] | None:
        """Return the tier with the longest beginning of a text, and its entries behind position ``known``.

        Where two have the same, the faster one is chosen. Those that have nothing more than the pools count a miss.
        """
        text = self.hashes(tokens, extra_key, tenant)
        best: tuple[Tier, list[Stored]] | None = None
        is_first = not (wish.other or wish.failed or wish.num_repeats) and wish.refused_at is None  # a wish counts once
        for tier in self.tiers:
            if tier in wish.failed:
                continue
            text.restart()
            chain = [entry for entry in tier.find(text) if entry.end > known]
            if not chain:
                if is_first and (reason := tier.why_absent(text)) is not None:
                    tier.count_miss(reason)
            elif chain[-1].end - known >= MIN_GAIN and (best is None or chain[-1].end > best[1][-1].end):
                best = tier, chain
        return best

    def _release(self, wish: TierWish) -> None:
        """End a request's load, if it has one; it may begin another one."""
        if wish.load is not None:
            assert wish.tier is not None
            wish.tier.release(wish.load)
            self._loads.remove(wish.load)
            self._num_ended += 1
        wish.load = wish.tier = None

    def _insert(
        self, wish: TierWish, entries: Sequence[Entry], tokens: Tokens, extra_key: str | None, tenant: str | None
    ) -> bool:
        """Insert what a request has loaded into the cache as if another request had left it.

        Returns:
            False: the cache is not what it was when the load began, and the request has to ask again. Its first part
            may have been evicted, which only a longer chain brings back, or another request may have left all of it.
        """
        load, tier, last = wish.load, wish.tier, entries[-1]
        assert load is not None
        assert tier is not None
        node = self._cache.match(tokens[: last.end], extra_key, tenant).node
        if node.end < load.chain[0].start or node.end == last.end:
            wish.num_repeats += 1
            if wish.num_repeats <= MAX_REPEATS:
                return False
            tier.count_miss("no_room")
            return True
        start = node.end
        self._cache.lock(node)
        try:
            inserted = self._insert_below(node, entries, tokens[start : last.end])
        finally:
            self._cache.unlock(node)
        if inserted is None:
            tier.count_miss("no_room")
            return True
        tier.count_hit(load, last.end - start)
        if tier.policy is None:  # it is new here: the other tiers may want it
            self.state_was_left(inserted)
        return True

    def _insert_below(self, node: Node, entries: Sequence[Entry], tokens: Tokens) -> Node | None:
        """Insert the tokens that follow a locked node, with their KV and the state at their end.

        Returns:
            The node at their end; None: there is no room.
        """
        last, size, allocator = entries[-1], self._kv.page_size, self._kv.allocator
        first_page = node.end // size
        num_pages = -(-last.end // size) - first_page
        if not self._cache.make_room(num_pages, 1):
            return None
        pages = allocator.allocate(num_pages)
        assert pages is not None
        slot = None
        try:
            positions = np.arange(node.end, last.end)
            slots: TokenSlots = pages[positions // size - first_page] * size + positions % size
            slot = self._states.reserve(PREFIX_CACHE)
            assert slot is not None
            self.transfer.put_tokens([entry for entry in entries if entry.end > node.end], node.end, slots)
            self.transfer.put_state(last, slot)
            insertion = self._cache.insert(node, tokens, slots, slot)
            if insertion.takes_state:
                slot = None
        finally:
            allocator.release(pages, pinned=True)
            if slot is not None:
                self._states.free(slot, PREFIX_CACHE)
        return insertion.node
