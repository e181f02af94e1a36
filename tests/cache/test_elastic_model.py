"""Elastic pools under random histories of requests: after every step each number in memory is that of its text.

Hypothesis makes requests that match, run, leave states, verify, are preempted and end, in pools that give memory to
each other all the time. Every step is followed by a check of all keys, values and states that anything points at, of
all owners of pages and slots, and of the bytes that both pools have. ``SPECMAMBA_TEST_FULL=1`` runs many more.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from specmamba.cache.memory import MemoryPlan, plan_memory
from specmamba.cache.prefix import MambaRadixCache
from specmamba.cache.prefix.eviction import Costs, PolicyName
from specmamba.cache.prefix.node import Node
from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.cache.state_pool import PREFIX_CACHE
from specmamba.config import EngineConfig
from specmamba.engine.cache_manager import CacheManager
from specmamba.engine.request import Request
from specmamba.sampling_params import SamplingParams
from specmamba.verify.pools import Pools
from tests.elastic import elastic_plan

IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
CPU = torch.device("cpu")
MAX_LENGTH = 14
PICK = st.integers(0, 1000)
TAIL = st.lists(st.integers(0, 1), max_size=6).map(tuple)
# 16 bytes of KV per token, 44 of state and window per slot
SHAPE = CacheShape((KVShape(1, 1, 2),), 1, StateShape(1, 1, 2, 4, 2), torch.float32)
COSTS = Costs(state_bytes=64, kv_bytes_per_token=16, flops_per_token=100.0, flops_per_token_squared=1.0)

Text = tuple[int, ...]


@cache
def content(text: Text) -> float:
    """A number that float32 holds exactly, another one for almost every text."""
    return float(zlib.crc32(bytes(text)) >> 8)


def contents(text: Text, start: int, end: int) -> tuple[Any, Any]:
    """Keys and values of positions: numbers of the texts that end there."""
    keys = np.array([content(text[: position + 1]) for position in range(start, end)], dtype=np.float32)
    return keys, keys + 1


@dataclass
class Memory:
    """A cache manager on small pools, and a model that writes ``content`` of each text instead of running it."""

    pools: Pools
    manager: CacheManager

    @classmethod
    def made(cls, page_size: int, policy: PolicyName, num_pages: int, num_slots: int) -> Memory:
        config = EngineConfig(
            page_size=page_size,
            max_running_requests=3,
            max_total_tokens=num_pages * page_size,
            max_mamba_cache_size=num_slots,
            speculative_algorithm="none",
            disable_cuda_graph=True,
        )
        fixed = plan_memory(config, SHAPE, MAX_LENGTH + 1, 8, 1, 1, 1 << 30)
        plan: MemoryPlan = elastic_plan(replace(fixed, num_rows=3), SHAPE, MAX_LENGTH + 1)
        pools = Pools(SHAPE, 8, plan, CPU)
        kv = pools.kv
        cache = MambaRadixCache(kv.allocator, page_size, pools.states, COSTS, policy, pools.split)
        return cls(pools, CacheManager(pools, cache, is_on=True, track_interval=None))

    def __post_init__(self) -> None:
        pools = self.pools
        self.tokens = pools.kv.k[0].view(-1, 2).numpy(), pools.kv.v[0].view(-1, 2).numpy()
        self.states = tuple(each[0].flatten(1).numpy() for each in (pools.states.recurrent, pools.states.conv))

    def write(self, request: Request, end: int) -> None:
        """Run the tokens of a request up to ``end``."""
        text, start, slot, states = request.prompt, request.num_run, request.held_slot, self.pools.states
        places = self.pools.table.slots_of_positions(request.held_row, start, end)
        self.tokens[0][places], self.tokens[1][places] = (x[:, None] for x in contents(text, start, end))
        states.check(slot, request.request_id, start)
        states.begin_write(slot, request.request_id)
        for each in self.states:
            each[slot] = content(text[:end])
        states.end_write(slot, end)
        request.num_run = end

    def check_tokens(self, slots: Any, text: Text, start: int, end: int) -> None:
        for layer, due in zip(self.tokens, contents(text, start, end), strict=True):
            assert (layer[slots] == due[:, None]).all()

    def check_state(self, slot: int, text: Text) -> None:
        due = content(text) if text else 0.0
        assert all((each[slot] == due).all() for each in self.states), (slot, text)


class ElasticMachine(RuleBasedStateMachine):
    page_size = 1
    policy: PolicyName = "lru"
    moved: Counter[str]  # over all histories

    def __init__(self) -> None:
        super().__init__()
        # 16 pages of one token, 7 of three or 4 of eight; and 4 states, each as large as less than three tokens
        self.memory = Memory.made(self.page_size, self.policy, {1: 16, 3: 7, 8: 4}[self.page_size], 4)
        self.pools, self.manager = self.memory.pools, self.memory.manager
        self.requests: list[Request] = []
        self.texts: list[Text] = [(0, 0, 1, 0, 1, 1)]
        self.number = 0

    def request(self, pick: int, cut: int, tail: Text) -> Request:
        text = ((*self.texts[pick % len(self.texts)][:cut], *tail)[:MAX_LENGTH] or (1,)) + (1,)
        self.texts.append(text)
        self.number += 1
        return Request(f"r{self.number}", self.number, text[:MAX_LENGTH], SamplingParams(), 0, cast(Any, None))

    @rule(pick=PICK, cut=st.integers(0, MAX_LENGTH), tail=TAIL, spare=st.integers(0, 3), use_cache=st.booleans())
    def admit(self, pick: int, cut: int, tail: Text, spare: int, use_cache: bool) -> None:
        request = self.request(pick, cut, tail)
        cache, table = self.manager.cache, self.pools.table
        length = cache.peek(request.key())[0] if use_cache else 0
        has_row = bool(table.num_free_rows)
        needed = table.num_missing_pages(None, len(request.prompt), length) + -(-spare // self.page_size)
        could = cache.can_have(needed, 1)
        if self.manager.acquire(request, len(request.prompt), spare, use_cache):
            assert could and has_row
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
            assert allocator.num_free >= pages and states.num_free >= slots
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
        assert len(set(free.tolist())) == len(free) and all(1 <= free) and all(free <= pools.kv.allocator.num_pages)

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
    moved = Counter[str]()
    machine = type("Machine", (ElasticMachine,), {"page_size": page_size, "policy": policy, "moved": moved})
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    examples, steps = (1000, 100) if IS_FULL else (25, 40)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks, database=None
        ),
    )
    assert all(moved[name] for name in ("num_moves", "moved_tokens", "moved_states")), moved
