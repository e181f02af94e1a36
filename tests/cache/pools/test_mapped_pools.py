"""Pools in mapped memory, as on a GPU: by the code that runs there, over a driver that maps memory of the host.

That driver (fake_cuda_driver.cpp) refuses what NVIDIA's refuses, and what touches an address without memory ends the
process. The last tests need a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from specmamba.cache.memory import MemoryPlan, plan_memory
from specmamba.cache.memory.elastic import elastic_chunk
from specmamba.cache.pool_memory import cuda_driver
from specmamba.cache.pool_memory.chunk_store import ChunkStore
from specmamba.cache.pool_memory.cuda_driver import CudaDriver, DriverError, driver_of
from specmamba.cache.pool_memory.mapped_memory import MappedLayers
from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.config import EngineConfig
from specmamba.verify.pools import Pools
from tests.cache.test_elastic_pools import compare
from tests.drafts import DRAFTS
from tests.elastic import CPU, SHAPE, WIDE, FakeDriver, Memory, fake_library, mapping

CHUNK = 4096
# attention in 6 of 24 layers and states of 1 MiB, as in Qwen3.5-0.8B
QWEN = CacheShape((KVShape(6, 2, 256),), 18, StateShape(16, 16, 128, 128, 4), torch.bfloat16)


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    driver = FakeDriver(CHUNK)
    yield driver
    gc.collect()
    assert driver.counts == (0, 0, 0)


class TestDriver:
    """The driver of the tests is as strict as the real one; each refusal is an error that names the call."""

    @pytest.mark.parametrize(
        ("call", "name"),
        [
            (lambda d, at, chunk: d.reserve(CHUNK - 1), "cuMemAddressReserve"),
            (lambda d, at, chunk: d.map(at + 1, chunk), "cuMemMap"),
            (lambda d, at, chunk: d.map(at + 4 * CHUNK, chunk), "cuMemMap"),  # behind the range
            (lambda d, at, chunk: d.map(at, chunk + 1), "cuMemMap"),  # no such chunk
            (lambda d, at, chunk: [d.map(at, chunk), d.map(at, chunk)], "cuMemMap"),
            (lambda d, at, chunk: d.unmap(at), "cuMemUnmap"),
            (lambda d, at, chunk: [d.map(at, chunk), d.allow(at, 2 * CHUNK)], "cuMemSetAccess"),
            (lambda d, at, chunk: [d.map(at, chunk), d.free(at, 4 * CHUNK)], "cuMemAddressFree"),
            (lambda d, at, chunk: d.free(at, CHUNK), "cuMemAddressFree"),
            (lambda d, at, chunk: d.release(chunk + 1), "cuMemRelease"),
        ],
    )
    def test_what_is_wrong_is_refused(
        self, driver: FakeDriver, call: Callable[[CudaDriver, int, int], object], name: str
    ) -> None:
        at, chunk = driver.reserve(4 * CHUNK), driver.create()
        with pytest.raises(DriverError, match=rf"{name} failed with CUDA_ERROR_INVALID_VALUE \(1\)"):
            call(driver, at, chunk)
        if driver.counts[2]:
            driver.unmap(at)
        driver.release(chunk)
        driver.free(at, 4 * CHUNK)

    def test_what_is_touched_without_memory_ends_the_process(self) -> None:
        code = (
            "import sys, torch; from tests.elastic import CPU, FakeDriver\n"
            "from specmamba.cache.pool_memory.mapped_memory import MappedLayers\n"
            "from specmamba.cache.pool_memory.chunk_store import ChunkStore\n"
            "layers = MappedLayers(ChunkStore(FakeDriver(4096), CPU, 8), (2, 4096, 4), torch.uint8, 1024)\n"
            "print(int(layers.tensor[1, 1023, 3]), flush=True); print(layers.tensor[0, 1024, 0])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
        assert (done.stdout, done.returncode) == ("0\n", -signal.SIGSEGV), done.stderr

    @pytest.mark.parametrize(
        ("library", "is_able", "most_bytes", "reason"),
        [
            ("libnone.so.1", 1, CHUNK, "cannot open shared object"),
            ("libc.so.6", 1, CHUNK, "the driver is too old"),
            (None, 0, CHUNK, "the device cannot map memory"),
            (None, 1, CHUNK - 1, "cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY"),
            (None, 1, CHUNK, ""),
        ],
    )
    def test_a_device_that_cannot_do_it_has_fixed_pools(
        self,
        library: str | None,
        is_able: int,
        most_bytes: int,
        reason: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """It is tried once, and said once."""
        ctypes.CDLL(str(fake_library())).fake_set(ctypes.c_uint64(CHUNK), ctypes.c_uint64(most_bytes), is_able)
        monkeypatch.setattr(cuda_driver, "LIBRARY", library or str(fake_library()))
        monkeypatch.setattr(cuda_driver, "_driver", cache(cuda_driver._driver.__wrapped__))
        with caplog.at_level(logging.WARNING, "specmamba"):
            chunks = {elastic_chunk(EngineConfig(elastic_pools="on"), SHAPE, torch.device("cuda", 0)) for _ in range(2)}
        assert chunks == ({None} if reason else {CHUNK})
        assert [reason in record.message for record in caplog.records] == [True] * bool(reason)
        assert elastic_chunk(EngineConfig(elastic_pools="off"), SHAPE, torch.device("cuda", 0)) is None
        assert driver_of(CPU) is None


class TestLayers:
    def test_memory_follows_the_count(self, driver: FakeDriver) -> None:
        """Each layer has the chunks of its entries; what was there before stays, at the same place, and new is zero."""
        store = ChunkStore(driver, CPU, 12)
        layers = MappedLayers(store, (2, 100, 3, 7), torch.float32, 1)  # 84 bytes, so a layer has 1,024 entries
        x = layers.tensor
        assert x.shape == (2, 1024, 3, 7)
        assert x.is_contiguous()
        assert x.data_ptr() % CHUNK == x[1].data_ptr() % CHUNK == 0
        had = 0
        for count, chunks in ((1, 1), (49, 2), (48, 1), (100, 3), (244, 6), (10, 1)):
            before = x[:, :1].clone()
            layers.fit(count)
            assert (store.num_free, driver.counts[2]) == (12 - 2 * chunks, 2 * chunks)
            assert torch.equal(x[:, :1], before)
            assert not x.flatten(1)[:, had * CHUNK // 4 : chunks * CHUNK // 4].any()
            x[:, :count] = count
            assert layers.tensor.data_ptr() == x.data_ptr()
            had = chunks

    def test_more_than_there_is_is_refused(self, driver: FakeDriver) -> None:
        store = ChunkStore(driver, CPU, 3)
        layers = MappedLayers(store, (1, CHUNK * 8), torch.uint8, 1)
        with pytest.raises(RuntimeError, match="3 chunks of memory are needed, and 2 are free"):
            layers.fit(4 * CHUNK)
        layers.fit(3 * CHUNK)

    def test_too_little_memory_is_said_at_the_start(self) -> None:
        driver = FakeDriver(CHUNK, 3 * CHUNK)
        with pytest.raises(DriverError, match=r"cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY \(2\): out of memory"):
            ChunkStore(driver, CPU, 4)
        gc.collect()
        assert driver.counts == (0, 0, 0)

    def test_views_keep_the_memory(self, driver: FakeDriver) -> None:
        """A captured step has tensors of a pool whose owner is gone."""
        view = MappedLayers(ChunkStore(driver, CPU, 2), (2, CHUNK), torch.uint8, 8).tensor[1, 2:4].numpy()
        gc.collect()
        assert driver.counts == (1, 2, 2)
        view[:] = 3
        assert view.tolist() == [3, 3]

    def test_the_device_is_waited_for_before_memory_goes(
        self, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a move, each chunk is unmapped or mapped after the work that was launched before; nothing else waits."""
        calls: list[str] = []

        class Watched(ChunkStore):
            def settle(self) -> None:
                calls.append("settle")

        layers, unmap = MappedLayers(Watched(driver, CPU, 8), (2, CHUNK * 8), torch.uint8, 1), driver.unmap

        def watched(address: int) -> None:
            calls.append("unmap")
            unmap(address)

        monkeypatch.setattr(driver, "unmap", watched)
        calls.clear()
        layers.fit(3 * CHUNK)
        layers.fit(3 * CHUNK - 1)
        layers.fit(1)
        assert calls == ["settle", "settle", *["unmap"] * 4]


def test_nothing_behind_the_ends_has_memory(driver: FakeDriver) -> None:
    """All memory is with KV, then with states, and no pool has more than whole chunks of what it has."""
    memory = Memory.made(16, "lru", 64, 4, context=20, shape=WIDE, driver=driver)
    pools = memory.pools
    tensors = (*pools.kv.groups, pools.states.recurrent, pools.states.conv)

    def mapped() -> int:
        counts = [(pools.kv.allocator.num_pages + 1) * 16] * 2 + [pools.states.num_slots + 1] * 2
        return sum(-(-count * x[0, 0].nbytes // CHUNK) for x, count in zip(tensors, counts, strict=True))

    for pages, slots in ((0, 200), (60, 4), (3, 0), (0, 180), (64, 1)):
        assert memory.manager.cache.make_room(pages, slots)
        assert driver.counts[2] == mapped()
    pools.give_back()
    assert (pools.kv.allocator.num_pages, pools.states.num_slots) == (64, 4)
    assert driver.counts[2] == mapped()


class TestPlan:
    def plan(self, budget: int, chunk: int, shape: CacheShape = QWEN, **flags: Any) -> MemoryPlan:
        config = EngineConfig(speculative_algorithm="none", max_running_requests=32, disable_cuda_graph=True, **flags)
        return plan_memory(config, shape, 262_144, 1000, 1, 1, budget, elastic_chunk=chunk)

    def test_a_small_share_is_wasted(self) -> None:
        """Of 20 GiB for Qwen3.5-0.8B, 49 layers of tensors may waste a chunk of 2 MiB each: less than 0.5 %."""
        made = self.plan(20 << 30, 2 << 20)
        assert made.elastic is not None
        assert (made.end_bytes, made.elastic.chunk_bytes) == (49 * (2 << 20), 2 << 20)
        assert made.end_bytes < 0.005 * made.elastic.pool_bytes
        assert made.total_bytes <= 20 << 30
        assert "take up to 98.0 MiB more" in "\n".join(made.describe_lines())

    def test_pools_stay_fixed_where_chunks_waste_much(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "specmamba"):
            made = self.plan(2 << 30, 2 << 20)
        assert (made.elastic, made.end_bytes) == (None, 0)
        assert "chunks of 2097152 bytes could waste" in caplog.text
        small = self.plan(2 << 30, 64 << 10).elastic
        assert small is not None
        assert small.chunk_bytes == 64 << 10

    @pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["bf16", "int8"])
    def test_chunks_are_enough_at_every_line(self, kv_dtype: torch.dtype | None) -> None:
        """With odd sizes of a page and of a slot, a draft's layers and features; in chunks of 64 KiB."""
        driver = FakeDriver(64 << 10)
        kv = KVShape(3, 2, 40), KVShape(1, 1, 72)
        state = StateShape(2, 6, 24, 40, 4)
        shape = CacheShape(kv, 5, state, torch.bfloat16, draft_features=77, kv_dtype=kv_dtype)
        made = self.plan(96 << 20, 64 << 10, shape, page_size=3)
        assert made.elastic is not None
        with mapping(driver):
            pools = Pools(shape, 8, made, CPU)
        assert pools.split is not None
        for count in (1, 7, 100, 10_000, 3, 1000):
            while pools.split.gain_slots(count, 0):
                pass
            while pools.split.gain_pages(count, 0):
                pass
        assert pools.split.stats.num_moves > 4
        del pools
        gc.collect()
        assert driver.counts == (0, 0, 0)


@pytest.mark.usefixtures("no_headroom")
@pytest.mark.fast_cases("tree")
@pytest.mark.parametrize(("drafts", "granularity"), [("chain", 1 << 21), ("plain", 4096), ("tree", 1 << 16)])
def test_texts_are_those_of_fixed_pools(drafts: str, granularity: int, prompts: list[tuple[int, ...]]) -> None:
    """An engine of the demo in mapped memory: captured steps, drafts, prefix hits and preemptions."""
    driver = FakeDriver(granularity)
    outputs, stats = compare(prompts, DRAFTS[drafts], driver=driver)
    assert stats.num_preemptions > 0
    assert any(output.num_cached_tokens > 10 for output in outputs)
    gc.collect()
    assert driver.counts == (0, 0, 0)


def test_steps_that_are_launched_ahead_touch_no_memory_that_has_gone(prompts: list[tuple[int, ...]]) -> None:
    """They run on another thread, some after the host has gone on; each move comes behind those before it."""
    driver = FakeDriver(4096)
    compare(prompts, {**DRAFTS["chain"], "speculative_state": "records"}, driver=driver, is_deferred=True)


# --- on a GPU


@pytest.mark.gpu
def test_a_captured_step_sees_moved_memory() -> None:
    """What is mapped behind the old end is used by a graph that was captured before; freed chunks serve others."""
    device = torch.device("cuda", torch.cuda.current_device())
    driver = driver_of(device)
    assert driver is not None
    chunk = driver.granularity
    store = ChunkStore(driver, device, 6)
    first = MappedLayers(store, (2, 8 * chunk), torch.uint8, 1)
    second = MappedLayers(store, (1, 8 * chunk // 2), torch.bfloat16, 1)
    places = torch.tensor([0, chunk - 1], device=device)
    graph = torch.cuda.CUDAGraph()
    first.tensor[:, places] += 1
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        first.tensor[:, places] += 1
    graph.replay()
    assert first.tensor[:, places].tolist() == [[2, 2]] * 2
    first.fit(2 * chunk)
    places.copy_(torch.tensor([0, 2 * chunk - 1]))
    graph.replay()
    assert first.tensor[:, places].tolist() == [[3, 1]] * 2
    first.tensor[:, chunk : 2 * chunk] = 255
    first.fit(chunk)
    second.fit(chunk)  # two chunks, one of which was the first's
    assert not second.tensor[0, :chunk].any()
    places.copy_(torch.tensor([0, 1]))
    graph.replay()
    assert first.tensor[:, places].tolist() == [[4, 1]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_texts_on_a_gpu_are_those_of_fixed_pools(drafts: str, prompts: list[tuple[int, ...]]) -> None:
    driver = driver_of(torch.device("cuda"))
    assert driver is not None
    compare(prompts, {**DRAFTS[drafts], "device": "cuda"}, driver=driver)
