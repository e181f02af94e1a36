"""Elastic pools under random histories of requests: after every step each number in memory is that of its text.

Hypothesis makes requests that match, run, leave states, verify, are preempted and end, in pools that give memory to
each other all the time. Every step is followed by a check of all keys, values and states that anything points at, of
all owners of pages and slots, and of the bytes that both pools have. ``SPECMAMBA_TEST_FULL=1`` runs many more.
Mapped memory, as on a GPU, is over a driver of the tests: what reads or writes behind the end of a pool ends the test.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from specmamba.cache.prefix.eviction import PolicyName
from specmamba.cache.prefix.node import Node
from specmamba.cache.state_pool import PREFIX_CACHE
from specmamba.engine.request import Request
from tests.elastic import SHAPE, WIDE, FakeDriver, Memory, Text

IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
MAX_LENGTH = 14
PICK = st.integers(0, 1000)
TAIL = st.lists(st.integers(0, 1), max_size=6).map(tuple)


class ElasticMachine(RuleBasedStateMachine):
    page_size = 1
    policy: PolicyName = "lru"
    driver: FakeDriver | None = None  # maps memory of wider shapes; None: the system gives memory
    moved: Counter[str]  # over all histories

    def __init__(self) -> None:
        super().__init__()
        # 16 pages of one token, 7 of three or 4 of eight; and 4 states, each as large as four tokens
        sizes: tuple[int, int, int] = {1: 16, 3: 7, 8: 4}[self.page_size], 4, MAX_LENGTH + 1
        shape = SHAPE if self.driver is None else WIDE
        self.memory = Memory.made(self.page_size, self.policy, *sizes, shape, driver=self.driver)
        self.pools, self.manager = self.memory.pools, self.memory.manager
        self.requests: list[Request] = []
        self.texts: list[Text] = [(0, 0, 1, 0, 1, 1)]
        self.number = 0

    def request(self, pick: int, cut: int, tail: Text) -> Request:
        text = ((*self.texts[pick % len(self.texts)][:cut], *tail)[:MAX_LENGTH] or (1,)) + (1,)
        self.texts.append(text)
        self.number += 1
        return self.memory.request(f"r{self.number}", text[:MAX_LENGTH])

    @rule(pick=PICK, cut=st.integers(0, MAX_LENGTH), tail=TAIL, spare=st.integers(0, 3), use_cache=st.booleans())
    def admit(self, pick: int, cut: int, tail: Text, spare: int, use_cache: bool) -> None:
        request = self.request(pick, cut, tail)
        cache, table = self.manager.cache, self.pools.table
        length = cache.peek(request.key())[0] if use_cache else 0
        has_row = bool(table.num_free_rows)
        needed = table.num_missing_pages(None, len(request.prompt), length) + -(-spare // self.page_size)
        could = cache.can_have(needed, 1)
        if self.manager.acquire(request, len(request.prompt), spare, use_cache):
            assert could
            assert has_row
            assert request.num_run == length
            self.requests.append(request)
        else:  # beside the locked match there may be less room than without it
            assert not (could and has_row) or length
            assert (request.row, request.slot, request.node) == (None, None, None)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, count=st.integers(1, 6), leaves=st.booleans())
    def run_chunk(self, pick: int, count: int, leaves: bool) -> None:
        request = self.requests[pick % len(self.requests)]
        end = min(request.num_run + count, len(request.prompt) - 1)
        if request.is_verifying or end == request.num_run:
            return
        self.memory.write(request, end)
        if leaves:
            self.manager.leave_chunk(request, None)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK)
    def verify(self, pick: int) -> None:
        """The rest of a prompt runs, and the state becomes a checkpoint that a row of the buffers knows by its slot."""
        request = self.requests[pick % len(self.requests)]
        if not request.is_verifying:
            self.memory.write(request, len(request.prompt) - 1)
            self.pools.state_buffers.begin(request.held_row, request.held_slot, request.request_id, request.num_run)
            request.is_verifying = True

    @rule(pick=PICK, cut=st.integers(0, MAX_LENGTH), tail=TAIL, chunk=st.integers(1, 6))
    def run_whole(self, pick: int, cut: int, tail: Text, chunk: int) -> None:
        """A request from its beginning to its end, with states in between."""
        request = self.request(pick, cut, tail)
        if not self.manager.acquire(request, len(request.prompt), 0):
            return
        while request.num_to_extend:
            self.memory.write(request, min(request.num_run + chunk, len(request.prompt) - 1))
            self.manager.leave_chunk(request, None)
        for each in self.manager.leaving([request]):
            self.manager.leave_last(each, None)
        self.manager.release(request)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, ahead=st.integers(1, 6))
    def grow(self, pick: int, ahead: int) -> None:
        """A request gets KV for what comes after its prompt."""
        request = self.requests[pick % len(self.requests)]
        table, cache = self.pools.table, self.manager.cache
        wanted = min(len(request.prompt) + ahead, table.max_positions)
        could = cache.can_have(table.num_missing_pages(request.held_row, wanted), 0)
        assert self.manager.grow(request, wanted, 2) == could

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, leaves=st.booleans())
    def end(self, pick: int, leaves: bool) -> None:
        """A request ends or is preempted; an aborted one leaves nothing."""
        request = self.requests.pop(pick % len(self.requests))
        for each in self.manager.leaving([request]) if leaves else ():
            self.manager.leave_last(each, None)
        self.manager.release(request)

    @rule(pages=st.integers(0, 20), slots=st.integers(0, 3))
    def make_room(self, pages: int, slots: int) -> None:
        cache, allocator, states = self.manager.cache, self.pools.kv.allocator, self.pools.states
        could, before = cache.can_have(pages, slots), cache.stats
        assert cache.make_room(pages, slots) == could
        if could:
            assert allocator.num_free >= pages
            assert states.num_free >= slots
        else:
            assert cache.stats == before

    @rule()
    def flush(self) -> None:
        self.manager.flush()
        if not self.requests:
            self.pools.give_back()

    @invariant()
    def numbers_are_those_of_their_texts(self) -> None:
        for request in self.requests:
            slots = self.pools.table.slots_of_positions(request.held_row, 0, request.num_run)
            self.memory.check_tokens(slots, request.prompt, 0, request.num_run)
            self.memory.check_state(request.held_slot, request.prompt[: request.num_run])
            if request.is_verifying:
                assert self.pools.state_buffers._leases[request.held_row].slot == request.held_slot
        todo: list[tuple[Node, Text]] = [(root, ()) for root in self.manager.cache._tree.roots.values()]
        while todo:
            node, before = todo.pop()
            text = (*before, *node.key.tolist())
            self.memory.check_tokens(node.slots, text, len(before), len(text))
            if node.state_slot is not None:
                self.memory.check_state(node.state_slot, text)
            todo += [(child, text) for child in node.children.values()]

    @invariant()
    def all_has_one_owner(self) -> None:
        pools, cache = self.pools, self.manager.cache
        cache.check(pools.table.held_pages())
        states, split = pools.states, pools.split
        assert split is not None
        owners = Counter(states._stamps[slot].owner for slot in states._stamps)
        slots = [*states._free, *states._stamps]
        assert sorted(slots) == [*range(1, states.num_slots + 1)]
        assert owners.pop(PREFIX_CACHE, 0) == cache.stats.num_states
        assert owners == Counter(request.request_id for request in self.requests)
        assert all(states._stamps[request.held_slot].owner == request.request_id for request in self.requests)
        free = pools.kv.allocator._stack[: pools.kv.allocator.num_free]
        assert len(set(free.tolist())) == len(free)
        assert all(free >= 1)
        assert all(free <= pools.kv.allocator.num_pages)

    @invariant()
    def both_fit_the_budget(self) -> None:
        split, allocator, states = self.pools.split, self.pools.kv.allocator, self.pools.states
        assert split is not None
        assert split.bounds.fits(allocator.num_pages, states.num_slots)
        assert split.spare_bytes >= 0
        self.moved |= Counter(asdict(split.stats))  # the most of one history
        assert self.manager.cache.num_used_states == len({request.held_slot for request in self.requests})


@pytest.mark.parametrize("policy", ["flops", "lru"])
@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_random_histories(page_size: int, policy: PolicyName) -> None:
    run_histories(page_size, policy, None)


@pytest.mark.parametrize("page_size", [1, 8])
def test_random_histories_in_mapped_memory(page_size: int) -> None:
    driver = FakeDriver(4096)
    run_histories(page_size, "lru", driver)
    gc.collect()
    assert driver.counts == (0, 0, 0)


def run_histories(page_size: int, policy: PolicyName, driver: FakeDriver | None) -> None:
    moved = Counter[str]()
    settings_of = {"page_size": page_size, "policy": policy, "moved": moved, "driver": driver}
    machine = type("Machine", (ElasticMachine,), settings_of)
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    examples, steps = (1000, 100) if IS_FULL else (15, 40)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks, database=None
        ),
    )
    if IS_FULL:  # few histories may never need it; tests/cache/test_elastic_pools.py has texts whose tokens move
        assert all(moved[name] for name in ("num_moves", "moved_tokens", "moved_states")), moved
