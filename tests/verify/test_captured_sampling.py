"""Captured steps on a CPU with every kind of sampling: nothing of PyTorch in them, and the texts of direct steps."""

from __future__ import annotations

from typing import Any

import pytest

from specmamba import LLM, SamplingParams
from specmamba.cuda_graphs import NativeReplay
from tests.exactness import assert_same_sampled_texts

pytestmark = pytest.mark.usefixtures("needs_native")

MEMORY: dict[str, Any] = {"context_length": 160, "max_total_tokens": 1024, "max_running_requests": 2}
TREE: dict[str, Any] = {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 7}
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"speculative_num_steps": 3},
    "tree": TREE,
    "drawn chain": {"speculative_num_steps": 3, "speculative_accept": "rejection"},
    "drawn tree": TREE | {"speculative_accept": "rejection"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 20},
    "top-p and min-p": {"top_p": 0.95, "min_p": 0.05},
    "penalties": {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "all": {"top_k": 20, "top_p": 0.95, "min_p": 0.05, "frequency_penalty": 0.3},
}
PROMPTS = ["def main():", "import os\n\n"]


def texts(llm: LLM, settings: str, size: int) -> list[tuple[int, ...]]:
    """Of a drawn request, and of a greedy one beside it."""
    params = [SamplingParams(max_tokens=8, temperature=t, seed=3, **SETTINGS[settings]) for t in (0.8, 0.0)]
    return [output.token_ids for output in llm.generate(PROMPTS[:size], params[:size])]


@pytest.mark.fast_cases("chain-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_is_native_throughout_and_says_the_same(drafts: str, dtype: str) -> None:
    flags = {"dtype": dtype, **MEMORY, **DRAFTS[drafts]}
    with LLM(**flags) as captured, LLM(disable_cuda_graph=True, **flags) as direct:
        graphs = captured.engine.runner.graph_runner
        assert graphs is not None
        assert isinstance(graphs.replay, NativeReplay)
        for settings in SETTINGS:
            got, expected = texts(captured, settings, 2), texts(direct, settings, 2)

            def again(settings: str = settings) -> list[tuple[int, ...]]:
                return texts(direct, settings, 2)

            assert_same_sampled_texts(got, expected, again)
        tapes = graphs.replay.tapes
        kinds = {key[0].sampling for key in tapes if isinstance(key, tuple)}
        assert len([kind for kind in kinds if kind.is_drawn]) == len(SETTINGS)
        assert [name for tape in tapes.values() for name in tape.python_calls] == []
