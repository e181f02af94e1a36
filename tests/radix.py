"""Prefix caches over small pools, where every KV slot and every state remembers which text it was made from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.prefix import MambaRadixCache
from specmamba.cache.prefix.eviction import Costs, PolicyName
from specmamba.cache.prefix.node import NOTHING, Match, Node, TokenSlots
from specmamba.cache.request_table import RequestTable
from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.cache.state_pool import PREFIX_CACHE, StatePool

Text = tuple[int, ...]
NUM_ROWS = 4
SHAPE = CacheShape(
    kv=(KVShape(1, 1, 1),),
    num_state_layers=1,
    state=StateShape(num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=1, conv_width=2),
    dtype=torch.float32,
)
COSTS = Costs(state_bytes=64, kv_bytes_per_token=8, flops_per_token=100.0, flops_per_token_squared=1.0)


def array(text: Sequence[int]) -> NDArray[np.int64]:
    return np.array(text, dtype=np.int64)


class World:
    """A cache with its pools and a request table, as the engine has them."""

    def __init__(
        self,
        page_size: int = 1,
        num_pages: int = 64,
        num_states: int = 8,
        policy: PolicyName = "lru",
        max_positions: int | None = None,
    ) -> None:
        cpu = torch.device("cpu")
        self.page_size = page_size
        kv_pool = KVPool(SHAPE, num_pages, page_size, cpu)
        self.allocator = kv_pool.allocator
        self.table = RequestTable(NUM_ROWS, max_positions or (num_pages + 1) * page_size, kv_pool, cpu)
        self.states = StatePool(SHAPE, num_states, cpu)
        self.cache = MambaRadixCache(self.allocator, page_size, self.states, COSTS, policy)
        self.kv: dict[int, tuple[str | None, Text]] = {}  # by token slot: the text that ends with this token
        self.state: dict[int, tuple[str | None, Text]] = {}  # by state slot: the text that it stands after

    def check(self) -> None:
        self.cache.check(self.table.held_pages())

    def row(self, num_positions: int, borrowed: TokenSlots = NOTHING) -> int | None:
        """A row of the table with room for ``num_positions``, the first of them borrowed; None where that fails."""
        row = self.table.allocate_row()
        if row is None:
            return None
        self.table.borrow(row, borrowed)
        if not self.table.ensure(row, num_positions):
            self.table.release(row)
            return None
        return row

    def slots(self, row: int, start: int, end: int) -> TokenSlots:
        return self.table.slots_of_positions(row, start, end)

    def release(self, row: int) -> None:
        self.table.release(row)
        assert not self.slots(row, 0, self.table.max_positions).any()

    def write(self, row: int, salt: str | None, text: Text, start: int, end: int) -> None:
        """Run positions start..end-1 of a text."""
        for position, slot in zip(range(start, end), self.slots(row, start, end).tolist(), strict=True):
            self.kv[slot] = salt, text[: position + 1]

    def new_state(self, salt: str | None, text: Text) -> int | None:
        """A state of the prefix cache that stands after ``text``; None where no slot is free."""
        slot = self.states.reserve(PREFIX_CACHE)
        if slot is not None:
            self.states.end_write(slot, len(text))
            self.state[slot] = salt, text
        return slot

    def free_state(self, slot: int) -> None:
        self.states.free(slot, PREFIX_CACHE)

    def store(self, text: Sequence[int], salt: str | None = None, ends: Sequence[int] = ()) -> Node:
        """Run a whole text, with chunk ends at ``ends`` and at its end; the node at the end. It has to fit."""
        text = tuple(text)
        node = self.cache.root(salt)
        self.cache.lock(node)
        row = self.row(len(text))
        assert row is not None
        for end in (*ends, len(text)):
            start = node.end
            self.write(row, salt, text, start, end)
            slot = self.new_state(salt, text[:end])
            assert slot is not None
            insertion = self.cache.insert(node, array(text[start:end]), self.slots(row, start, end), slot)
            if not insertion.takes_state:
                self.free_state(slot)
            self.cache.move_lock(node, insertion.node)
            self.table.settle(row, start, insertion.slots)
            node = insertion.node
        self.release(row)
        self.cache.unlock(node)
        return node

    def match(self, text: Sequence[int], salt: str | None = None) -> Match:
        """A match whose KV and state are verified to be those of this very text."""
        text = tuple(text)
        match = self.cache.match(array(text), salt)
        assert [self.kv[slot] for slot in match.slots.tolist()] == [(salt, text[: i + 1]) for i in range(match.length)]
        if match.node.state_slot is not None:
            assert self.state[match.node.state_slot] == (salt, text[: match.length])
        return match

    def contents(self) -> tuple[dict[str | None, set[Text]], dict[str | None, set[Text]]]:
        """Every text that has KV and every text that has a state, by salt, as the tree's nodes say."""
        kv: dict[str | None, set[Text]] = {}
        states: dict[str | None, set[Text]] = {}
        for (_, salt), root in self.cache._tree.roots.items():
            kv[salt], states[salt] = set(), set()
            todo: list[tuple[Node, Text]] = [(root, ())]
            while todo:
                node, before = todo.pop()
                text = (*before, *node.key.tolist())
                kv[salt] |= {text[:end] for end in range(len(before) + 1, len(text) + 1)}
                if node.state_slot is not None:
                    states[salt].add(text)
                todo += [(child, text) for child in node.children.values()]
        return kv, states
