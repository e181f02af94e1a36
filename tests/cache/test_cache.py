"""Pools, tables and per-request buffers: who owns what, and the mathematics of pending records."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specmamba.cache.access import causal_keys, tree_keys
from specmamba.cache.kv_pool import KVPool, PageAllocator, Pages
from specmamba.cache.request_table import RequestTable, TokenCounts
from specmamba.cache.shapes import CacheShape, KVShape, StateShape, pending_capacity
from specmamba.cache.state_pool import Stamp, StateOwnershipError, StatePool
from specmamba.core import Batch
from specmamba.draft.drafter import chain_shape
from specmamba.kernels import causal_conv1d, gated_delta_rule
from specmamba.kernels.state_records import RowSet
from specmamba.sampling_params import SamplingBatch, SamplingParams
from specmamba.verify.record_buffers import RecordBuffers
from tests.kernels.trees import path_to, random_parents, real_nodes, shape_of

CPU = torch.device("cpu")
NUM_LAYERS = 2
STATE = StateShape(num_key_heads=2, num_value_heads=4, key_dim=5, value_dim=3, conv_width=4)


def cache_shape(state: StateShape = STATE, dtype: torch.dtype = torch.float32) -> CacheShape:
    return CacheShape(kv=(KVShape(2, 2, 3),), num_state_layers=NUM_LAYERS, state=state, dtype=dtype)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class TestPageAllocator:
    def test_all_or_nothing(self) -> None:
        allocator = PageAllocator(5)
        assert (allocator.num_free, allocator.num_available) == (5, 5)
        first = allocator.allocate(3)
        assert first is not None
        assert allocator.allocate(3) is None
        assert (allocator.num_free, allocator.num_available) == (2, 2)
        second = allocator.allocate(2)
        assert second is not None
        assert sorted([*first, *second]) == [1, 2, 3, 4, 5]
        nothing = allocator.allocate(0)
        assert nothing is not None
        assert len(nothing) == 0

    @pytest.mark.parametrize("page", [0, -1, 4, 2])
    @pytest.mark.parametrize("action", ["release", "hold", "pin", "unpin"])
    def test_a_page_that_is_not_out(self, page: int, action: str) -> None:
        allocator = PageAllocator(3)
        allocator.allocate(2)
        allocator.release(np.array([2]), pinned=True)
        act = getattr(allocator, action)
        arguments = {"pinned": True} if action in ("release", "hold") else {}
        with pytest.raises(RuntimeError, match="freed twice or was never allocated"):
            act(np.array([page]), **arguments)

    def test_freed_twice_in_one_call(self) -> None:
        allocator = PageAllocator(3)
        allocator.allocate(3)
        with pytest.raises(RuntimeError, match="freed twice in one call"):
            allocator.release(np.array([1, 1]), pinned=True)

    def test_pages_that_are_not_pinned_cannot_be_unpinned(self) -> None:
        allocator = PageAllocator(3)
        pages = allocator.allocate(1)
        assert pages is not None
        allocator.hold(pages, pinned=False)
        allocator.release(pages, pinned=True)
        assert (allocator.num_free, allocator.num_evictable) == (2, 1)
        with pytest.raises(RuntimeError, match="unpinned that was not pinned"):
            allocator.release(pages, pinned=True)

    def test_the_last_holder_leaves_a_pinned_page(self) -> None:
        allocator = PageAllocator(3)
        pages = allocator.allocate(1)
        assert pages is not None
        with pytest.raises(RuntimeError, match="while it was pinned"):
            allocator.release(pages, pinned=False)

    @pytest.mark.parametrize(("freed", "given"), [(16, range(16)), (15, None), (3000, range(952, 3000))])
    def test_pages_that_many_holders_left_are_given_in_order(self, freed: int, given: range | None) -> None:
        """The next ones of them: of few, and of those behind them, the order is that of their release."""
        allocator = PageAllocator(freed)
        pages = allocator.allocate(freed)
        assert pages is not None
        shuffled = np.random.default_rng(1).permutation(pages)
        allocator.release(shuffled, pinned=True)
        again = allocator.allocate(freed)
        assert again is not None
        assert sorted(again) == sorted(pages)
        if given is None:
            assert list(again) == list(shuffled)
        else:
            assert list(again[: len(given)]) == sorted(again[: len(given)])

    def test_pages_are_given_in_few_runs(self) -> None:
        """The shortest that is long enough, then what it leaves; the longest ones where none is."""
        allocator = PageAllocator(300)
        assert allocator.allocate(300) is not None
        for first, last in ((10, 14), (40, 59), (100, 159), (200, 229)):
            allocator.release(np.arange(first, last + 1), pinned=True)

        def given(count: int) -> list[int]:
            pages = allocator.allocate(count)
            assert pages is not None
            return pages.tolist()

        assert given(18) == [*range(40, 58)]
        assert given(2) == [58, 59]
        assert given(26) == [*range(200, 226)]
        assert given(62) == [*range(100, 160), 226, 227]
        assert given(7) == [228, 229, *range(10, 15)]

    def test_random_use(self) -> None:
        """Against a plain list of who holds what, pinned or not."""
        rng = random.Random(1)
        allocator, held = PageAllocator(90), list[tuple[Pages, bool]]()
        for _ in range(800):
            action, at = rng.random(), rng.randrange(len(held)) if held else -1
            if action < 0.3 or not held:
                pages = allocator.allocate(rng.randint(0, 30))
                held += [] if pages is None else [(pages, True)]
            elif action < 0.5:
                pages, pinned = held[at][0], rng.random() < 0.5
                allocator.hold(pages, pinned)
                held.append((pages, pinned))
            elif action < 0.7:
                pages, pinned = held[at]
                (allocator.unpin if pinned else allocator.pin)(pages)
                held[at] = pages, not pinned
            else:
                pages, pinned = held.pop(at)
                allocator.release(pages, pinned)
            holders = Counter(int(page) for pages, _ in held for page in pages)
            pins = Counter(int(page) for pages, pinned in held if pinned for page in pages)
            assert all(1 <= page <= 90 for page in holders)
            assert allocator.num_free == 90 - len(holders)
            assert (allocator.num_pinned, allocator.num_evictable) == (len(pins), len(holders) - len(pins))
            assert all((allocator.holders(p), allocator.pins(p)) == (holders[p], pins[p]) for p in range(1, 91))


class TestKVPool:
    @pytest.mark.parametrize("kv_dtype", [None, torch.int8])
    def test_latent_layers_keep_one_row_for_a_token(self, kv_dtype: torch.dtype | None) -> None:
        """Beside plain ones; values are views on their keys, and move and vanish with them."""
        shape = replace(cache_shape(), kv=(KVShape(2, 2, 3), KVShape(1, 1, 7, latent_dim=5)), kv_dtype=kv_dtype)
        pool = KVPool(shape, num_pages=4, page_size=4, device=CPU)
        assert [tuple(x.shape) for x in (*pool.k, *pool.v)] == [(20, 2, 3)] * 2 + [(20, 1, 7)] + [(20, 2, 3)] * 2 + [
            (20, 1, 5)
        ]
        assert sum(group[:, 0].nbytes for group in pool.groups) == shape.kv_bytes_per_token
        scales = pool.k_scales[2], pool.v_scales[2]
        if kv_dtype is None:
            assert scales == (None, None)
        else:
            assert scales[0].data_ptr() == scales[1].data_ptr()
        for x in pool.k:
            x.copy_(torch.arange(20)[:, None, None])
        pool.move(torch.tensor([5, 6]), torch.tensor([6, 7]))
        assert pool.v[2][:, 0, 0].tolist()[4:9] == [4, 5, 5, 6, 8]
        pool.clear(torch.tensor([8]))
        assert not pool.k[2][8].any()

    def test_write_and_move(self) -> None:
        pool = KVPool(cache_shape(), num_pages=4, page_size=4, device=CPU)
        assert pool.num_tokens == 16
        slots = torch.tensor([5, 6, 7, 8, 9])
        k, v = torch.randn(2, 5, 2, 3), torch.randn(2, 5, 2, 3)
        for layer in range(2):
            pool.k[layer][slots], pool.v[layer][slots] = k[layer], v[layer]
        # a path 0, 2, 4 moves up to 0, 1, 2: every read before any write, also where the two overlap
        pool.move(torch.tensor([7, 9]), torch.tensor([6, 7]))
        assert torch.equal(torch.stack(pool.k)[:, 5:8], k[:, [0, 2, 4]])
        assert torch.equal(torch.stack(pool.v)[:, 5:8], v[:, [0, 2, 4]])
        assert torch.equal(torch.stack(pool.k)[:, 8:10], k[:, 3:5])
        assert not torch.stack(pool.k)[:, :5].any()
        pool.move(torch.tensor([5, 6]), torch.tensor([6, 5]))
        assert torch.equal(torch.stack(pool.k)[:, 5:7], k[:, [2, 0]])

    def test_moving_nothing(self) -> None:
        pool = KVPool(cache_shape(), num_pages=2, page_size=1, device=CPU)
        nothing = torch.zeros(0, dtype=torch.int64)
        pool.move(nothing, nothing)

    def test_used_tokens_count_whole_pages(self) -> None:
        pool = KVPool(cache_shape(), num_pages=4, page_size=16, device=CPU)
        pool.allocator.allocate(3)
        assert (pool.num_tokens, pool.num_used_tokens) == (64, 48)


class TestRequestTable:
    def test_a_copy_on_the_device_follows(self) -> None:
        """What a GPU has gets the changes when the table is read; rows that were given back meanwhile are empty."""
        rng = random.Random(5)
        pool = KVPool(cache_shape(), num_pages=20, page_size=2, device=CPU)
        mirrored = RequestTable(3, 16, pool, CPU, is_mirrored=True)
        plain = RequestTable(3, 16, KVPool(cache_shape(), num_pages=20, page_size=2, device=CPU), CPU)
        stays = mirrored.kv_slots
        for _ in range(300):
            rows = [row for row in range(1, 4) if row in mirrored._holdings]
            if mirrored.num_free_rows and rng.random() < 0.3:
                assert mirrored.allocate_row() == plain.allocate_row()
            elif rows and rng.random() < 0.3:
                row = rng.choice(rows)
                mirrored.release(row)
                plain.release(row)
            elif rows:
                row, wanted = rng.choice(rows), rng.randint(0, 16)
                assert mirrored.ensure(row, wanted) == plain.ensure(row, wanted)
            if rng.random() < 0.4:
                assert torch.equal(mirrored.kv_slots, plain.kv_slots)
        assert mirrored.kv_slots.data_ptr() == stays.data_ptr()

    @pytest.mark.parametrize("page_size", [1, 3, 16])
    def test_random_use(self, page_size: int) -> None:
        """Rows never share a slot, a refusal changes nothing, and what is released is free again."""
        rng = random.Random(page_size)
        pool = KVPool(cache_shape(), num_pages=60 // page_size, page_size=page_size, device=CPU)
        table = RequestTable(6, max_positions=20, kv_pool=pool, device=CPU)
        lengths: dict[int, int] = {}
        for _ in range(400):
            action = rng.random()
            if action < 0.3 and table.num_free_rows:
                row = table.allocate_row()
                assert row == min(set(range(1, 7)) - set(lengths))
                lengths[row] = 0
            elif action < 0.8 and lengths:
                row, wanted = rng.choice(list(lengths)), rng.randint(0, 20)
                before, free = table.kv_slots.clone(), pool.allocator.num_free
                missing = table.num_missing_pages(row, wanted)
                if table.ensure(row, wanted):
                    assert pool.allocator.num_free == free - missing
                    lengths[row] = max(lengths[row], wanted)
                else:
                    assert missing > free == pool.allocator.num_free
                    assert torch.equal(table.kv_slots, before)
            elif lengths:
                row = rng.choice(list(lengths))
                table.release(row)
                del lengths[row]
                assert not table.kv_slots[row].any()
            assert table.num_free_rows == 6 - len(lengths)
            used = [table.kv_slots[row, :length] for row, length in lengths.items()]
            slots = torch.cat(used) if used else torch.zeros(0)
            assert len(slots.unique()) == len(slots)
            assert bool((slots >= page_size).all())  # page 0 is padding
        for row in list(lengths):
            table.release(row)
        assert pool.allocator.num_free == pool.allocator.num_pages

    @pytest.mark.parametrize("page_size", [1, 4])
    def test_borrow_and_settle(self, page_size: int) -> None:
        """A row borrows 6 tokens, writes on, and gives what it has written up to 10 to the cache."""
        pool = KVPool(cache_shape(), num_pages=48 // page_size, page_size=page_size, device=CPU)
        table, allocator = RequestTable(2, 20, pool, CPU), pool.allocator
        donor, row = table.allocate_row(), table.allocate_row()
        assert donor is not None
        assert row is not None
        assert table.ensure(donor, 6)
        borrowed = table.slots_of_positions(donor, 0, 6)
        table.borrow(row, borrowed)
        assert (
            table.num_missing_pages(None, 12, 6) == table.num_missing_pages(row, 12) == 12 // page_size - 6 // page_size
        )
        assert table.ensure(row, 12)
        slots = table.slots_of_positions(row, 0, 12)
        assert slots[:6].tolist() == borrowed.tolist()
        assert len(set(slots)) == 12
        assert (slots % page_size == np.arange(12) % page_size).all()

        cached = slots[6:10]
        node_pages = np.unique(cached // page_size)
        allocator.hold(node_pages, pinned=True)  # as a node does
        table.settle(row, 6, cached)
        assert table.slots_of_positions(row, 0, 12).tolist() == slots.tolist()
        assert not set(table.held_pages()) & set((cached[: 10 // page_size * page_size - 6] // page_size).tolist())
        assert table.ensure(row, 16)
        assert table.slots_of_positions(row, 0, 12).tolist() == slots.tolist()
        table.release(row)
        table.release(donor)
        assert allocator.num_free == allocator.num_pages - len(node_pages)

    def test_settle_on_what_others_have_cached(self) -> None:
        """The row points at the cache's slots from then on, and its own pages are free."""
        pool = KVPool(cache_shape(), num_pages=16, page_size=4, device=CPU)
        table = RequestTable(2, 16, pool, CPU)
        first, second = table.allocate_row(), table.allocate_row()
        assert first is not None
        assert second is not None
        for row in (first, second):
            assert table.ensure(row, 12)
        theirs, own = (table.slots_of_positions(row, 0, 12) for row in (first, second))
        table.settle(second, 0, theirs[:10])
        assert table.slots_of_positions(second, 0, 12).tolist() == [*theirs[:10], *own[10:]]
        assert pool.allocator.num_free == 16 - 3 - 1

    def test_no_row_left(self) -> None:
        table = RequestTable(1, 4, KVPool(cache_shape(), 4, 1, CPU), CPU)
        assert table.allocate_row() == 1
        assert table.allocate_row() is None

    def test_more_positions_than_a_row_has(self) -> None:
        table = RequestTable(1, 4, KVPool(cache_shape(), 8, 1, CPU), CPU)
        row = table.allocate_row()
        assert row is not None
        with pytest.raises(ValueError, match="row 1 has room for 4 positions, not 5"):
            table.ensure(row, 5)

    def test_a_row_that_ends_inside_a_page(self) -> None:
        table = RequestTable(2, max_positions=5, kv_pool=KVPool(cache_shape(), 4, 4, CPU), device=CPU)
        row = table.allocate_row()
        assert row is not None
        assert table.num_missing_pages(None, 5) == 2
        assert table.ensure(row, 5)
        assert len(table.kv_slots[row].unique()) == 5

    def test_slots_at(self) -> None:
        pool = KVPool(cache_shape(), 8, 1, CPU)
        table = RequestTable(3, 4, pool, CPU)
        rows = [table.allocate_row() for _ in range(3)]
        for row in rows:
            assert row is not None
            assert table.ensure(row, 2)
        found = table.slots_at(torch.tensor([3, 1]), torch.tensor([[0, 1], [1, 3]]))
        expected = torch.stack([table.kv_slots[3, [0, 1]], table.kv_slots[1, [1, 3]]])
        assert torch.equal(found, expected)
        assert found[1, 1] == 0  # beyond the row's pages: padding

    def test_released_twice(self) -> None:
        table = RequestTable(2, 4, KVPool(cache_shape(), 4, 1, CPU), CPU)
        row = table.allocate_row()
        assert row is not None
        table.release(row)
        with pytest.raises(KeyError):
            table.release(row)
        assert table.num_free_rows == 2


class TestStatePool:
    @pytest.fixture
    def pool(self) -> StatePool:
        return StatePool(cache_shape(), 3, CPU)

    def test_a_new_slot_stands_before_any_token(self, pool: StatePool) -> None:
        pool.recurrent.fill_(7)
        pool.conv.fill_(7)
        slot = pool.allocate("a")
        assert slot == 1
        assert pool.stamp(slot) == Stamp("a", 0, is_written=True)
        assert not pool.recurrent[:, slot].any()
        assert not pool.conv[:, slot].any()
        assert bool((pool.recurrent[:, 2:] == 7).all())  # the neighbours are untouched
        pool.check(slot, "a", 0)

    def test_lowest_first_until_none_is_left(self, pool: StatePool) -> None:
        assert [pool.allocate(owner) for owner in "abc"] == [1, 2, 3]
        assert pool.allocate("d") is None
        pool.free(3, "c")
        pool.free(1, "a")
        assert pool.num_free == 2
        assert pool.allocate("e") == 1

    def test_stamps_follow_the_writes(self, pool: StatePool) -> None:
        slot = pool.allocate("a")
        assert slot is not None
        pool.begin_write(slot, "a")
        with pytest.raises(StateOwnershipError, match="is_written=False"):
            pool.check(slot, "a", 0)
        pool.end_write(slot, 12)
        pool.check(slot, "a", 12)

    @pytest.mark.parametrize(("owner", "position"), [("b", 5), ("a", 4), ("a", 6), ("a", 0)])
    def test_a_wrong_owner_or_position(self, pool: StatePool, owner: str, position: int) -> None:
        slot = pool.allocate("a")
        assert slot is not None
        pool.begin_write(slot, "a")
        pool.end_write(slot, 5)
        with pytest.raises(StateOwnershipError, match=f"state slot {slot} should hold '{owner}' at {position}"):
            pool.check(slot, owner, position)

    def test_another_owner_can_neither_write_nor_free(self, pool: StatePool) -> None:
        slot = pool.allocate("a")
        assert slot is not None
        with pytest.raises(StateOwnershipError, match="'b' writes state slot 1, which belongs to 'a'"):
            pool.begin_write(slot, "b")
        with pytest.raises(StateOwnershipError, match="'b' frees state slot 1, which belongs to 'a'"):
            pool.free(slot, "b")
        pool.check(slot, "a", 0)

    def test_a_request_takes_only_the_prefix_caches_state_where_it_stands(self, pool: StatePool) -> None:
        slot = pool.allocate("a")
        assert slot is not None
        with pytest.raises(StateOwnershipError, match="should hold 'prefix cache' at 0"):
            pool.take(slot, "b", 0)
        pool.donate(slot, "a", 0)
        with pytest.raises(StateOwnershipError, match="should hold 'prefix cache' at 1"):
            pool.take(slot, "b", 1)
        pool.take(slot, "b", 0)
        pool.check(slot, "b", 0)

    def test_nothing_works_on_a_free_slot(self, pool: StatePool) -> None:
        slot = pool.allocate("a")
        assert slot is not None
        pool.free(slot, "a")
        for use in (
            lambda: pool.free(slot, "a"),
            lambda: pool.check(slot, "a", 0),
            lambda: pool.begin_write(slot, "a"),
            lambda: pool.end_write(slot, 1),
            lambda: pool.stamp(0),
        ):
            with pytest.raises(StateOwnershipError, match=r"state slot \d is free"):
                use()
        assert pool.num_free == 3


class Reference:
    """One request's state the slow way: float64, one token after the other, no records."""

    def __init__(self, state: StateShape) -> None:
        s = state
        self.group = s.num_value_heads // s.num_key_heads
        self.state = torch.zeros(NUM_LAYERS, s.num_value_heads, s.key_dim, s.value_dim, dtype=torch.float64)
        self.inputs = torch.zeros(NUM_LAYERS, s.conv_width - 1, s.conv_channels, dtype=torch.float64)
        self.position = 0

    def run(self, layer: int, tokens: dict[str, Tensor], weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [T, ...] -> the last one's convolution [C] and output [Hv, V], then the state and the inputs."""
        state, inputs = self.state[layer].clone(), self.inputs[layer]
        t = {name: x.double() for name, x in tokens.items()}
        out = torch.zeros(0)
        for i in range(len(t["g"])):
            k, q = (t[name][i].repeat_interleave(self.group, 0) for name in ("k", "q"))
            state = state * t["g"][i].exp()[:, None, None]
            u = t["beta"][i][:, None] * (t["v"][i] - torch.einsum("hkv,hk->hv", state, k))
            state = state + torch.einsum("hk,hv->hkv", k, u)
            out = torch.einsum("hkv,hk->hv", state, q)
        inputs = torch.cat([inputs, t["x"]])
        mixed = (inputs[-weight.shape[1] :] * weight.double().T).sum(0)
        return mixed * mixed.sigmoid(), out, state, inputs

    def advance(self, tokens: list[dict[str, Tensor]], weight: Tensor) -> None:
        """Keep tokens, given layer by layer."""
        after = [self.run(layer, of_layer, weight) for layer, of_layer in enumerate(tokens)]
        self.state = torch.stack([state for _, _, state, _ in after])
        self.inputs = torch.stack([inputs for _, _, _, inputs in after])
        self.position += len(tokens[0]["g"])


class Bench:
    """RecordBuffers beside one ``Reference`` per row. Memory that must not be read holds NaN."""

    def __init__(
        self, num_rows: int, max_nodes: int, seed: int, state: StateShape = STATE, poison: float = torch.nan
    ) -> None:
        self.state = state
        self.rng = random.Random(seed)
        self.pool = StatePool(cache_shape(state), num_rows, CPU)
        self.buffers = RecordBuffers(cache_shape(state), self.pool, num_rows, max_nodes, CPU)
        for buffer in (self.buffers.k, self.buffers.u, self.buffers.decay, self.buffers.conv_inputs):
            buffer.fill_(poison)
        self.pool.recurrent.fill_(poison)
        self.pool.conv.fill_(poison)
        self.weight = torch.randn(state.conv_channels, state.conv_width)
        self.references: dict[int, Reference] = {}
        self.slots: dict[int, int] = {}

    def begin(self, rows: Sequence[int]) -> None:
        """Rows start in slots of another order."""
        shuffled = list(rows)
        self.rng.shuffle(shuffled)
        for row in shuffled:
            slot = self.pool.allocate(f"request-{row}")
            assert slot is not None
            self.slots[row] = slot
            self.references[row] = Reference(self.state)
            self.buffers.begin(row, slot, f"request-{row}", 0)

    def restart(self, row: int) -> None:
        self.buffers.end(row)
        self.pool.free(self.slots.pop(row), f"request-{row}")
        self.begin([row])

    def round(self, rows: Sequence[int], parents: Sequence[list[int]], accept: Sequence[int] | None = None) -> None:
        """Verify one tree per row, compare every node, and accept the path to a node (None: to a random one)."""
        shape = shape_of(parents)
        plan = self.buffers.plan(rows, shape)
        layers = [self._tokens(len(rows), shape.num_nodes) for _ in range(NUM_LAYERS)]
        for layer, t in enumerate(layers):
            operands = self.buffers.operands(layer, plan)
            mixed = causal_conv1d.advance(t["x"], self.weight, None, operands)
            out = gated_delta_rule.advance(t["q"], t["k"], t["v"], t["g"], t["beta"], operands)
            for b, row in enumerate(rows):
                for node in real_nodes(parents[b]):
                    path = path_to(parents[b], node)
                    tokens = {name: x[b, path] for name, x in t.items()}
                    expected = self.references[row].run(layer, tokens, self.weight)
                    torch.testing.assert_close(mixed[b, node].double(), expected[0], atol=1e-5, rtol=1e-4)
                    torch.testing.assert_close(out[b, node].double(), expected[1], atol=1e-5, rtol=1e-4)
        ends = accept or [self.rng.choice(real_nodes(tree)) for tree in parents]
        paths = [path_to(tree, end) for tree, end in zip(parents, ends, strict=True)]
        padded = torch.tensor([path + path[-1:] * (shape.num_nodes - len(path)) for path in paths])
        accepted = [len(path) - 1 for path in paths]
        self.buffers.commit(plan, padded, torch.tensor(accepted), accepted)
        for b, (row, path) in enumerate(zip(rows, paths, strict=True)):
            self.references[row].advance([{name: x[b, path] for name, x in t.items()} for t in layers], self.weight)
            assert self.buffers.position(row) == self.references[row].position

    def fold(self, rows: Sequence[int]) -> None:
        """Fold all pending records and compare the checkpoints."""
        self.buffers._fold([row for row in rows if self.buffers._num_pending[row]])
        for row in rows:
            reference, slot = self.references[row], self.slots[row]
            assert self.pool.stamp(slot) == Stamp(f"request-{row}", reference.position, is_written=True)
            torch.testing.assert_close(self.pool.recurrent[:, slot].double(), reference.state, atol=1e-5, rtol=1e-4)
            window = reference.inputs[:, reference.inputs.shape[1] - self.buffers.window :]
            assert torch.equal(self.pool.conv[:, slot].double(), window)

    def _tokens(self, batch: int, nodes: int) -> dict[str, Tensor]:
        s = self.state
        unit = torch.nn.functional.normalize
        return {
            "x": torch.randn(batch, nodes, s.conv_channels),
            "q": unit(torch.randn(batch, nodes, s.num_key_heads, s.key_dim), dim=-1) * s.key_dim**-0.5,
            "k": unit(torch.randn(batch, nodes, s.num_key_heads, s.key_dim), dim=-1),
            "v": torch.randn(batch, nodes, s.num_value_heads, s.value_dim),
            "g": -torch.rand(batch, nodes, s.num_value_heads) * 0.5,
            "beta": torch.rand(batch, nodes, s.num_value_heads),
        }


CHAIN_ONLY, ANY_TREE = ("chain",), ("chain", "star", "binary", "bushy", "padded")


class TestRecordBuffers:
    @pytest.mark.parametrize("shape", ["chain", "bushy"])
    @pytest.mark.parametrize("num_nodes", [1, 4, 8])
    def test_every_fill(self, shape: str, num_nodes: int) -> None:
        """Row r + 1 has r pending records: every fill there is, all in one batch, and the fold where it must be."""
        max_nodes = 8
        capacity = pending_capacity(max_nodes)
        bench = Bench(capacity + 1, max_nodes, seed=num_nodes)
        rows = list(range(1, capacity + 2))
        bench.begin(rows)
        for fill in range(capacity):
            longer = rows[fill + 1 :]
            bench.round(longer, [[-1]] * len(longer))
        assert [bench.buffers.position(row) for row in rows] == list(range(capacity + 1))
        assert all(bench.pool.stamp(slot).position == 0 for slot in bench.slots.values())  # nothing folded yet
        bench.round(rows, [random_parents(shape, num_nodes, bench.rng) for _ in rows])
        for row in rows:
            must_fold = row - 1 + num_nodes > capacity
            assert bench.pool.stamp(bench.slots[row]).position == (row - 1 if must_fold else 0)
        bench.fold(rows)

    @pytest.mark.parametrize("shapes", [CHAIN_ONLY, ANY_TREE], ids=["chains", "trees"])
    @pytest.mark.parametrize("seed", range(4))
    def test_random_rounds(self, shapes: tuple[str, ...], seed: int) -> None:
        """Batches with gaps, members that come and go, trees of any size: always the sequential recurrence."""
        max_nodes = 6
        bench = Bench(7, max_nodes, seed)
        bench.begin([1, 2, 3, 5, 6])  # rows 4 and 7 keep their NaN: no row reads its neighbour
        for step in range(25):
            rows = sorted(bench.rng.sample([1, 2, 3, 5, 6], bench.rng.randint(1, 5)))
            num_nodes = bench.rng.randint(1, max_nodes)
            bench.round(rows, [random_parents(bench.rng.choice(shapes), num_nodes, bench.rng) for _ in rows])
            if step % 8 == 7:
                bench.restart(bench.rng.choice(rows))
        bench.fold([1, 2, 3, 5, 6])
        assert bench.buffers.k[:, [0, 4, 7]].isnan().all()
        assert bench.pool.recurrent[:, 0].isnan().all()

    @pytest.mark.parametrize("width", [1, 2, 7])
    def test_convolution_widths(self, width: int) -> None:
        """Width 1 has no window at all; width 7 reaches past the pending records into the checkpoint's window."""
        state = StateShape(num_key_heads=1, num_value_heads=1, key_dim=4, value_dim=4, conv_width=width)
        bench = Bench(3, 5, seed=width, state=state)
        bench.begin([1, 2, 3])
        for _ in range(12):
            rows = bench.rng.choice([[1], [1, 3], [1, 2, 3]])
            bench.round(rows, [random_parents(bench.rng.choice(ANY_TREE), 5, bench.rng) for _ in rows])
        bench.fold([1, 2, 3])

    def test_the_deepest_and_the_shortest_path_side_by_side(self) -> None:
        bench = Bench(2, 8, seed=0)
        bench.begin([1, 2])
        for _ in range(9):
            bench.round([1, 2], [list(range(-1, 7))] * 2, accept=[7, 0])
        assert (bench.buffers.position(1), bench.buffers.position(2)) == (72, 9)
        bench.fold([1, 2])

    def test_a_long_text_stays_exact(self) -> None:
        bench = Bench(1, 4, seed=0)
        bench.begin([1])
        for _ in range(150):
            bench.round([1], [[-1, 0, 1, 2]])
        bench.fold([1])

    def test_a_tree_that_is_too_large(self) -> None:
        bench = Bench(1, 4, seed=0)
        bench.begin([1])
        with pytest.raises(ValueError, match="a tree of 5 nodes does not fit buffers for 4"):
            bench.buffers.plan([1], chain_shape(1, 5, CPU))

    def test_capacity(self) -> None:
        assert [pending_capacity(n) for n in (1, 8, 9, 64)] == [16, 16, 18, 128]
        assert all(pending_capacity(n) >= 2 * n for n in range(1, 65))

    @pytest.mark.parametrize(("owner", "position"), [("other", 0), ("request-1", 1)])
    def test_begin_checks_the_stamp(self, owner: str, position: int) -> None:
        bench = Bench(2, 4, seed=0)
        bench.begin([1])
        with pytest.raises(StateOwnershipError):
            bench.buffers.begin(2, bench.slots[1], owner, position)

    def test_a_slot_that_was_freed(self) -> None:
        bench = Bench(2, 4, seed=0)
        bench.begin([1])
        bench.pool.free(bench.slots[1], "request-1")
        with pytest.raises(StateOwnershipError, match="is free"):
            bench.buffers.plan([1], chain_shape(1, 1, CPU))

    def test_a_slot_that_got_another_owner(self) -> None:
        bench = Bench(2, 4, seed=0)
        bench.begin([1])
        bench.pool.free(bench.slots[1], "request-1")
        assert bench.pool.allocate("thief") == bench.slots[1]
        with pytest.raises(StateOwnershipError, match="thief"):
            bench.buffers.plan([1], chain_shape(1, 1, CPU))

    def test_a_slot_that_moved_on_behind_the_records(self) -> None:
        """The records continue a checkpoint at one position; at any other they do not fit."""
        bench = Bench(2, 4, seed=0)
        bench.begin([1])
        bench.round([1], [[-1]])
        bench.pool.begin_write(bench.slots[1], "request-1")
        bench.pool.end_write(bench.slots[1], 7)
        with pytest.raises(StateOwnershipError):
            bench.buffers.plan([1], chain_shape(1, 1, CPU))

    def test_a_slot_in_the_middle_of_a_write(self) -> None:
        bench = Bench(2, 4, seed=0)
        bench.begin([1])
        bench.pool.begin_write(bench.slots[1], "request-1")
        with pytest.raises(StateOwnershipError, match="is_written=False"):
            bench.buffers.plan([1], chain_shape(1, 1, CPU))

    def test_end_forgets_and_is_idempotent(self) -> None:
        bench = Bench(2, 4, seed=0)
        bench.begin([1])
        bench.round([1], [[-1, 0]])
        bench.buffers.end(1)
        bench.buffers.end(1)
        bench.buffers.end(2)
        with pytest.raises(StateOwnershipError, match="row 1 has no checkpoint"):
            bench.buffers.position(1)
        with pytest.raises(StateOwnershipError, match="row 1 has no checkpoint"):
            bench.buffers.plan([1], chain_shape(1, 1, CPU))


class TestTokenCounts:
    def test_counts(self) -> None:
        counts = TokenCounts(3, 10, CPU)
        counts.begin(1, [4, 4, 2], [])
        counts.begin(3, [1], [7, 7])
        counts.add([1], [[5, 5, 9]])
        counts.add([3], [[7, 0]])
        counts.add([2], [[1, 1]])  # never begun: a request without penalties
        outputs, prompts = counts.of(torch.tensor([3, 1, 2]))
        assert outputs.tolist() == [
            [1, 0, 0, 0, 0, 0, 0, 3, 0, 0],
            [0, 0, 0, 0, 0, 2, 0, 0, 0, 1],
            [0] * 10,
        ]
        assert [row.nonzero().flatten().tolist() for row in prompts] == [[1], [2, 4], []]

    def test_rows_at_once(self) -> None:
        """Those that are not counted are left out."""
        counts = TokenCounts(3, 4, CPU)
        counts.add([1, 2], [[0], [1]])
        was_used = counts.is_used
        for row in (1, 3):
            counts.begin(row, [0], [])
        for _ in range(3):  # the memory of copies is used again
            counts.add([1, 2, 3], [[3, 3], [0], [1]])
        counts.add([1, 3], [[], []])
        assert (was_used, counts.is_used) == (False, True)
        assert counts.of(torch.arange(4))[0].tolist() == [[0] * 4, [0, 0, 0, 6], [0] * 4, [0, 3, 0, 0]]

    def test_a_row_that_is_used_again(self) -> None:
        counts = TokenCounts(1, 4, CPU)
        counts.begin(1, [0], [1])
        counts.end(1)
        counts.end(1)
        counts.add([1], [[2]])  # the next request of this row has no penalties
        outputs, prompts = counts.of(torch.tensor([1]))
        assert not outputs.any()
        assert not prompts.any()
        counts.begin(1, [3], [])
        outputs, prompts = counts.of(torch.tensor([1]))
        assert not outputs.any()
        assert prompts.tolist() == [[False, False, False, True]]

    def test_nothing_to_ask_for(self) -> None:
        with pytest.raises(RuntimeError, match="no request has penalties"):
            TokenCounts(1, 4, CPU).of(torch.tensor([1]))

    def test_made_inside_of_a_step_and_freed_outside(self) -> None:
        """Steps run in inference mode; an abort does not."""
        counts = TokenCounts(2, 4, CPU)
        with torch.inference_mode():
            counts.begin(1, [0], [])
            counts.add([1], [[2, 3]])
        counts.end(1)
        assert not counts.of(torch.tensor([1]))[0].any()


class TestRowSet:
    @pytest.mark.parametrize("rows", [(2,), (1, 2, 3), (0, 2), (3, 2), (4, 1, 2)])
    def test_take_and_put(self, rows: tuple[int, ...]) -> None:
        x = torch.randn(6, 3)
        before = x.clone()
        rowset = RowSet.of(rows, CPU)
        assert len(rowset) == len(rows)
        taken = rowset.take(x)
        assert torch.equal(taken, x[list(rows)])
        assert (taken.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == rowset.is_range
        values = torch.randn(len(rows), 3)
        rowset.put(x, values)
        assert torch.equal(x[list(rows)], values)
        others = [i for i in range(6) if i not in rows]
        assert torch.equal(x[others], before[others])

    def test_only_consecutive_ascending_rows_are_a_range(self) -> None:
        cases = {(1,): True, (1, 2, 3): True, (1, 3): False, (2, 1): False, (1, 1): False}
        assert {rows: RowSet.of(rows, CPU).is_range for rows in cases} == cases

    def test_put_converts(self) -> None:
        x = torch.zeros(4, 2, dtype=torch.bfloat16)
        for rows in ((0, 1), (0, 2)):
            RowSet.of(rows, CPU).put(x, torch.ones(2, 2))
        assert x.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]


class TestKeys:
    """What attention sees of a row; ``AttentionMetadata`` itself is tested beside its kernels."""

    table = RequestTable(4, 20, KVPool(cache_shape(), 8, 1, CPU), CPU)

    def batch(self, roots: list[int]) -> Batch:
        rows, size = tuple(range(1, 1 + len(roots))), len(roots)
        sampling = SamplingBatch.of([SamplingParams()] * size, [0] * size, CPU)
        return Batch(rows, torch.tensor(rows), torch.zeros(size), torch.tensor(roots), max(roots), sampling)

    @pytest.mark.parametrize("shape", ANY_TREE)
    @pytest.mark.parametrize("extra_keys", [0, 3])
    def test_tree(self, shape: str, extra_keys: int) -> None:
        rng = random.Random(2)
        roots, num_nodes = [0, 4, 2], 6
        parents = [random_parents(shape, num_nodes, rng) for _ in roots]
        num_keys = max(roots) + num_nodes + extra_keys
        keys = tree_keys(self.table, self.batch(roots), shape_of(parents).ancestors, num_keys)
        assert keys.mask is not None
        for b, root in enumerate(roots):
            for node in range(num_nodes):
                visible = {*range(root), *(root + i for i in path_to(parents[b], node))}
                assert keys.mask[b, node].nonzero().flatten().tolist() == sorted(visible)

    @pytest.mark.parametrize("first_key", [0, 1, 3])
    @pytest.mark.parametrize("queries", [slice(0, 6), slice(2, 6), slice(5, 6)])
    def test_some_entries_of_a_tree_ask(self, queries: slice, first_key: int) -> None:
        rng = random.Random(4)
        roots, num_entries = [0, 1, 7], 6
        parents = [random_parents("bushy", num_entries, rng) for _ in roots]
        ancestors = shape_of(parents).ancestors[:, queries]
        num_keys = max(roots) + num_entries + 2
        mask = tree_keys(self.table, self.batch(roots), ancestors, num_keys, first_key).mask
        assert mask is not None
        for b, root in enumerate(roots):
            for q, entry in enumerate(range(num_entries)[queries]):
                visible = [*range(first_key, root), *(root + i for i in path_to(parents[b], entry))]
                assert mask[b, q].nonzero().flatten().tolist() == visible

    def test_all_is_seen_only_where_positions_are_exact(self) -> None:
        batch, positions = self.batch([5]), torch.tensor([[5]])
        assert causal_keys(self.table, batch, positions, 6, sees_all=True).mask is None
        bound = replace(batch, is_exact=False, max_root_position=9)
        mask = causal_keys(self.table, bound, positions, 10, sees_all=True).mask
        assert mask is not None
        assert mask.flatten().tolist() == [True] * 6 + [False] * 4
