"""How many threads an engine takes: by its flags, the size of its weights, and what the process had at first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from specmamba import LLM, AsyncLLM, SamplingParams
from specmamba.config import EngineConfig
from specmamba.engine import loading
from specmamba.engine.loading import SHARED_MODEL_BYTES, SMALL_MODEL_BYTES, set_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def process_of_eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(loading, "process_threads", lambda: 8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("weight_bytes", "direct", "replayed"),
    [
        (SHARED_MODEL_BYTES - 1, 1, 1),
        (SHARED_MODEL_BYTES, 1, 2),
        (SMALL_MODEL_BYTES, 1, 2),
        (SMALL_MODEL_BYTES + 1, 8, 8),
    ],
)
def test_by_the_size_of_the_weights(weight_bytes: int, direct: int, replayed: int) -> None:
    """Whatever an engine that is still open has chosen."""
    for others in (1, 2, 8):
        torch.set_num_threads(others)
        assert set_threads(EngineConfig(), CPU, weight_bytes) == replayed
        assert torch.get_num_threads() == direct


@pytest.mark.parametrize("weight_bytes", [1, SHARED_MODEL_BYTES, SMALL_MODEL_BYTES + 1])
def test_the_flag_decides(weight_bytes: int) -> None:
    assert set_threads(EngineConfig(num_threads=3), CPU, weight_bytes) == 3
    assert torch.get_num_threads() == 3


class TestOfEachThread:
    """PyTorch's number is a setting of each thread: an ``AsyncLLM`` is often made in one and closed in another."""

    @pytest.mark.parametrize("is_made_here", [True, False])
    def test_making_and_closing_leave_both_threads_as_they_were(self, is_made_here: bool) -> None:
        torch.set_num_threads(2)
        seen: list[int] = []

        async def use() -> None:
            with ThreadPoolExecutor(1) as other:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(other, torch.get_num_threads)  # the first one sets what is new here
                await loop.run_in_executor(other, torch.set_num_threads, 4)
                make = partial(AsyncLLM, dtype="float32", device="cpu", context_length=64, num_threads=3)
                llm = make() if is_made_here else await loop.run_in_executor(other, make)
                seen.append(await asyncio.wrap_future(llm._local.thread.call(lambda _: torch.get_num_threads())))
                await llm.generate("x", SamplingParams(max_tokens=2))
                await loop.run_in_executor(other, llm._local.close)
                seen.append(await loop.run_in_executor(other, torch.get_num_threads))

        asyncio.run(use())
        assert seen == [3, 4]
        assert torch.get_num_threads() == 2

    def test_an_engine_keeps_its_number_beside_another(self) -> None:
        """Also where the other one is made before the first has run anything."""
        flags: dict[str, Any] = {"dtype": "float32", "device": "cpu", "context_length": 64}
        with LLM(num_threads=3, **flags) as first, LLM(num_threads=2, **flags) as second:
            numbers = [llm._local.thread.call(lambda _: torch.get_num_threads()).result() for llm in (first, second)]
            assert numbers == [3, 2]

    def test_a_load_that_fails_leaves_the_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.set_num_threads(2)
        monkeypatch.setattr("specmamba.engine.engine.build_graph_runner", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            LLM(dtype="float32", device="cpu", num_threads=3)
        assert torch.get_num_threads() == 2
