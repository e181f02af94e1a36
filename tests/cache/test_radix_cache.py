"""The prefix cache's rules one by one: match, insert, split, tombstones, locks, eviction, salts, reasons, rendering."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest

from specmamba.cache.prefix import eviction, invariants, radix_tree
from specmamba.cache.prefix.eviction import Costs, PolicyName
from specmamba.cache.prefix.node import MAX_EVICTED_CHILDREN, Node
from specmamba.cache.state_pool import PREFIX_CACHE, Stamp, StateOwnershipError
from tests.radix import COSTS, World, array

PAGE_SIZES = [1, 3, 16]


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    """A text of its own: no two seeds share a first token."""
    return (1000 * seed, *(1000 * seed + 1 + i % 7 for i in range(length - 1)))


def ends(nodes: Sequence[Node]) -> list[int]:
    return [node.end for node in nodes]


def path(node: Node) -> list[int]:
    return ends([*node.path()])[::-1]


@pytest.fixture(params=PAGE_SIZES)
def world(request: pytest.FixtureRequest) -> World:
    return World(page_size=request.param, num_pages=-(-240 // request.param))


class TestMatch:
    def test_an_empty_cache(self, world: World) -> None:
        match = world.match(text(5))
        assert (match.length, match.kv_length, match.miss, len(match.slots)) == (0, 0, "never_stored", 0)
        assert match.node is world.cache.root(None)
        world.check()

    def test_an_empty_text_is_no_miss(self, world: World) -> None:
        match = world.match(())
        assert (match.length, match.miss) == (0, None)

    def test_the_whole_text(self, world: World) -> None:
        node = world.store(text(20))
        match = world.match(text(20))
        assert (match.node, match.length, match.kv_length, match.miss) == (node, 20, 20, None)
        assert world.match((*text(20), 5)).length == 20

    def test_a_match_one_token_short_of_a_node_still_finds_the_best_state(self, world: World) -> None:
        """The published bug: a text that leaves the last node inside its edge does not find the state before it."""
        world.store(text(48), ends=[16, 32])
        match = world.match(text(47))
        assert (match.length, match.kv_length, match.miss) == (32, 47, "never_stored")
        assert world.match(text(31)).length == 16
        assert world.match(text(15)).length == 0
        assert world.match(text(33)).length == 32
        assert world.cache.stats.num_nodes == 3  # and no match splits anything

    def test_a_tombstone_on_the_path_does_not_shorten_the_match(self, world: World) -> None:
        world.store((1, 2, 3, 4))
        world.store((1, 2, 9, 9))
        assert path(world.match((1, 2, 3, 4)).node) == [0, 2, 4]
        assert world.match((1, 2, 3, 4)).length == 4
        short = world.match((1, 2, 3))
        assert (short.length, short.kv_length) == (0, 3)

    def test_peek_returns_the_same_and_marks_nothing_as_used(self, world: World) -> None:
        world.store(text(20), ends=[8])
        world.store(text(20, seed=1))
        before = world.cache.render_text()
        for length, best in ((1, 0), (7, 0), (8, 8), (19, 8), (20, 20)):
            assert world.cache.peek(array(text(length))) == (best, length)
        assert world.cache.peek(array(text(4)), "unheard of") == (0, 0)
        assert world.cache.render_text() == before
        assert (None, None) in world.cache._tree.roots
        assert (None, "unheard of") not in world.cache._tree.roots

    def test_the_returned_slots_are_a_copy(self, world: World) -> None:
        world.store(text(9))
        world.match(text(9)).slots[:] = 0
        world.match(text(9))

    def test_later_changes_of_the_callers_arrays_do_not_change_the_tree(self, world: World) -> None:
        row = world.row(6)
        slot = world.new_state(None, (1, 2, 3, 4, 5, 6))
        assert row is not None
        tokens, slots = array((1, 2, 3, 4, 5, 6)), world.slots(row, 0, 6)
        world.cache.insert(world.cache.root(None), tokens, slots, slot)
        tokens[:], slots[:] = 7, 0
        world.write(row, None, (1, 2, 3, 4, 5, 6), 0, 6)
        assert world.match((1, 2, 3, 4, 5, 6)).length == 6


class TestInsert:
    def test_split_keeps_the_state_on_the_child(self, world: World) -> None:
        old = world.store((1, 2, 3, 4, 5))
        slot = old.state_slot
        new = world.store((1, 2, 3, 8, 9))
        upper = old.parent
        assert upper is not None
        assert upper is new.parent
        assert (old.state_slot, upper.state_slot) == (slot, None)
        assert (upper.start, upper.end, old.start, old.end) == (0, 3, 3, 5)
        assert (upper.lost_state, upper.hits) == (False, 0)
        assert world.match((1, 2, 3, 4, 5)).node is old
        world.check()

    def test_an_end_inside_an_edge_splits_it_and_takes_the_state(self, world: World) -> None:
        child = world.store(text(20))
        upper = world.store(text(13))
        assert child.parent is upper
        assert (upper.end, upper.state_slot is not None, child.state_slot is not None) == (13, True, True)
        assert world.match(text(19)).node is upper
        assert world.cache.stats.inserted_tokens == 20
        world.check()

    def test_nodes_that_meet_inside_a_page_both_hold_it(self) -> None:
        world = World(page_size=16, num_pages=8)
        child = world.store(text(40))
        upper = world.store(text(20))
        (shared,) = set(upper.pages.tolist()) & set(child.pages.tolist())
        assert (len(upper.pages), len(child.pages), world.allocator.holders(shared)) == (2, 2, 2)
        world.check()
        assert world.allocator.num_free == 8 - 3
        assert world.cache.evict_pages(6)
        assert world.cache.peek(array(text(40))) == (20, 20)
        assert world.allocator.holders(shared) == 1
        world.match(text(20))
        world.check()

    def test_a_locked_edge_is_split_into_two_locked_ones(self, world: World) -> None:
        node = world.store(text(20))
        world.cache.lock(node)
        world.cache.lock(node)
        pinned = world.allocator.num_pinned
        upper = world.store(text(7))
        assert (upper.kv_locks, node.kv_locks, upper.users) == (2, 2, 0)
        assert world.allocator.num_pinned == pinned
        world.check()
        for _ in range(2):
            world.cache.unlock(node)
            world.check()
        assert world.allocator.num_pinned == 0

    def test_known_tokens_keep_the_trees_slots(self, world: World) -> None:
        node = world.store(text(20))
        free = world.allocator.num_free
        row = world.row(25)
        slot = world.new_state(None, text(25))
        assert row is not None
        world.write(row, None, text(25), 0, 25)
        insertion = world.cache.insert(world.cache.root(None), array(text(25)), world.slots(row, 0, 25), slot)
        assert insertion.takes_state
        assert insertion.slots[:20].tolist() == node.slots.tolist()
        assert insertion.slots[20:].tolist() == world.slots(row, 20, 25).tolist()
        world.release(row)
        assert free - world.allocator.num_free == len(insertion.node.pages)
        assert world.match(text(25)).length == 25
        world.check()

    def test_a_duplicate_state_stays_the_callers(self, world: World) -> None:
        node = world.store(text(10))
        kept, offered = node.state_slot, world.new_state(None, text(10))
        world.cache.lock(node)
        insertion = world.cache.insert(node, array(()), array(()), offered)
        assert (insertion.takes_state, insertion.node, node.state_slot) == (False, node, kept)
        assert world.cache.stats.duplicate_states == 1
        assert offered is not None
        world.free_state(offered)
        world.check()

    def test_a_tombstone_takes_a_state_without_tokens(self, world: World) -> None:
        world.store((1, 2, 3, 4))
        upper = world.store((1, 2, 9)).parent
        assert upper is not None
        assert world.cache.stats.num_tombstones == 1
        world.cache.lock(upper)
        insertion = world.cache.insert(upper, array(()), array(()), world.new_state(None, (1, 2)))
        assert (insertion.takes_state, insertion.node, len(insertion.slots)) == (True, upper, 0)
        assert world.match((1, 2, 5)).length == 2
        assert world.cache.stats.num_tombstones == 0
        world.check()

    def test_a_root_takes_no_state(self, world: World) -> None:
        with pytest.raises(ValueError, match="a root takes no state"):
            world.cache.insert(world.cache.root(None), array(()), array(()), world.new_state(None, ()))
        world.check()

    @pytest.mark.parametrize("position", [0, 9, 11, 16, 64])
    def test_a_state_is_never_stored_at_a_position_other_than_its_own(self, world: World, position: int) -> None:
        """The published bug: a state after all tokens is stored under a length rounded to pages, or the reverse."""
        row, slot = world.row(10), world.new_state(None, (1,) * position)
        assert row is not None
        with pytest.raises(
            StateOwnershipError, match=f"state slot 1 should hold 'prefix cache' at 10.*position={position}"
        ):
            world.cache.insert(world.cache.root(None), array(text(10)), world.slots(row, 0, 10), slot)
        assert world.cache.stats.num_nodes == 0
        world.check()

    def test_refused_insertions_change_nothing(self, world: World) -> None:
        node, root = world.store(text(10)), world.cache.root(None)
        row, own, cached = world.row(12), world.states.reserve("request"), world.new_state(None, text(6))
        assert row is not None
        assert own is not None
        world.states.end_write(own, 6)
        before = world.cache.render_text()
        slots = world.slots(row, 0, 6)
        with pytest.raises(StateOwnershipError, match="should hold 'prefix cache' at 6"):
            world.cache.insert(root, array(text(6)), slots, own)
        with pytest.raises(StateOwnershipError, match=r"offered to 10, but is that of <Node \[0:10\) state 1>"):
            world.cache.insert(root, array(text(10, seed=1)), world.slots(row, 0, 10), node.state_slot)
        with pytest.raises(ValueError, match="6 tokens cannot lie in 5 slots"):
            world.cache.insert(root, array(text(6)), slots[1:], cached)
        free = world.new_state(None, (*text(6), 5, 5))
        with pytest.raises(
            RuntimeError, match="freed twice or was never allocated"
        ):  # behind a split, had it been made
            world.cache.insert(root, array((*text(6), 5, 5)), np.append(slots, [10**6, 10**6]), free)
        assert world.cache.render_text() == before
        world.check()

    def test_an_evicted_node_cannot_be_used(self, world: World) -> None:
        node = world.store(text(10))
        world.cache.evict_pages(world.allocator.num_pages)
        for use in (world.cache.lock, lambda n: world.cache.insert(n, array((1,)), array((1,)), None)):
            with pytest.raises(RuntimeError, match="no part of the prefix cache any more"):
                use(node)

    def test_a_locked_node_needs_no_state(self, world: World) -> None:
        root, row = world.cache.root(None), world.row(8)
        assert row is not None
        node = world.cache.insert(root, array(text(8)), world.slots(row, 0, 8), None).node
        world.cache.lock(node)
        world.check()
        world.release(row)
        world.cache.unlock(node)
        assert (world.cache.stats.num_nodes, world.allocator.num_free) == (0, world.allocator.num_pages)
        world.check()


class TestLocks:
    def test_a_state_lock_covers_kv_to_the_root_and_one_state(self, world: World) -> None:
        node = world.store(text(30), ends=[10, 20])
        middle = node.parent
        assert middle is not None
        world.cache.lock_state(middle)
        assert [each.kv_locks for each in node.path()] == [0, 1, 1, 1]
        assert [each.state_locks for each in node.path()] == [0, 1, 0, 0]
        assert world.cache.num_evictable_states == 2
        assert world.cache.stats.num_locked_tokens == 20
        world.check()
        assert world.cache.evict_states(world.states.num_slots - 1)
        assert world.match(text(30)).node is middle
        world.cache.unlock_state(middle)
        assert world.cache.num_evictable_states == 1
        world.check()

    def test_locks_are_counted(self, world: World) -> None:
        node = world.store(text(10))
        for _ in range(2):
            world.cache.lock(node)
            world.cache.lock_state(node)
        assert not world.cache.evict_pages(world.allocator.num_pages)
        world.cache.unlock(node)
        world.cache.unlock(node)
        with pytest.raises(RuntimeError, match="unlocked more often"):
            world.cache.unlock(node)
        world.cache.unlock_state(node)
        assert not world.cache.evict_states(world.states.num_slots)
        world.check()
        world.cache.unlock_state(node)
        with pytest.raises(RuntimeError, match="unlocked more often"):
            world.cache.unlock_state(node)
        assert world.cache.evict_pages(world.allocator.num_pages)
        world.check()

    def test_a_lock_of_a_child_cannot_be_undone_at_the_parent(self, world: World) -> None:
        child = world.store(text(20), ends=[10])
        assert child.parent is not None
        world.cache.lock(child)
        with pytest.raises(RuntimeError, match="unlocked more often"):
            world.cache.unlock(child.parent)
        world.check()

    def test_the_state_of_a_tombstone_cannot_be_locked(self, world: World) -> None:
        with pytest.raises(RuntimeError, match="no state to lock"):
            world.cache.lock_state(world.cache.root(None))

    def test_a_lock_moves_down(self, world: World) -> None:
        bottom = world.store(text(30), ends=[10, 20])
        middle = bottom.parent
        assert middle is not None
        top = middle.parent
        assert top is not None
        world.cache.lock(top)
        world.cache.move_lock(top, bottom)
        assert [each.kv_locks for each in bottom.path()] == [1, 1, 1, 1]
        assert [each.users for each in bottom.path()] == [1, 0, 0, 0]
        world.check()
        world.cache.move_lock(bottom, bottom)
        with pytest.raises(RuntimeError, match=r"\[0:10\) .* is not below <Node \[20:30\)"):
            world.cache.move_lock(bottom, top)
        with pytest.raises(RuntimeError, match="unlocked more often"):
            world.cache.move_lock(top, bottom)
        world.check()
        world.cache.unlock(bottom)
        assert world.cache.stats.num_locked_tokens == 0
        world.check()

    def test_a_locked_path_is_not_available(self, world: World) -> None:
        node = world.store(text(30))
        pages = len(node.pages)
        world.cache.lock(node)
        assert world.allocator.num_available == world.allocator.num_pages - pages
        assert not world.cache.evict_pages(world.allocator.num_pages - pages + 1)
        assert world.cache.stats.num_nodes == 1
        world.cache.unlock(node)
        assert world.allocator.num_available == world.allocator.num_pages


class TestGiveState:
    """The last state slot there is goes to the request that hits it."""

    def test_the_request_owns_it_and_the_node_is_a_tombstone(self, world: World) -> None:
        node = world.store(text(30), ends=[10])
        world.cache.lock(node)
        num_free, slot = world.states.num_free, node.state_slot
        assert world.cache.give_state(node) == slot
        assert slot is not None
        world.states.take(slot, "request", 30)
        assert world.states.stamp(slot) == Stamp("request", 30, is_written=True)
        assert (node.state_slot, node.lost_state, world.states.num_free) == (None, True, num_free)
        stats = world.cache.stats
        assert (stats.num_states, stats.num_tombstones, stats.evicted_states, stats.num_tokens) == (1, 1, 1, 30)
        assert world.cache.num_evictable_states == 1
        match = world.match(text(30))
        assert (match.length, match.kv_length, match.miss) == (10, 30, "evicted")
        world.check()

    def test_the_kv_is_kept_while_it_is_locked(self, world: World) -> None:
        node = world.store(text(30), ends=[10])
        world.cache.lock(node)
        slot = world.cache.give_state(node)
        world.states.take(slot, "request", 30)
        world.cache.unlock(node)
        assert world.cache.peek(array(text(30))) == (10, 10)
        world.states.free(slot, "request")
        world.check()

    def test_the_state_can_be_stored_again(self, world: World) -> None:
        node = world.store(text(30))
        world.cache.lock(node)
        slot = world.cache.give_state(node)
        world.states.take(slot, "request", 30)
        world.states.donate(slot, "request", 30)
        assert world.cache.insert(node, array(()), array(()), slot).takes_state
        world.cache.unlock(node)
        assert (world.match(text(30)).node, node.lost_state) == (node, False)
        world.check()

    @pytest.mark.parametrize("case", ["no state", "state lock", "no lock", "root"])
    def test_a_state_that_is_in_use_is_not_given_away(self, world: World, case: str) -> None:
        node = world.store(text(30), ends=[10])
        if case != "no lock":
            world.cache.lock(node)
        if case == "no state":
            world.cache.evict_states(world.states.num_slots)
        if case == "state lock":
            world.cache.lock_state(node)
        before = world.cache.stats, world.cache.render_text()
        with pytest.raises(RuntimeError, match="cannot give its state away"):
            world.cache.give_state(world.cache.root(None) if case == "root" else node)
        assert (world.cache.stats, world.cache.render_text()) == before
        world.check()

    def test_only_slots_of_the_cache_can_be_taken_over(self, world: World) -> None:
        node = world.store(text(30))
        world.cache.lock(node)
        slot = world.cache.give_state(node)
        with pytest.raises(StateOwnershipError, match="should hold 'prefix cache' at 29"):
            world.states.take(slot, "request", 29)
        world.states.take(slot, "request", 30)
        with pytest.raises(StateOwnershipError, match="should hold 'prefix cache' at 30"):
            world.states.take(slot, "another", 30)
        with pytest.raises(StateOwnershipError, match="is free"):
            world.states.take(slot + 1, "request", 30)


class TestEvictPages:
    def test_leaves_are_evicted_and_stateless_parents_after_them(self, world: World) -> None:
        world.store((1, 2, 3, 4))
        world.store((1, 2, 5, 6))
        assert world.cache.stats.num_tombstones == 1
        assert world.cache.evict_pages(world.allocator.num_pages)
        stats = world.cache.stats
        assert (stats.num_nodes, stats.evicted_tokens, stats.evicted_states) == (0, 6, 2)
        assert world.states.num_free == world.states.num_slots
        world.check()

    def test_parents_with_a_state_stay_and_can_be_matched(self, world: World) -> None:
        world.store(text(96), ends=[48])
        assert world.cache.evict_pages(world.allocator.num_free + 1)
        match = world.match(text(96))
        assert (match.length, match.miss) == (48, "evicted")
        world.check()

    def test_the_least_recently_used_is_evicted_first(self, world: World) -> None:
        for seed in range(3):
            world.store(text(48, seed))
        world.match(text(48, 0))
        assert world.cache.evict_pages(world.allocator.num_free + 1)
        assert [world.match(text(48, seed)).length for seed in range(3)] == [48, 0, 48]

    def test_a_match_refreshes_all_nodes_above_it_and_none_below(self, world: World) -> None:
        world.store(text(48), ends=[16, 32])
        world.store(text(48, 1))
        world.match(text(20))
        stats = world.cache.stats
        while world.cache.stats.num_nodes == stats.num_nodes:
            assert world.cache.evict_pages(world.allocator.num_free + 1)
        assert world.cache.peek(array(text(48))) == (32, 32)

    def test_in_vain_evicts_nothing(self, world: World) -> None:
        world.store(text(20))
        node = world.store(text(20, 1))
        world.cache.lock(node)
        assert not world.cache.evict_pages(world.allocator.num_available + 1)
        assert world.cache.stats.num_nodes == 2
        assert world.cache.evict_pages(world.allocator.num_available)
        assert world.cache.stats.num_nodes == 1
        world.check()

    def test_no_more_is_evicted_than_is_asked_for(self, world: World) -> None:
        for seed in range(4):
            world.store(text(16, seed))
        assert world.cache.evict_pages(world.allocator.num_free)
        assert world.cache.stats.num_nodes == 4
        assert world.cache.evict_pages(world.allocator.num_free + 1)
        assert world.cache.stats.num_nodes == 3


class TestEvictStates:
    def test_an_inner_node_loses_only_its_state(self, world: World) -> None:
        bottom = world.store(text(30), ends=[10, 20])
        world.match(text(30))
        world.match(text(12))
        assert world.cache.evict_states(world.states.num_free + 1)  # the one at 20
        match = world.match(text(25))
        assert (match.length, match.kv_length, match.miss) == (10, 25, "evicted")
        assert world.match(text(30)).node is bottom
        assert world.cache.stats.num_tokens == 30
        world.check()

    def test_a_leaf_is_evicted_with_its_kv(self, world: World) -> None:
        world.store(text(30))
        world.store(text(30, 1))
        free = world.allocator.num_free
        assert world.cache.evict_states(world.states.num_free + 1)
        assert world.allocator.num_free > free
        assert world.cache.peek(array(text(30))) == (0, 0)
        assert world.cache.stats.evicted_tokens == 30
        world.check()

    def test_a_locked_leaf_keeps_its_kv_until_it_is_unlocked(self, world: World) -> None:
        node = world.store(text(30), ends=[10])
        world.cache.lock(node)
        assert world.cache.evict_states(world.states.num_slots)
        assert (node.state_slot, node.lost_state) == (None, True)
        assert world.cache.peek(array(text(30))) == (0, 30)
        world.check()
        world.cache.unlock(node)  # both have no state now, and go
        assert (world.cache.stats.num_nodes, world.cache.stats.evicted_tokens) == (0, 30)
        assert world.allocator.num_free == world.allocator.num_pages
        world.check()

    def test_a_tombstone_that_gets_its_state_back_is_a_hit_again(self, world: World) -> None:
        node = world.store(text(30))
        world.cache.lock(node)
        world.cache.evict_states(world.states.num_slots)
        world.cache.insert(node, array(()), array(()), world.new_state(None, text(30)))
        assert (world.match(text(30)).length, node.lost_state) == (30, False)
        world.cache.unlock(node)
        assert world.cache.stats.num_nodes == 1
        world.check()

    def test_only_hits_of_a_state_itself_refresh_it(self, world: World) -> None:
        """A hit refreshes the KV of its whole path, and only the state of the node that it ends at."""
        world.store(text(30), ends=[10, 20])
        world.match(text(12))
        world.match(text(30))
        assert world.cache.evict_states(world.states.num_free + 1)
        assert [world.cache.peek(array(text(n)))[0] for n in (10, 20, 30)] == [10, 10, 30]

    def test_in_vain_evicts_nothing(self, world: World) -> None:
        node = world.store(text(30), ends=[10, 20])
        world.cache.lock_state(node)
        assert not world.cache.evict_states(world.states.num_slots)
        assert world.cache.stats.num_states == 3
        assert world.cache.evict_states(world.states.num_slots - 1)
        assert world.cache.stats.num_states == 1
        world.check()


class TestPassedStates:
    """A state behind which a text has gone on to another state goes before older ones."""

    def test_they_go_first_and_in_the_order_in_which_they_were_passed(self, world: World) -> None:
        world.store(text(30, 1))
        bottom = world.store(text(30), ends=[10, 20])
        for node in list(islice(bottom.path(), 1, 3))[::-1]:
            world.cache.pass_state(node)
        for lengths in ([20, 20, 30], [0, 0, 30]):
            assert world.cache.evict_states(world.states.num_free + 1)
            world.check()
            assert [world.cache.peek(array(text(n)))[0] for n in (20, 25, 30)] == lengths
        assert world.cache.peek(array(text(30, 1)))[0] == 30
        assert world.cache.evict_states(world.states.num_free + 1)  # then what is oldest
        assert world.cache.peek(array(text(30, 1)))[0] == 0

    def test_one_that_is_used_again_stays(self, world: World) -> None:
        world.store(text(30, 1))
        node = world.store(text(30), ends=[10]).parent
        assert node is not None
        world.cache.pass_state(node)
        assert world.match(text(12)).node is node
        world.cache.lock_state(node)
        world.cache.pass_state(node)  # of another request, while this one copies it
        world.cache.unlock_state(node)
        assert world.cache.evict_states(world.states.num_free + 1)
        assert [world.cache.peek(array(text(12, seed)))[0] for seed in (0, 1)] == [10, 0]
        world.check()

    @pytest.mark.parametrize("reason", ["two texts", "one was evicted", "two requests", "flops"])
    def test_a_branch_is_not_passed(self, reason: str) -> None:
        world = World(policy="flops" if reason == "flops" else "lru")
        node = world.store(text(30), ends=[10]).parent
        assert node is not None
        if reason == "two texts":
            world.store((*text(10), 7, 7, 7))
        node.hits = 2 if reason == "two requests" else 1
        if reason == "one was evicted":
            node.remember_evicted(7)
        world.cache.pass_state(node)
        assert not world.cache._recency.passed


class TestFlopsPolicy:
    def world(self, policy: PolicyName, num_states: int = 16) -> World:
        return World(page_size=1, num_pages=400, num_states=num_states, policy=policy)

    @pytest.mark.parametrize(("policy", "kept"), [("lru", [0, 2, 2]), ("flops", [200, 0, 2])])
    def test_a_long_prefix_outlives_short_ones_that_are_a_little_younger(
        self, policy: PolicyName, kept: list[int]
    ) -> None:
        world = self.world(policy)
        world.store(text(200))
        world.store(text(2, 1))
        world.store(text(2, 2))
        world.match(text(2, 2))
        assert world.cache.evict_states(world.states.num_free + 1)
        assert [world.cache.peek(array(text(n, seed)))[0] for seed, n in enumerate((200, 2, 2))] == kept
        world.check()

    @pytest.mark.parametrize("policy", ["lru", "flops"])
    def test_a_whole_branch_can_be_evicted(self, policy: PolicyName) -> None:
        world = self.world(policy)
        world.store(text(40), ends=[10, 20, 30])
        world.store((*text(10), 5, 5, 5))
        assert world.cache.evict_pages(400)
        assert world.cache.stats.num_nodes == 0
        world.check()

    @pytest.mark.parametrize("policy", ["lru", "flops"])
    def test_an_old_branch_is_evicted_to_its_beginning_before_the_end_of_a_new_one(self, policy: PolicyName) -> None:
        world = self.world(policy)
        for seed in range(2):
            world.store(text(40, seed), ends=[10, 20, 30])
        world.match(text(40, 1))
        assert world.cache.evict_pages(world.allocator.num_free + 20)
        assert [world.cache.peek(array(text(40, seed))) for seed in range(2)] == [(20, 20), (40, 40)]
        world.check()

    def test_more_evictions_than_candidates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(eviction, "MAX_CANDIDATES", 2)
        world = self.world("flops")
        for seed in range(3):
            world.store(text(20, seed), ends=[5, 10, 15])
        assert world.cache.evict_states(world.states.num_free + 7)
        assert world.cache.stats.num_states == 5
        world.check()
        assert world.cache.evict_pages(400)
        assert world.cache.stats.num_nodes == 0

    def test_what_a_state_saves_counts_from_the_state_above_it(self) -> None:
        world = self.world("flops")
        bottom = world.store(text(30), ends=[20])
        costs = Costs(state_bytes=100, kv_bytes_per_token=10, flops_per_token=7.0, flops_per_token_squared=2.0)
        assert bottom.parent is not None
        assert costs.efficiency(bottom, frees_kv=True) == (7.0 * 10 + 900 - 400) / (100 + 10 * 10)
        assert costs.efficiency(bottom.parent, frees_kv=False) == (7.0 * 20 + 400) / 100
        world.cache._tree.drop_state(bottom.parent)
        assert costs.efficiency(bottom, frees_kv=True) == (7.0 * 30 + 900) / (100 + 10 * 30)

    @pytest.mark.parametrize("kept_by", ["another child", "a lock"])
    def test_kv_of_a_tombstone_that_stays_is_not_freed(self, kept_by: str) -> None:
        """The saved compute counts from the state above; the freed bytes only from where the branch leaves the path."""
        world = self.world("flops")
        bottom = world.store(text(40), ends=[10, 20, 30])
        (lower, upper) = islice(bottom.path(), 1, 3)
        for tombstone in (lower, upper):
            world.cache._tree.drop_state(tombstone)
        costs = Costs(state_bytes=100, kv_bytes_per_token=10, flops_per_token=7.0, flops_per_token_squared=2.0)
        saved = 7.0 * 30 + 1600 - 100
        assert costs.efficiency(bottom, frees_kv=True) == saved / (100 + 10 * 30)
        if kept_by == "a lock":
            world.cache.lock(upper)
        else:
            world.store((*text(20), 5, 5))
        assert costs.efficiency(bottom, frees_kv=True) == saved / (100 + 10 * 20)
        assert costs.efficiency(bottom, frees_kv=False) == saved / 100
        tokens = world.cache.stats.num_tokens
        world.cache._remove_branch(bottom)
        assert tokens - world.cache.stats.num_tokens == 20
        world.check()

    def test_the_policies_agree_if_all_costs_are_equal(self) -> None:
        for policy in ("lru", "flops"):
            world = self.world(policy)
            for seed in range(5):
                world.store(text(10, seed))
            world.match(text(10, 0))
            assert world.cache.evict_states(world.states.num_free + 2)
            assert [world.cache.peek(array(text(10, seed)))[0] for seed in range(5)] == [10, 0, 0, 10, 10]


class TestSalts:
    def test_share_nothing(self, world: World) -> None:
        world.store(text(20), salt="a")
        assert world.match(text(20), "a").length == 20
        for salt in (None, "b", ""):
            match = world.match(text(20), salt)
            assert (match.length, match.kv_length, match.miss) == (0, 0, "salt")
        world.store(text(20), salt="b")
        assert world.match(text(20), "a").slots.tolist() != world.match(text(20), "b").slots.tolist()
        assert world.cache.stats.inserted_tokens == 40
        world.check()

    def test_idle_roots_are_dropped_and_used_ones_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (radix_tree, invariants):
            monkeypatch.setattr(module, "MAX_IDLE_ROOTS", 3)
        world = World()
        world.store((1, 2), salt="used")
        locked = world.cache.root("locked")
        world.cache.lock(locked)
        forgotten = world.cache.root("forgotten")
        for number in range(5):
            world.cache.match(array((1, 2)), f"passing {number}")

        def salts() -> list[str | None]:
            return [salt for _, salt in world.cache._tree.roots]

        assert salts() == ["used", "locked", "passing 2", "passing 3", "passing 4"]
        with pytest.raises(RuntimeError, match="no part of the prefix cache any more"):
            world.cache.lock(forgotten)
        world.cache.unlock(locked)
        world.cache.evict_pages(64)  # both are idle now, and younger than all that pass
        world.cache.match(array((1, 2)), "passing 5")
        assert set(salts()) == {"used", "locked", "passing 5"}
        world.check()


class TestMissReasons:
    def test_never_stored(self, world: World) -> None:
        world.store(text(20))
        assert world.match((*text(20), 9)).miss == "never_stored"
        assert world.match((*text(9), 9, 9)).miss == "never_stored"  # leaves inside an edge
        assert world.match((77, 78)).miss == "never_stored"

    def test_an_evicted_state_and_an_evicted_leaf(self, world: World) -> None:
        node = world.store(text(48), ends=[24])
        world.cache.lock(node)
        world.cache.evict_states(world.states.num_slots)
        assert (world.match(text(47)).miss, world.match(text(48)).miss) == ("evicted", "evicted")
        assert world.match(text(20)).miss == "never_stored"  # no state was ever within these
        world.cache.unlock(node)
        assert world.match(text(48)).miss == "evicted"

    def test_a_branch_that_was_evicted_below_a_tombstone(self, world: World) -> None:
        world.store((1, 2, 3, 4))
        world.cache.lock(world.store((1, 2, 5, 6)))
        world.cache.evict_states(world.states.num_free + 1)
        assert world.match((1, 2, 3, 4)).miss == "evicted"
        assert world.match((1, 2, 7, 4)).miss == "never_stored"

    def test_an_evicted_text_that_is_stored_again_is_no_longer_evicted(self, world: World) -> None:
        world.store(text(20))
        world.cache.evict_pages(world.allocator.num_pages)
        assert world.match(text(20)).miss == "evicted"
        world.store(text(20))
        assert world.match((*text(20), 1)).miss == "never_stored"
        world.check()

    def test_the_memory_of_evicted_children_is_bounded(self) -> None:
        world = World(num_pages=4, num_states=2)
        for seed in range(MAX_EVICTED_CHILDREN + 1):
            world.store((seed,))
            world.cache.evict_pages(4)
        assert world.match((0,)).miss == "never_stored"
        assert world.match((1,)).miss == "evicted"
        world.check()

    def test_another_salt_is_the_reason_only_if_it_has_a_state(self, world: World) -> None:
        world.store(text(20), salt="a")
        assert world.match(text(20)).miss == "salt"
        assert world.match(text(19)).miss == "never_stored"
        world.store(text(5))
        assert world.match(text(20)).miss == "never_stored"


class TestReset:
    def test_drops_everything(self, world: World) -> None:
        world.store(text(20), ends=[10])
        world.store((*text(10), 5, 5))
        world.store(text(4), salt="a")
        assert world.cache.reset() == 26
        assert (world.allocator.num_free, world.states.num_free) == (world.allocator.num_pages, world.states.num_slots)
        assert world.match(text(20)).miss == "never_stored"
        assert world.cache.stats.evicted_tokens == 0
        world.check()

    def test_locked_nodes_stay_and_their_unlocked_states_go(self, world: World) -> None:
        node = world.store(text(30), ends=[10, 20])
        middle = node.parent
        assert middle is not None
        world.store((*text(10), 5, 5))
        world.cache.lock_state(middle)
        world.cache.lock(middle)
        assert world.cache.reset() == 12
        assert (world.cache.stats.num_nodes, world.cache.stats.num_states) == (2, 1)
        assert world.match(text(30)).node is middle
        world.check()
        world.cache.unlock_state(middle)
        assert world.cache.reset() == 0
        world.check()
        # the request that holds the lock can still store its state there
        world.cache.insert(middle, array(()), array(()), world.new_state(None, text(20)))
        world.cache.unlock(middle)
        assert world.match(text(30)).length == 20
        world.check()

    def test_a_reset_also_drops_the_memory_of_evictions(self, world: World) -> None:
        node = world.store(text(20))
        world.store((*text(20), 5))
        world.cache.lock(node)
        world.cache.evict_states(world.states.num_slots)
        assert (world.match(text(20)).miss, world.match((*text(20), 5)).miss) == ("evicted", "evicted")
        world.cache.reset()
        assert (world.match(text(20)).miss, world.match((*text(20), 5)).miss) == ("never_stored", "never_stored")
        world.check()


class TestFaults:
    """The cache allocates nothing. When an allocation of its callers fails, they can drop everything that they hold."""

    def test_no_pages_and_no_slot_for_a_request_that_has_matched(self, world: World) -> None:
        node = world.store(text(30))
        world.cache.lock(node)
        assert world.row(world.table.max_positions) is None
        assert not world.cache.evict_pages(world.allocator.num_pages)
        world.check()
        taken = [world.new_state(None, ()) for _ in range(world.states.num_free)]
        assert world.new_state(None, ()) is None
        world.cache.lock_state(node)
        assert not world.cache.evict_states(1)
        world.check()
        world.cache.unlock_state(node)
        world.cache.unlock(node)
        assert world.cache.evict_states(1)
        for slot in taken:
            assert slot is not None
            world.free_state(slot)
        assert world.states.num_free == world.states.num_slots
        world.check()

    def test_an_insertion_whose_pages_cannot_be_held(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        world.store(text(30))
        row, slot = world.row(30), world.new_state(None, (*text(20), 5, 5))
        assert row is not None
        before = world.cache.render_text()

        def fail(*_: object) -> None:
            raise RuntimeError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(world.allocator, "_check_held", fail)
            with pytest.raises(RuntimeError, match="injected"):
                world.cache.insert(world.cache.root(None), array((*text(20), 5, 5)), world.slots(row, 0, 22), slot)
        assert world.cache.render_text() == before
        world.check()


class TestSeeing:
    def test_the_tree_as_text(self) -> None:
        world = World()
        world.store((1, 2, 3, 4, 5))
        world.cache.lock_state(world.store((1, 2, 3, 8)))
        world.store((7,), salt="a secret")
        world.cache.count_request(6, world.match((1, 2, 3, 4, 5, 6)))
        assert world.cache.render_text().splitlines() == [
            f"salt {digest('a secret')}",
            "  [0:1), 1 token, state 3, age 2",
            "no salt, 1 lock",
            "  [0:3), 3 tokens, tombstone, 1 lock",
            "    [3:4), 1 token, state 2, 1 lock, 1 state lock",
            "    [3:5), 2 tokens, state 1, 1 hit, age 1",
        ]
        assert world.cache.render_text(max_nodes=2).splitlines()[2:] == ["... and 4 more"]
        assert World().cache.render_text() == "empty"

    def test_the_most_recent_branches_first_and_the_rest_counted(self) -> None:
        world = World(num_pages=200, num_states=40)
        world.cache.lock(world.store((0, 9)))
        for token in range(1, 20):
            world.store((token, 9))
        world.match((7, 9))
        for salt in ("a", "b"):
            world.store((1, 2, 3), salt)
        world.cache.root("idle")
        whole = world.cache.render_text().splitlines()
        assert len(whole) == 3 + 20 + 2
        assert whole[0] == f"salt {digest('b')}"
        ages = [int(line.rpartition("age ")[2]) for line in whole[6:]]
        assert "1 lock" in whole[5]
        assert ages == sorted(ages)
        assert world.cache.peek(array((7, 9))) == (2, 2)
        for max_nodes in range(26):
            left = [f"... and {25 - max_nodes} more"] if max_nodes < 25 else []
            assert world.cache.render_text(max_nodes).splitlines() == whole[:max_nodes] + left

    def test_nodes_that_are_not_shown_are_not_visited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = World(num_pages=100, num_states=40)
        for token in range(30):
            world.store((token, 9))
        monkeypatch.setattr(radix_tree.RadixTree, "nodes", None)
        assert world.cache.render_text(max_nodes=3).splitlines()[3:] == ["... and 28 more"]

    def test_half_a_surrogate_pair_in_a_salt(self) -> None:
        world = World()
        world.store((1, 2), salt="\ud800")
        world.store((1, 2), salt="\udfff")
        lines = world.cache.render_text().splitlines()
        assert re.fullmatch("salt [0-9a-f]{8}", lines[0])
        assert lines[0] != lines[2]

    def test_a_deep_tree_needs_no_recursion(self) -> None:
        world = World(num_pages=1500, num_states=1500)
        node = world.store((1,) * 1500, ends=range(1, 1500))
        assert world.cache.match(array((1,) * 1500)).node is node
        assert world.cache.render_text(max_nodes=5000).count("\n") == 1500
        world.check()
        assert world.cache.reset() == 1500

    def test_statistics(self, world: World) -> None:
        node = world.store(text(30), ends=[10])
        world.cache.count_request(31, world.match((*text(30), 1)))
        world.cache.count_request(12, world.match(text(12)))
        world.cache.count_request(5, world.match(text(5, 1)))
        world.cache.count_request(5, world.match(text(5), "a"))
        world.cache.count_request(30, world.match(text(30)))
        stats = world.cache.stats
        assert (stats.query_tokens, stats.hit_tokens, node.hits) == (83, 70, 2)
        assert stats.misses == {"never_stored": 4, "evicted": 0, "page_grid": 0, "salt": 0}
        world.cache.count_request(11, world.match(text(11), "a"))
        assert world.cache.stats.misses["salt"] == 1
        assert stats.misses["salt"] == 0  # the older one is a value, not a view

    def test_summary_is_json(self, world: World) -> None:
        world.store(text(30), ends=[10])
        world.cache.count_request(40, world.match(text(40)))
        summary = json.loads(json.dumps(world.cache.summary()))
        assert (summary["policy"], summary["num_states"], summary["num_salts"], summary["hit_rate"]) == (
            "lru",
            2,
            1,
            0.75,
        )
        assert summary["num_pages"] == summary["num_free_pages"] + summary["num_evictable_pages"]
        assert summary["num_evictable_states"] == 2


class TestCheck:
    """Every kind of damage is found, and by a message of its own."""

    def broken(self) -> tuple[World, Node]:
        world = World(page_size=3)
        node = world.store(text(20), ends=[10])
        world.store(text(5, 1))
        world.check()
        return world, node

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            ("node.start += 1", "has another length than its tokens|does not start where"),
            ("node.key[0] += 1", "is stored under token"),
            ("node.parent = cache.root(None)", "is a child of"),
            ("node.kv_locks += 1", "has 0 locks, and 1 are expected"),
            ("node.users = node.state_locks = -1", "locks"),
            ("node.state_slot = None", "leaf without state|state"),
            ("node.parent.state_slot = node.state_slot", "two nodes have one state slot|state"),
            ("cache._recency.nodes.popitem()", "the list of evictable nodes has wrongly nothing"),
            ("cache._recency.states.popitem()", "the list of evictable states has wrongly nothing"),
            ("cache._recency.passed[cache.root(None)] = None", "a passed state is not in the list of evictable"),
            ("node.is_spare = True", "the list of spare states has wrongly nothing"),
            ("cache._recency.nodes.move_to_end(node)", "is not in the order of access"),
            ("cache._recency.states.move_to_end(node.parent)", "is not in the order of access"),
            ("cache._tree.num_tokens += 1", "26 tokens are counted, and 25 are there"),
            ("cache._tree.num_nodes -= 1", "nodes are counted"),
            ("cache._tree.num_locked_tokens += 1", "locked tokens are counted"),
            ("node.slots[:] = 3", "holds the pages"),
            ("world.allocator.hold(node.pages, pinned=False)", "has 2 holders and 1 are known|has 3 holders"),
            ("world.allocator.pin(node.pages)", "pins and 0 are known"),
            ("world.allocator.release(node.pages, pinned=False)", "holders and"),
            ("world.states.end_write(node.state_slot, 19)", "should hold 'prefix cache' at 20"),
            ("world.states.begin_write(node.state_slot, PREFIX_CACHE)", "should hold 'prefix cache' at 20"),
            ("world.states.free(node.state_slot, PREFIX_CACHE)", "is free"),
            ("cache.root(None).evicted[0] = None", "remembers it as evicted"),
            ("cache._tree.idle_roots[cache.root(None)] = None", "the list of idle roots has wrongly"),
            ("cache._tree.roots[None, 'b'] = cache._tree.roots.pop((None, None))", "under another salt"),
        ],
    )
    def test_the_message_names_the_damage(self, damage: str, message: str) -> None:
        world, node = self.broken()
        exec(damage, {"world": world, "cache": world.cache, "node": node, "PREFIX_CACHE": PREFIX_CACHE})
        with pytest.raises(RuntimeError, match=message):
            world.check()

    def test_rows_may_hold_pages_if_they_are_not_given(self) -> None:
        world, _ = self.broken()
        world.row(5)
        world.cache.check()
        with pytest.raises(RuntimeError, match=r"page \d+ has 1 holders and 0 are known"):
            world.cache.check({})


class TestLongTexts:
    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    def test_a_key_of_32k_tokens(self, page_size: int) -> None:
        n = 32 * 1024
        tokens = np.random.default_rng(0).integers(0, 50, n)
        world = World(page_size, num_pages=2 * -(-n // page_size) + 2, num_states=80)
        root, row = world.cache.root(None), world.row(n)
        assert row is not None
        slots, node = world.slots(row, 0, n), root
        world.cache.lock(root)
        for end in range(512, n + 1, 512):
            slot = world.states.reserve(PREFIX_CACHE)
            assert slot is not None
            world.states.end_write(slot, end)
            node = world.cache.insert(node, tokens[node.end : end], slots[node.end : end], slot).node
            world.cache.move_lock(node.parent or root, node)
        world.cache.unlock(node)
        world.release(row)
        match = world.cache.match(tokens)
        assert match.node is node
        assert np.array_equal(match.slots, slots)
        for different in (0, 511, 512, 20_000, n - 1):
            other = tokens.copy()
            other[different] += 1
            match = world.cache.match(other)
            assert (match.length, match.kv_length) == (different // 512 * 512, different)
            assert np.array_equal(match.slots, slots[: match.length])
        assert world.cache.evict_pages(world.allocator.num_pages)
        assert world.allocator.num_free == world.allocator.num_pages

    def test_an_edge_is_compared_as_an_array(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Single tokens are converted to int only as keys of the children's dictionary: once per node on the path."""
        tokens = np.zeros(30_000, dtype=np.int64)
        world = World(num_pages=30_000, num_states=4)
        row = world.row(len(tokens))
        slot = world.states.reserve(PREFIX_CACHE)
        assert row is not None
        assert slot is not None
        world.states.end_write(slot, len(tokens))

        class Counted(np.ndarray):
            reads = 0

            def __getitem__(self, index: Any) -> Any:
                Counted.reads += not isinstance(index, slice)
                return np.asarray(self)[index]

        world.cache.insert(world.cache.root(None), tokens, world.slots(row, 0, len(tokens)), slot)
        assert world.cache.match(tokens.view(Counted)).length == len(tokens)
        assert Counted.reads == 1


def digest(salt: str) -> str:
    return hashlib.sha256(salt.encode()).hexdigest()[:8]


def test_costs_follow_the_formula() -> None:
    assert COSTS.flops(10, 30) == 100.0 * 20 + 1.0 * (900 - 100) / 2
