"""Keys and values in 8 bits (``--kv-cache-dtype``): texts with drafts, cached prefixes and preemption, and the memory.

In float32 the text with drafts is the text of plain decoding with the same type of keys and values.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from specmamba import LLM, SamplingParams
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.memory import plan_memory
from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.config import DEMO_MODEL, EngineConfig
from specmamba.cuda_graphs import NativeReplay
from specmamba.engine.engine import Engine
from specmamba.engine.model_report import model_info
from specmamba.engine.workbench import Workbench
from specmamba.errors import ConfigError
from specmamba.kernels.paged_attention.codes import as_bytes, quantize
from specmamba.measure.acceptance.judge import EXACT_BOUND
from specmamba.models.text.tokenizer import Tokenizer
from tests.drafts import DRAFTS
from tests.exactness import assert_same_greedy_texts, why_not_native
from tests.families import FAMILIES

CPU = torch.device("cpu")
DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
NUM_TOKENS = 24
each_dtype = pytest.mark.parametrize("name", DTYPES)
Tokens = tuple[int, ...]
STATE = StateShape(num_key_heads=1, num_value_heads=1, key_dim=4, value_dim=4, conv_width=4)
# the target's layers, and a head's, whose heads are others
SHAPE = CacheShape((KVShape(2, 2, 128), KVShape(1, 4, 64)), 1, STATE, torch.bfloat16)


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    tokenizer = Tokenizer(DEMO_MODEL)
    lines = (DEMO_MODEL / "prompts.jsonl").read_text("utf8").splitlines()
    texts = [tuple(tokenizer.encode(json.loads(line)["prompt"])) for line in lines]
    return [text for text in texts if len(text) >= 90][:4]


def new_llm(name: str, drafts: str, **flags: Any) -> LLM:
    sizes: dict[str, Any] = {"context_length": 512, "max_running_requests": 4, "max_mamba_cache_size": 64}
    exact = {"kv_cache_dtype": name} | ({} if drafts == "plain" else {"speculative_adaptive": "off"})
    return LLM(dtype="float32", device="cpu", **{**sizes, **DRAFTS[drafts], **exact, **flags})


def greedy(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


class Expected:
    """Texts of plain decoding without a prefix cache, each computed once."""

    def __init__(self, name: str) -> None:
        self.llm = new_llm(name, "plain", disable_radix_cache=True)
        self._known: dict[Tokens, Tokens] = {}

    def check(self, prompt: Tokens, text: Tokens) -> None:
        if prompt not in self._known:
            self._known[prompt] = self.llm.generate(prompt, greedy())[0].token_ids
        want = self._known[prompt][: len(text)]
        assert_same_greedy_texts([text], [want], [prompt], lambda: nullcontext(self.llm))


@pytest.fixture(scope="module", params=DTYPES)
def expected(request: pytest.FixtureRequest) -> Iterator[tuple[str, Expected]]:
    made = Expected(request.param)
    yield request.param, made
    made.llm.close()


@pytest.mark.fast_cases("chain-1-64-True", "tree-16-16-True", "tree-1-1000-False")
@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize(("page_size", "chunk_size"), [(1, 64), (16, 16), (1, 1000)])
@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_texts_with_drafts(
    expected: tuple[str, Expected],
    drafts: str,
    page_size: int,
    chunk_size: int,
    is_captured: bool,
    prompts: list[Tokens],
) -> None:
    """Together, then again: from cached prefixes, which go on behind codes that other requests left."""
    name, plain = expected
    flags: dict[str, Any] = {"page_size": page_size, "chunked_prefill_size": chunk_size}
    with new_llm(name, drafts, disable_cuda_graph=not is_captured, **flags) as llm:
        pool = llm.engine.pools.kv
        assert {x.dtype for x in (*pool.k, *pool.v)} == {DTYPES[name]}
        assert len(pool.k) == 3  # the MTP head's too
        outputs = [*llm.generate(prompts, greedy()), *llm.generate(prompts[:2], greedy())]
        assert [output.num_cached_tokens for output in outputs[-2:]] == [len(prompt) - 1 for prompt in prompts[:2]]
        assert sum(output.spec.num_accepted_tokens for output in outputs) > 10
        for output in outputs:
            plain.check(output.prompt_token_ids, output.token_ids)
        graphs = llm.engine.runner.graph_runner
        if is_captured and why_not_native() is None:
            assert graphs is not None
            assert isinstance(graphs.replay, NativeReplay)
            assert not [call for tape in graphs.replay.tapes.values() for call in tape.python_calls]


@pytest.mark.fast_cases("tree")
@pytest.mark.parametrize("drafts", ["plain", "tree"])
def test_preempted_and_resumed(expected: tuple[str, Expected], drafts: str, prompts: list[Tokens]) -> None:
    name, plain = expected
    with new_llm(name, drafts, page_size=16, chunked_prefill_size=64) as llm:
        engine, outputs = llm.engine, dict.fromkeys(map(str, range(len(prompts))), Tokens())
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, greedy())
        for step in itertools.count():
            if not engine.has_unfinished_requests:
                break
            for delta in engine.step():
                outputs[delta.request_id] += delta.token_ids
            if step % 3 == 2 and engine.scheduler.verifying:
                engine.preempt(engine.scheduler.verifying[step % len(engine.scheduler.verifying)])
        assert engine.stats().num_preemptions >= 2
    for prompt, tokens in zip(prompts, outputs.values(), strict=True):
        plain.check(prompt, tokens)


@each_dtype
def test_codes_move_with_their_scales(name: str) -> None:
    """As a commit of a tree moves tokens: all reads before all writes; and cleared slots hold zeros."""
    pool = KVPool(shape_of(name), num_pages=4, page_size=4, device=CPU)
    stored = {}
    for side, layers, scales in (("k", pool.k, pool.k_scales), ("v", pool.v, pool.v_scales)):
        for layer, (codes, of_codes) in enumerate(zip(layers, scales, strict=True)):
            assert of_codes is not None
            new = torch.randn(codes.shape) * torch.arange(1, len(codes) + 1)[:, None, None]
            quantized, of_codes[:] = quantize(new, codes.dtype)
            codes.copy_(quantized)
            stored[side, layer] = codes.float() * of_codes[..., None]
    pool.move(torch.tensor([9, 5, 7]), torch.tensor([5, 6, 4]))
    pool.from_layer(2).clear(torch.tensor([11]))
    places = torch.arange(20)
    places[[5, 6, 4]] = torch.tensor([9, 5, 7])
    for side, layers, scales in (("k", pool.k, pool.k_scales), ("v", pool.v, pool.v_scales)):
        for layer, (codes, of_codes) in enumerate(zip(layers, scales, strict=True)):
            want = stored[side, layer][places]
            if layer == 2:
                want[11] = 0
            assert of_codes is not None
            assert torch.equal(codes.float() * of_codes[..., None], want)


def shape_of(name: str) -> CacheShape:
    return SHAPE if name == "auto" else replace(SHAPE, kv_dtype=DTYPES[name])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.bfloat16, 1.8, 2), (torch.float32, 3.4, 4)])
def test_more_tokens_fit(page_size: int, dtype: torch.dtype, least: float, most: float) -> None:
    """A head of 128 takes 128 bytes and 4 for its scale, instead of 256 or 512; planned bytes are the pool's.

    What the factor lacks is the scales, and the tables of a token's place.
    """
    tokens = {}
    for name in ("auto", *DTYPES):
        flags: dict[str, Any] = {"kv_cache_dtype": name, "page_size": page_size, "max_running_requests": 1}
        config = EngineConfig(mamba_full_memory_ratio=1e-6, **flags)
        shape = replace(shape_of(name), dtype=dtype)
        plan = plan_memory(config, shape, 1 << 20, 100, 1, 1, 64 << 20)
        pool = KVPool(shape, 2, page_size, CPU)
        held = sum(x.nbytes for x in (*pool.k, *pool.v, *pool.k_scales, *pool.v_scales) if x is not None)
        assert held == 3 * page_size * shape.kv_bytes_per_token
        assert plan.kv_bytes == (plan.num_pages + 1) * page_size * shape.kv_bytes_per_token
        tokens[name] = plan.num_kv_tokens
        (line,) = [line for line in plan.describe_lines() if line.startswith("KV pool")]
        assert (f" in {name}," in line) == (name != "auto")
    for name in DTYPES:
        assert shape_of(name).kv_bytes_per_token == 2 * (2 * 2 * 132 + 4 * 68)
        assert least < tokens[name] / tokens["auto"] < most


@each_dtype
def test_logits_move_by_the_rounding_of_keys_and_values(name: str, prompts: list[Tokens]) -> None:
    """Of the demo, along its own text. e4m3 keeps four digits, int8 seven below a head's largest number."""
    logits = {}
    text = None
    for dtype in ("auto", name):
        with new_llm(dtype, "plain") as llm:
            text = text or llm.generate(prompts[0], greedy(80))[0].token_ids
            seen: list[Tensor] = []
            Workbench(llm.engine).logits_along(prompts[0], text, seen.append)
            logits[dtype] = torch.stack(seen)
    error = (logits[name] - logits["auto"]).square().mean().sqrt() / logits["auto"].std()
    bound = {"int8": 0.01, "fp8_e4m3": 0.05}[name]
    assert 0.01 * bound < error < bound


@each_dtype
def test_chunks_move_logits_little(name: str, prompts: list[Tokens]) -> None:
    """A last bit may decide between two codes of a number, so logits differ by more than with KV in float32."""
    with new_llm(name, "plain", disable_radix_cache=True) as llm:
        for prompt in prompts[:2]:
            runs: list[Tensor] = []
            for chunk in (1, 60):
                seen: list[Tensor] = []
                Workbench(llm.engine).logits_along(prompt[:chunk], prompt[chunk:], seen.append)
                runs.append(torch.stack(seen)[-20:])
            assert (runs[0] - runs[1]).abs().max() < (1 + (name != "int8")) * EXACT_BOUND


@each_dtype
def test_reports_say_the_type(name: str, caplog: pytest.LogCaptureFixture) -> None:
    flags: dict[str, Any] = {"kv_cache_dtype": name, "max_total_tokens": 256, "max_running_requests": 1}
    config = EngineConfig(device="cpu", **flags)
    with caplog.at_level("INFO", "specmamba"):
        engine = Engine(config)
    assert engine.describe()["kv_cache_dtype"] == name
    assert f" in {name}" in caplog.text
    info = model_info(config)
    assert info["kv_cache_dtype"] == name
    per_token = info["bytes"]["kv_per_token"] + info["bytes"]["draft_kv_per_token"]
    assert per_token * 257 == engine.memory_plan.kv_bytes == engine.describe()["kv_pool_bytes"]
    engine.close()
    assert model_info(EngineConfig(device="cpu", dtype="float32"))["kv_cache_dtype"] == "float32"


def test_what_the_flag_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="'auto', 'int8' or 'fp8_e4m3'"):
        EngineConfig(kv_cache_dtype="int4")  # type: ignore[arg-type]
    FAMILIES["mamba2"].build(tmp_path)
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8: no layer of this model keeps keys and values"):
        Engine(EngineConfig(model=str(tmp_path), kv_cache_dtype="int8", device="cpu"))


def test_padding_is_read_as_zeros() -> None:
    """A new pool holds finite numbers, whatever its scales are multiplied by."""
    for name in DTYPES:
        pool = KVPool(shape_of(name), num_pages=1, page_size=1, device=CPU)
        assert not any(as_bytes(x).any() for x in (*pool.k, *pool.v, *pool.k_scales, *pool.v_scales) if x is not None)
