"""A model without attention: no bytes per token in the cache, and everything else works as in other models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from specmamba.cache.kv_pool import KVPool
from specmamba.cache.memory import MemoryPlan, plan_memory
from specmamba.cache.shapes import CacheShape, StateShape
from specmamba.config import EngineConfig
from specmamba.core import RequestOutput
from specmamba.engine.engine import Engine
from specmamba.errors import ConfigError
from specmamba.llm import LLM
from specmamba.models.mamba2_family import CONTEXT_LENGTH
from specmamba.sampling_params import SamplingParams
from tests.fake_engine import Served, serving
from tests.families import falcon_mamba, jamba, mamba2
from tests.models.test_model_exact import random_prompts

SHAPE = CacheShape(kv=(), num_state_layers=3, state=StateShape(2, 6, 10, 12, 4), dtype=torch.float32)
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
VOCAB, CONTEXT = 100, 1000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mamba2")
    mamba2.build(folder)
    return folder


def plan(budget_bytes: int, **flags: Any) -> MemoryPlan:
    config = EngineConfig(max_running_requests=4, **flags)
    return plan_memory(config, SHAPE, CONTEXT, VOCAB, max_nodes=4, num_lookahead_slots=4, budget_bytes=budget_bytes)


def texts_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_pool_of_no_layers_counts_tokens() -> None:
    pool = KVPool(SHAPE, num_pages=8, page_size=4, device=torch.device("cpu"))
    assert (pool.k, pool.v, pool.num_tokens) == ((), (), 32)
    pages = pool.allocator.allocate(3)
    assert pages is not None
    assert pool.num_used_tokens == 12
    pool.move(torch.tensor([5, 6]), torch.tensor([6, 7]))  # nothing there, nothing wrong


def test_states_get_what_weights_and_tables_leave() -> None:
    budgets = 1_400_000, 2_000_000
    small, large = (plan(budget) for budget in budgets)
    for given, budget in zip((small, large), budgets, strict=True):
        assert given.kv_bytes == 0
        assert given.context_length == CONTEXT
        assert budget - SHAPE.state_bytes_per_slot < given.total_bytes <= budget
    assert large.num_cached_states > small.num_cached_states > 5 * small.num_running_requests
    most = plan(1 << 40)  # more than can be of use: a state every 64 tokens
    assert most.num_state_slots == 5 * 4 + most.num_kv_tokens // 64
    assert plan(1 << 40, disable_radix_cache=True).num_state_slots == 4
    assert plan(1 << 40, max_mamba_cache_size=9).num_state_slots == 9


def test_the_table_of_a_model_without_keys() -> None:
    lines = plan(20 << 20).describe_lines()
    [line] = [line for line in lines if line.startswith("KV pool")]
    assert "0 B  no layer has keys and values; " in line
    assert "room for 8 of the full 1,000 tokens" in next(line for line in lines if line.startswith("running requests"))


def test_advice_that_works_without_keys() -> None:
    with pytest.raises(ConfigError, match="lower --max-mamba-cache-size to ") as refused:
        plan(12 << 20, max_mamba_cache_size=5000)
    slots = int(str(refused.value).partition("--max-mamba-cache-size to ")[2].split()[0])
    assert plan(12 << 20, max_mamba_cache_size=slots).num_state_slots == slots


# ---- engine ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_headroom")
@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("strategy", ["no_buffer", "extra_buffer"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_short_of_everything(checkpoint: Path, page_size: int, strategy: str) -> None:
    """Preemption, eviction of tokens and of states, and drafts do not change the text."""
    prompts = random_prompts((30, 9, 21, 1, 44, 26), seed=6)
    common: dict[str, Any] = {"model": str(checkpoint), "dtype": "float32", "device": "cpu", "num_threads": 1}
    with LLM(**common, context_length=128, max_running_requests=6, disable_radix_cache=True) as llm:
        plain = texts_of(llm.generate(prompts, GREEDY))
    tight: dict[str, Any] = {"max_total_tokens": 192, "context_length": 96, "max_mamba_cache_size": 5}
    if strategy == "extra_buffer":
        tight |= {"mamba_radix_cache_strategy": strategy, "mamba_track_interval": 8}
    drafts: dict[str, Any] = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 5}
    drafts |= {"chunked_prefill_size": 16}
    with LLM(**common, max_running_requests=4, page_size=page_size, **tight, **drafts) as llm:
        for _ in range(2):
            assert texts_of(llm.generate(prompts, GREEDY)) == plain
        stats = llm.engine.stats()
        assert stats.num_preemptions > 0
        assert stats.prefix_cache.evicted_tokens > 0
        assert stats.prefix_cache.evicted_states > 0
        assert stats.spec.num_draft_tokens > 0
        assert (stats.kv_used_tokens, stats.state_used_slots) == (0, 0)
        llm.engine.cache_manager.cache.check()


@pytest.mark.usefixtures("no_headroom")
@pytest.mark.parametrize("family", [falcon_mamba, jamba], ids=["alone", "beside attention"])
def test_short_of_everything_with_mamba1(family: ModuleType, tmp_path: Path) -> None:
    """Records of the selective scan go the same way."""
    family.build(tmp_path)
    test_short_of_everything(tmp_path, 1, "extra_buffer")


def test_a_missing_head(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="no MTP head"):
        LLM(model=str(checkpoint), dtype="float32", device="cpu", speculative_algorithm="mtp")


# ---- server ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Served]:
    engine = Engine(EngineConfig(model=str(checkpoint), dtype="float32", device="cpu", num_threads=1))
    with serving(engine) as served:
        yield served


def test_over_http(server: Served) -> None:
    [prompt] = random_prompts((30,), seed=7)
    info = server.http.get("/server_info").raise_for_status().json()["engine"]
    assert (info["architecture"], info["kv_pool_bytes"]) == ("Mamba2ForCausalLM", 0)
    assert info["state_bytes_per_request"] == SHAPE.state_bytes_per_slot
    assert info["kv_pool_tokens"] >= info["context_length"] == CONTEXT_LENGTH
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    first, again = (server.complete(**body).raise_for_status().json() for _ in range(2))
    assert first["choices"][0]["text"] == again["choices"][0]["text"] != ""
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, again)]
    assert cached == [0, len(prompt) - 1]
    report = server.http.get("/cache").raise_for_status().json()
    assert report["num_tokens"] >= len(prompt) - 1
    assert server.http.get("/metrics").status_code == 200
    assert server.http.post("/flush_cache").status_code == 200
