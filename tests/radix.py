"""Prefix caches over small pools, where every KV slot and every state remembers which text it was made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specmamba.cache.page_allocator import PageAllocator, Pages
from specmamba.cache.radix_cache import MambaRadixCache
from specmamba.cache.radix_eviction import Costs, PolicyName
from specmamba.cache.radix_node import Match, Node
from specmamba.cache.shapes import CacheShape, DeltaStateShape
from specmamba.cache.state_pool import PREFIX_CACHE, StatePool

Text = tuple[int, ...]
SHAPE = CacheShape(
    num_kv_layers=1,
    num_kv_heads=1,
    head_dim=1,
    num_state_layers=1,
    state=DeltaStateShape(num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=1, conv_width=2),
    dtype=torch.float32,
)
COSTS = Costs(state_bytes=64, kv_bytes_per_token=8, flops_per_token=100.0, flops_per_token_squared=1.0)


def array(text: Sequence[int]) -> NDArray[np.int64]:
    return np.array(text, dtype=np.int64)


@dataclass
class Row:
    """Pages for positions ``start`` and later, as a row of the request table has them: offsets are position % size."""

    page_size: int
    start: int
    pages: Pages

    def slots(self, start: int, end: int) -> NDArray[np.int64]:
        positions = np.arange(start, end)
        page = self.pages[positions // self.page_size - self.start // self.page_size]
        return page * self.page_size + positions % self.page_size


class World:
    """A cache with its pools, and a ledger of what rows hold."""

    def __init__(
        self, page_size: int = 1, num_pages: int = 64, num_states: int = 8, policy: PolicyName = "lru"
    ) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.states = StatePool(SHAPE, num_states, torch.device("cpu"))
        self.cache = MambaRadixCache(self.allocator, page_size, self.states, COSTS, policy)
        self.row_pages: Counter[int] = Counter()
        self.kv: dict[int, tuple[str | None, Text]] = {}  # by token slot: the text that ends with this token
        self.state: dict[int, tuple[str | None, Text]] = {}  # by state slot: the text that it stands after

    def check(self) -> None:
        self.cache.check(dict(self.row_pages))

    def row(self, start: int, end: int) -> Row | None:
        """Pages for positions start..end-1; None, and nothing is taken, where there are not enough."""
        pages = self.allocator.allocate(-(-end // self.page_size) - start // self.page_size)
        if pages is None:
            return None
        self.row_pages.update(pages.tolist())
        return Row(self.page_size, start, pages)

    def release(self, row: Row, end: int | None = None) -> None:
        """Release a row, or only its pages in front of position ``end``."""
        count = len(row.pages) if end is None else max(0, end // self.page_size - row.start // self.page_size)
        gone, row.pages = row.pages[:count], row.pages[count:]
        self.allocator.release(gone, pinned=True)
        self.row_pages = +(self.row_pages - Counter(gone.tolist()))
        row.start = max(row.start, (row.start // self.page_size + count) * self.page_size)

    def write(self, row: Row, salt: str | None, text: Text, start: int, end: int) -> None:
        """Run positions start..end-1 of a text."""
        for position, slot in zip(range(start, end), row.slots(start, end).tolist(), strict=True):
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
        row = self.row(0, len(text))
        assert row is not None
        for end in (*ends, len(text)):
            start = node.end
            self.write(row, salt, text, start, end)
            slot = self.new_state(salt, text[:end])
            assert slot is not None
            insertion = self.cache.insert(node, array(text[start:end]), row.slots(start, end), slot)
            if not insertion.takes_state:
                self.free_state(slot)
            self.cache.move_lock(node, insertion.node)
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
        for salt, root in self.cache._tree.roots.items():
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
