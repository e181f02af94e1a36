"""What lies below the prefix cache: its states are written to disk, and come back where a match ends short."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.prefix import MambaRadixCache
from specmamba.cache.prefix.node import Node, Root, Tokens, TokenSlots
from specmamba.cache.state_pool import PREFIX_CACHE, StatePool
from specmamba.cache.tiers.disk_stats import DiskStats
from specmamba.cache.tiers.disk_tier import CLOSE_S, MAX_BYTES_IN_FLIGHT, DiskTier, Load
from specmamba.cache.tiers.entry import Entry
from specmamba.cache.tiers.entry_index import Stored
from specmamba.cache.tiers.pool_transfer import PoolTransfer
from specmamba.cache.tiers.prefix_hash import HEAD_TOKENS

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
MIN_GAIN = 16  # tokens that an entry adds to those before it, or to what is in memory: each has a whole state
IDLE_WAIT_S = 0.002  # of an engine that has nothing to do until a load ends


@dataclass(slots=True)
class DiskWish:
    """What a waiting request wants of the disk. It asks once, when it is first considered for admission."""

    is_over: bool = False
    load: Load | None = None  # its own
    other: Load | None = None  # of another request, which brings a part of the same text
    refused_at: int | None = None  # loads that had ended when there was no room for its own


class PrefixTiers:
    """Moves prefixes between ``MambaRadixCache`` and a disk. All calls come from the engine's thread."""

    def __init__(
        self,
        cache: MambaRadixCache,
        kv: KVPool,
        states: StatePool,
        transfer: PoolTransfer,
        disk: DiskTier,
        policy: WritePolicy,
    ) -> None:
        """Put a disk below a cache.

        Args:
            cache: the tree, on these pools.
            kv, states: the pools.
            transfer: between the pools and entries.
            disk: of the transfer's layout.
            policy: when a state is written: as soon as the cache has it, when a request hits it, or when it is evicted
                (and at the end).
        """
        self._cache, self._kv, self._states = cache, kv, states
        self._transfer, self._disk, self.policy = transfer, disk, policy
        self._loads: list[Load] = []  # under way
        self._num_ended = 0
        if policy == "write_back":
            cache.on_evict = self._write

    def is_loading(self, wish: DiskWish, tokens: Tokens, extra_key: str | None, tenant: str | None) -> bool:
        """Bring what the disk has of a text into the cache; True while that lasts, and the request should wait.

        Args:
            wish: of the request; new at first.
            tokens: [n] int64, of the text.
            extra_key, tenant: its scope.
        """
        if wish.is_over:
            return False
        if wish.other is not None and not wish.other.is_over and wish.other.result is None:
            return True
        if wish.refused_at == self._num_ended:
            return True
        if wish.load is None and not self._begin(wish, tokens, extra_key, tenant):
            return not wish.is_over
        assert wish.load is not None
        if (result := wish.load.result) is None:
            return True
        self._end(wish)
        if isinstance(result, str):
            self._disk.count_miss(result)
        else:
            self._insert(wish.load, result, tokens, extra_key, tenant)
        return False

    def cancel(self, wish: DiskWish) -> None:
        """Forget the load of a request that is gone."""
        if not wish.is_over:
            self._end(wish)

    def wait(self) -> None:
        """Wait a short time for a load, when nothing else is to be done."""
        if self._loads and all(load.result is None for load in self._loads):
            time.sleep(IDLE_WAIT_S)

    def state_was_left(self, node: Node) -> None:
        """Write the state of a node that a request has just left."""
        if self.policy == "write_through":
            self._write(node)

    def state_was_hit(self, node: Node) -> None:
        """Note that a request goes on from a node's state."""
        if self.policy == "write_through_selective" and node.state_slot is not None:
            self._write(node)

    def describe_line(self) -> str:
        """Return a line for the report at start."""
        stats, gib = self._disk.stats(), 1 << 30
        return (
            f"prefixes on disk: {stats.num_entries} entries in {stats.num_bytes / gib:.2f} GiB of "
            f"{stats.max_bytes / gib:.2f}, {self.policy}"
        )

    def stats(self) -> DiskStats:
        """Return the figures of the disk."""
        return self._disk.stats()

    def drain(self) -> bool:
        """Wait until all that was given to the disk is written; returns whether it is."""
        return self._disk.drain()

    def close(self) -> None:
        """Write what the policy leaves for the end, and end the threads."""
        if self.policy == "write_back":
            self._cache.on_evict = None
            deadline = time.monotonic() + CLOSE_S
            for node in self._cache.state_nodes():  # parents first, so that their children continue them
                self._write(node, deadline)
        self._disk.close()

    # ---- from the disk -----------------------------------------------------------------------------------------------

    def _begin(self, wish: DiskWish, tokens: Tokens, extra_key: str | None, tenant: str | None) -> bool:
        """Begin a load for a request; False where it has to wait for another one, or has nothing to load."""
        known = self._cache.peek(tokens, extra_key, tenant)[0]
        if len(tokens) - known < MIN_GAIN:
            wish.is_over = True
            return False
        text = self._disk.hasher(tokens, extra_key, tenant)
        chain = [entry for entry in self._disk.find(text) if entry.end > known]
        if not chain or chain[-1].end - known < MIN_GAIN:
            if not chain and not wish.other:
                self._disk.count_miss(self._disk.why_absent(text))
            wish.is_over = True
            return False
        keys = {entry.key for entry in chain}
        wish.other = next((load for load in self._loads if any(each.key in keys for each in load.chain)), None)
        if wish.other is not None:
            return False
        if not self._has_room_to_load(chain):
            wish.refused_at = self._num_ended
            return False
        wish.load = self._disk.load(chain)
        self._loads.append(wish.load)
        return True

    def _has_room_to_load(self, chain: Sequence[Stored]) -> bool:
        """Whether the memory that loads hold, until they are in the pools, stays bounded with this one."""
        held = sum(load.nbytes for load in self._loads)
        return not held or held + Load(chain).nbytes <= MAX_BYTES_IN_FLIGHT or self._disk.hangs

    def _end(self, wish: DiskWish) -> None:
        wish.is_over = True
        if wish.load is not None:
            wish.load.is_over = True
            self._loads.remove(wish.load)
            self._num_ended += 1

    def _insert(
        self, load: Load, entries: Sequence[Entry], tokens: Tokens, extra_key: str | None, tenant: str | None
    ) -> None:
        """Insert a chain into the cache as if a request had left it."""
        last = entries[-1]
        node = self._cache.match(tokens[: last.end], extra_key, tenant).node
        if node.end < load.chain[0].start or last.end - node.end < 1:  # evicted meanwhile, or left by another request
            self._disk.count_miss("no_room")
            return
        self._cache.lock(node)
        try:
            fits = self._insert_below(node, entries, tokens[node.end : last.end])
        finally:
            start = node.end
            self._cache.unlock(node)
        if fits:
            self._disk.count_hit(load, last.end - start)
        else:
            self._disk.count_miss("no_room")

    def _insert_below(self, node: Node, entries: Sequence[Entry], tokens: Tokens) -> bool:
        """Insert the tokens that follow a locked node, with their KV and the state at their end; False: no room."""
        last, size, allocator = entries[-1], self._kv.page_size, self._kv.allocator
        first_page = node.end // size
        num_pages = -(-last.end // size) - first_page
        if not self._cache.evict_states(1) or not self._cache.evict_pages(num_pages):
            return False
        pages = allocator.allocate(num_pages)
        assert pages is not None
        slot = None
        try:
            positions = np.arange(node.end, last.end)
            slots: TokenSlots = pages[positions // size - first_page] * size + positions % size
            slot = self._states.reserve(PREFIX_CACHE)
            assert slot is not None
            self._transfer.put_tokens([entry for entry in entries if entry.end > node.end], node.end, slots)
            self._transfer.put_state(last, slot)
            if self._cache.insert(node, tokens, slots, slot).takes_state:
                slot = None
        finally:
            allocator.release(pages, pinned=True)
            if slot is not None:
                self._states.free(slot, PREFIX_CACHE)
        return True

    # ---- to the disk -------------------------------------------------------------------------------------------------

    def _write(self, node: Node, deadline: float | None = None) -> None:
        """Give the state of a node to the disk, with the KV since the nearest state that the disk has."""
        tokens, root = _text_of(node)
        if len(tokens) <= HEAD_TOKENS or node.state_slot is None:
            return
        text = self._disk.hasher(tokens, root.extra_key, root.tenant)
        chain = self._disk.find(text)
        self._disk.note_use(chain)
        start = chain[-1].end if chain else 0
        if node.end - start < MIN_GAIN:
            return
        layout = self._transfer.layout
        nbytes = (node.end - start) * layout.token_bytes + layout.state_bytes
        if deadline is not None:
            self._disk.wait_to_put(nbytes, deadline - time.monotonic())
        if not self._disk.has_room_to_put(nbytes):
            return
        key = text.digest(node.end)
        if chain:
            parent = chain[-1].key
        else:
            text.restart()
            parent = text.digest(HEAD_TOKENS)
        self._disk.put(self._transfer.take(key, parent, start, _slots_of(node, start), node.state_slot))


def _text_of(node: Node) -> tuple[Tokens, Root]:
    """Return the tokens from the root to the end of a node, and the root."""
    path = list(node.path())
    root = path[-1]
    assert isinstance(root, Root)
    return np.concatenate([each.key for each in path[::-1]]), root


def _slots_of(node: Node, start: int) -> TokenSlots:
    """Return the token slots of positions [start, node.end)."""
    parts: list[TokenSlots] = []
    for each in node.path():
        if each.end <= start:
            break
        parts.append(each.slots[max(0, start - each.start) :])
    return np.concatenate(parts[::-1])
