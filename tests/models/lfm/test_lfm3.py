"""What is LFM3's alone: its windows behind cached prefixes and with keys and values in 8 bits, and its checkpoints."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specmamba import LLM, RequestOutput, SamplingParams
from specmamba.cuda_graphs import NativeReplay
from specmamba.errors import CheckpointError, UnsupportedModelError
from tests.exactness import assert_same_greedy_texts, why_not_native
from tests.families import lfm3
from tests.models.lfm.test_lfm2 import load
from tests.models.test_family_checkpoints import changed, logits_of
from tests.models.test_model_exact import assert_close
from tests.noise import add_noise

CONV, WINDOWED, ATTENTION = lfm3.CONV, lfm3.WINDOWED, lfm3.ATTENTION
NUM_TOKENS = 24
PATTERN = [7, 21, 90, 33, 64, 21, 5]
PREFIX = [*PATTERN, 11, 42, 3, *PATTERN, 100, 8, *PATTERN * 3]
PROMPTS = [PREFIX + end for end in ([], [12, 40], PATTERN[2:], [9])]
# Smaller than a drafted tree; from the cached prefix into the answer; larger than all texts.
each_window = pytest.mark.parametrize("window", [3, 30, 200])
CODES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
MEMORY: dict[str, Any] = {"context_length": 96, "max_total_tokens": 2048, "max_running_requests": 4}
TREE: dict[str, Any] = {
    "speculative_adaptive": "off",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 7,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lfm3")
    lfm3.build(folder / "lfm3", seed=3)
    return folder


@cache
def checkpoint(root: Path, window: int) -> Path:
    return changed(root / "lfm3", root / f"window-{window}", sliding_window=window)


@cache
def draft_model(root: Path, window: int) -> Path:
    """It guesses right mostly, and not always."""
    add_noise(checkpoint(root, window), root / f"draft-{window}", 0.01)
    return root / f"draft-{window}"


def new_plain(root: Path, window: int, **flags: Any) -> LLM:
    return new_llm(root, window, speculative_algorithm="none", disable_radix_cache=True, **flags)


def new_tree(root: Path, window: int, **flags: Any) -> LLM:
    return new_llm(root, window, speculative_draft_model_path=str(draft_model(root, window)), **TREE, **flags)


def new_llm(root: Path, window: int, **flags: Any) -> LLM:
    return LLM(model=str(checkpoint(root, window)), dtype="float32", **MEMORY, **flags)


def answer(llm: LLM, *prompts: list[int]) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))


@cache
def cold_texts(root: Path, window: int, kv_dtype: str = "auto") -> list[tuple[int, ...]]:
    with new_plain(root, window, kv_cache_dtype=kv_dtype) as llm:
        return [output.token_ids for output in answer(llm, *PROMPTS)]


def test_the_window_decides_the_texts(root: Path) -> None:
    """Else texts that are equal would prove little."""
    first, *others = (cold_texts(root, window) for window in (3, 30, 200))
    assert all(len(set(text)) > 4 for text in first)
    assert all(text != first for text in others)


@pytest.mark.fast_cases("-30")
@each_window
@pytest.mark.parametrize(("page_size", "chunk_size"), [(1, 1000), (16, 17)])
def test_texts_behind_cached_prefixes(root: Path, window: int, page_size: int, chunk_size: int) -> None:
    """The whole prompt again, and three that part from it: what a window sees was computed by another request."""
    flags: dict[str, Any] = {"page_size": page_size, "chunked_prefill_size": chunk_size}
    with new_tree(root, window, **flags) as llm:
        (cold,) = answer(llm, PREFIX)
        assert cold.num_cached_tokens == 0
        hits = [answer(llm, prompt)[0] for prompt in PROMPTS]
        end = len(PREFIX)  # from where texts parted the second time, there is a state at this place
        assert [output.num_cached_tokens for output in hits] == [end - 1, end - 1, end, end]
        assert sum(output.spec.num_accepted_tokens for output in hits) > 10
        check([cold], root, window)
        check(hits, root, window)


@pytest.mark.fast_cases("-30")
@each_window
@pytest.mark.parametrize("name", CODES)
def test_texts_with_keys_and_values_in_8_bits(root: Path, window: int, name: str) -> None:
    """Together, and again from cached prefixes: those of plain decoding with the same codes."""
    with new_tree(root, window, kv_cache_dtype=name) as llm:
        pool = llm.engine.pools.kv
        assert {x.dtype for x in (*pool.k, *pool.v)} == {CODES[name]}
        assert len(pool.k) == 4  # two layers of the target, two of the draft model
        for num_cached in (0, len(PREFIX) - 1):
            outputs = answer(llm, *PROMPTS)
            assert min(output.num_cached_tokens for output in outputs) >= num_cached
            assert sum(output.spec.num_accepted_tokens for output in outputs) > 10
            check(outputs, root, window, name)
        graphs = llm.engine.runner.graph_runner
        if why_not_native() is None:
            assert graphs is not None
            assert isinstance(graphs.replay, NativeReplay)
            assert graphs.replay.tapes
            assert not [call for tape in graphs.replay.tapes.values() for call in tape.python_calls]


@pytest.mark.fast_cases("-30")
@each_window
@pytest.mark.parametrize(("name", "bound"), [("int8", 0.01), ("fp8_e4m3", 0.05)])
def test_logits_move_by_the_rounding_of_keys_and_values(root: Path, window: int, name: str, bound: float) -> None:
    logits = {}
    for kv_dtype in ("auto", name):
        seen: list[Tensor] = []
        with new_plain(root, window, kv_cache_dtype=kv_dtype) as llm:
            llm.workbench.logits_along(PREFIX, cold_texts(root, window)[0], seen.append)
        logits[kv_dtype] = torch.stack(seen)
    error = (logits[name] - logits["auto"]).square().mean().sqrt() / logits["auto"].std()
    assert 0.01 * bound < error < bound


def check(outputs: list[RequestOutput], root: Path, window: int, kv_dtype: str = "auto") -> None:
    """Fail unless the answers to the first prompts are those of plain decoding without cache."""
    got, want = [output.token_ids for output in outputs], cold_texts(root, window, kv_dtype)[: len(outputs)]
    prompts = [output.prompt_token_ids for output in outputs]
    assert_same_greedy_texts(got, want, prompts, lambda: new_plain(root, window, kv_cache_dtype=kv_dtype))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sliding_window": None}, "sliding_window should be a number of tokens, but is None"),
        ({"sliding_window": 0}, "sliding_window should be a number of tokens, but is 0"),
        ({"layer_types": [CONV, "chunked_attention", CONV, CONV]}, "conv or sliding_attention or full_attention"),
    ],
)
def test_variants_that_are_not_computed(changes: dict[str, Any], sentence: str, root: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=sentence):
        load(changed(root / "lfm3", tmp_path / "changed", **changes))


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, "rope_parameters have none for layers of full_attention"),
        (
            {
                ATTENTION: {"rope_type": "default", "rope_theta": -1.0},
                WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
            },
            r"rope_parameters.full_attention.rope_theta is -1.0",
        ),
    ],
)
def test_ropes_that_make_no_model(parameters: dict[str, Any], sentence: str, root: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        load(changed(root / "lfm3", tmp_path / "changed", rope_parameters=parameters))


def test_names_of_the_gates(root: Path, tmp_path: Path) -> None:
    """As transformers names the layer, in place of the published name."""
    folder = changed(root / "lfm3", tmp_path / "named")
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("self_attn.gate_proj", "self_attn.g_proj"): x for name, x in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    assert_close(logits_of(folder), logits_of(root / "lfm3"))
