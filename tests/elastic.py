"""Elastic pools of sizes that tests choose to the byte: of engines, and of a cache manager without a model."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch

from specmamba.cache.memory import MemoryPlan, plan_memory
from specmamba.cache.memory.elastic import FEWEST_SLOTS, SplitBounds
from specmamba.cache.prefix import MambaRadixCache
from specmamba.cache.prefix.eviction import Costs, PolicyName
from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.config import EngineConfig
from specmamba.engine import engine as engine_module
from specmamba.engine.cache_manager import CacheManager
from specmamba.engine.request import Request
from specmamba.sampling_params import SamplingParams
from specmamba.verify.pools import Pools

CPU = torch.device("cpu")


# 16 bytes of KV per token, 64 of state and window per slot
SHAPE = CacheShape((KVShape(1, 1, 2),), 1, StateShape(1, 1, 2, 4, 2), torch.float32)
# and 2,304: as in usual models a state is as large as the KV of more than a hundred tokens
LARGE_STATES = CacheShape((KVShape(1, 1, 2),), 1, StateShape(1, 1, 16, 32, 2), torch.float32)
COSTS = Costs(state_bytes=64, kv_bytes_per_token=16, flops_per_token=100.0, flops_per_token_squared=1.0)


def elastic_plan(made: MemoryPlan, shape: CacheShape, context: int) -> MemoryPlan:
    """A plan whose pools share what they have at the start."""
    page_bytes, slot_bytes = made.page_size * shape.kv_bytes_per_token, shape.state_bytes_per_slot
    pool_bytes = made.num_pages * page_bytes + made.num_state_slots * slot_bytes
    most_pages = (pool_bytes - FEWEST_SLOTS * slot_bytes) // page_bytes
    bounds = SplitBounds(pool_bytes, page_bytes, slot_bytes, most_pages, pool_bytes // slot_bytes)
    longest = min(context, most_pages * made.page_size - made.num_lookahead_slots)
    return replace(made, elastic=bounds, context_length=longest)


@contextmanager
def elastic_pools(num_tokens: int, num_slots: int) -> Iterator[None]:
    """Engines that start here have pools of these sizes, elastic unless ``--elastic-pools off``."""

    def plan(config: EngineConfig, shape: CacheShape, context: int, *sizes: Any, is_elastic: bool) -> MemoryPlan:
        given = {"max_total_tokens": num_tokens, "max_mamba_cache_size": num_slots}
        made = plan_memory(config.model_copy(update=given), shape, context, *sizes)
        return elastic_plan(made, shape, config.context_length or context) if is_elastic else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "plan_memory", plan)
        yield


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
    def made(
        cls,
        page_size: int,
        policy: PolicyName,
        num_pages: int,
        num_slots: int,
        context: int,
        shape: CacheShape = SHAPE,
        is_elastic: bool = True,
    ) -> Memory:
        config = EngineConfig(
            page_size=page_size,
            max_running_requests=3,
            max_total_tokens=num_pages * page_size,
            max_mamba_cache_size=num_slots,
            speculative_algorithm="none",
            disable_cuda_graph=True,
        )
        plan = plan_memory(config, shape, context, 8, 1, 1, 1 << 30)
        pools = Pools(shape, 8, elastic_plan(plan, shape, context) if is_elastic else plan, CPU)
        kv = pools.kv
        cache = MambaRadixCache(kv.allocator, page_size, pools.states, COSTS, policy, pools.split)
        return cls(pools, CacheManager(pools, cache, is_on=True, track_interval=None, spare_limits=(3, 512)))

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

    def request(self, name: str, text: Text) -> Request:
        return Request(name, 0, text, SamplingParams(), 0, cast(Any, None))

    def start(self, name: str, text: Text) -> Request:
        """Admit a request and run its prompt but for the last token."""
        request = self.request(name, text)
        assert self.manager.acquire(request, len(text), 0)
        self.write(request, len(text) - 1)
        return request

    def end(self, request: Request, leaves: bool = True) -> None:
        for each in self.manager.leaving([request]) if leaves else ():
            self.manager.leave_last(each, None)
        self.manager.release(request)

    def check_request(self, request: Request) -> None:
        slots = self.pools.table.slots_of_positions(request.held_row, 0, request.num_run)
        self.check_tokens(slots, request.prompt, 0, request.num_run)
        self.check_state(request.held_slot, request.prompt[: request.num_run])
        self.manager.cache.check(self.pools.table.held_pages())
