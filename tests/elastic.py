"""Elastic pools of sizes that tests choose to the byte: of engines, and of a cache manager without a model.

With ``fake_driver`` their memory is mapped as on a GPU, by the same code, over memory of the host.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from specmamba.cache.memory import MemoryPlan, plan_memory
from specmamba.cache.memory.elastic import FEWEST_SLOTS, SplitBounds
from specmamba.cache.pool_memory import cuda_driver
from specmamba.cache.pool_memory.cuda_driver import CudaDriver
from specmamba.cache.prefix import MambaRadixCache
from specmamba.cache.prefix.eviction import Costs, PolicyName
from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.config import EngineConfig
from specmamba.engine import engine as engine_module
from specmamba.engine.cache_manager import CacheManager
from specmamba.engine.request import Request
from specmamba.kernels.native.levels import NativeUnavailableError, chosen_level
from specmamba.kernels.native.library import built_library
from specmamba.sampling_params import SamplingParams
from specmamba.verify.pools import Pools

CPU = torch.device("cpu")


# 16 bytes of KV per token, 64 of state and window per slot
SHAPE = CacheShape((KVShape(1, 1, 2),), 1, StateShape(1, 1, 2, 4, 2), torch.float32)
# and 2,304: as in usual models a state is as large as the KV of more than a hundred tokens
LARGE_STATES = CacheShape((KVShape(1, 1, 2),), 1, StateShape(1, 1, 16, 32, 2), torch.float32)
# 4,096 bytes of KV per token and 17,152 per slot: a chunk of 4 KiB has the keys of two tokens, a slot five chunks
WIDE = CacheShape((KVShape(1, 1, 512),), 1, StateShape(1, 1, 64, 64, 2), torch.float32)
COSTS = Costs(state_bytes=64, kv_bytes_per_token=16, flops_per_token=100.0, flops_per_token_squared=1.0)


NO_LIMIT = (1 << 64) - 1


class FakeDriver(CudaDriver):
    """The driver's calls over memory of the host: touching what is not mapped ends the process."""

    def __init__(self, granularity: int = 1 << 21, most_bytes: int = NO_LIMIT, is_able: bool = True) -> None:
        self.library = ctypes.CDLL(str(fake_library()))
        self.library.fake_set(ctypes.c_uint64(granularity), ctypes.c_uint64(most_bytes), int(is_able))
        super().__init__(self.library)

    @property
    def counts(self) -> tuple[int, ...]:
        """Ranges of addresses, chunks and mappings that there are now."""
        counts = (ctypes.c_uint64 * 3)()
        self.library.fake_count(counts)
        return tuple(counts)


@cache
def fake_library() -> Path:
    """The library of ``FakeDriver``, compiled once."""
    if sys.platform != "linux":
        pytest.skip("needs calls of Linux")
    try:
        return built_library(Path(__file__).parent / "cache" / "pools" / "fake_cuda_driver.cpp", chosen_level())
    except NativeUnavailableError as reason:
        pytest.skip(f"needs a C++ compiler: {reason}")


@contextmanager
def mapping(driver: CudaDriver) -> Iterator[None]:
    """Pools whose plans have chunks get their memory from this driver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "driver_of", lambda _: driver)
        yield


def elastic_plan(made: MemoryPlan, shape: CacheShape, context: int, driver: CudaDriver | None = None) -> MemoryPlan:
    """A plan whose pools share what they have at the start, in chunks of a driver if there is one."""
    page_bytes, slot_bytes = made.page_size * shape.kv_bytes_per_token, shape.state_bytes_per_slot
    pool_bytes = made.num_pages * page_bytes + made.num_state_slots * slot_bytes
    most_pages = (pool_bytes - FEWEST_SLOTS * slot_bytes) // page_bytes
    chunk = 0 if driver is None else driver.granularity
    bounds = SplitBounds(pool_bytes, page_bytes, slot_bytes, most_pages, pool_bytes // slot_bytes, chunk)
    longest = min(context, most_pages * made.page_size - made.num_lookahead_slots)
    ends = (2 if shape.kv_dtype is None else 4) * shape.num_kv_layers + 2 * shape.num_state_layers + 1
    return replace(made, elastic=bounds, context_length=longest, end_bytes=ends * chunk)


@contextmanager
def elastic_pools(num_tokens: int, num_slots: int, driver: CudaDriver | None = None) -> Iterator[None]:
    """Engines that start here have pools of these sizes, elastic unless ``--elastic-pools off``."""

    def plan(
        config: EngineConfig, shape: CacheShape, context: int, *sizes: Any, elastic_chunk: int | None, **more: Any
    ) -> MemoryPlan:
        given = {"max_total_tokens": num_tokens, "max_mamba_cache_size": num_slots}
        made = plan_memory(config.model_copy(update=given), shape, context, *sizes, **more)
        longest = config.context_length or context
        return made if elastic_chunk is None else elastic_plan(made, shape, longest, driver)

    with pytest.MonkeyPatch.context() as patch, nullcontext() if driver is None else mapping(driver):
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
        driver: CudaDriver | None = None,
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
        with nullcontext() if driver is None else mapping(driver):
            pools = Pools(shape, 8, elastic_plan(plan, shape, context, driver) if is_elastic else plan, CPU)
        kv = pools.kv
        cache = MambaRadixCache(kv.allocator, page_size, pools.states, COSTS, policy, pools.split)
        return cls(pools, CacheManager(pools, cache, is_on=True, track_interval=None, spare_limits=(3, 512)))

    def __post_init__(self) -> None:
        pools = self.pools
        self.tokens = pools.kv.k[0].flatten(1).numpy(), pools.kv.v[0].flatten(1).numpy()
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
