"""Drafts whose size is decided in each step, on several ranks: rank 0 decides, here at random, and others follow."""

from __future__ import annotations

from typing import Any

import pytest

from specmamba import LLM, SamplingParams
from specmamba.core import RequestOutput
from specmamba.sampling_params import GrammarSpec
from tests.decisions import decide_at_random, without_measurement

pytestmark = pytest.mark.usefixtures("forked_processes")

PROMPTS = ["def main():\n    ", "import os\n", "class A:\n  def __init__(self):", "for i"]
NUM_TOKENS = 30
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_running_requests": 6,
    "context_length": 256,
    "max_total_tokens": 1024,
    "max_mamba_cache_size": 24,
}
WIDE = {"speculative_num_steps": 4, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 15}
WAYS: dict[str, dict[str, Any]] = {
    "captured": WIDE,
    "direct": {"disable_cuda_graph": True, **WIDE},
    "chains": {},
    "n-grams": {"speculative_algorithm": "ngram"},
    "suffix": {"speculative_algorithm": "suffix"},
}


def params(**changes: Any) -> list[SamplingParams]:
    usual: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **changes}
    return [SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, **usual) for i in range(len(PROMPTS))]


def run(asked: list[SamplingParams], **flags: Any) -> list[RequestOutput]:
    with LLM(**SMALL | {"tp_size": 2, "speculative_adaptive": "auto"} | flags) as llm:
        if llm.engine.runner.sizer is not None:
            decide_at_random(llm, seed=3)
        return llm.generate(PROMPTS, asked)


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    without_measurement(monkeypatch)


@pytest.mark.fast_cases("captured")
@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_of_one_process_without_drafts(way: str) -> None:
    plain = run(params(), tp_size=1, speculative_algorithm="none")
    outputs = run(params(), **WAYS[way])
    assert [out.text for out in outputs] == [out.text for out in plain]
    assert sum(out.spec.num_accepted_tokens for out in outputs) > 5  # there was something to get wrong


@pytest.mark.slow
@pytest.mark.parametrize("way", ["captured", "direct"])
def test_grammars_and_predictions_that_ranks_know_of_differently(way: str) -> None:
    """Only rank 0 has grammars, so trees that it prunes are of other sizes; all have the texts that are predicted."""
    grammar = GrammarSpec(kind="regex", text="[a-c]{4,9}x")
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
    plain = run([SamplingParams(**greedy)] * 4, tp_size=1, speculative_algorithm="none")
    asked = [
        SamplingParams(**greedy, prediction=plain[0].text),
        SamplingParams(**greedy, grammar=grammar),
        SamplingParams(**greedy),
        SamplingParams(**greedy, prediction=plain[3].text),
    ]
    masked = run([SamplingParams(**greedy, grammar=grammar)] * 4, tp_size=1, speculative_algorithm="none")
    outputs = run(asked, **WAYS[way])
    assert [outputs[i].text for i in (0, 2, 3)] == [plain[i].text for i in (0, 2, 3)]
    assert outputs[1].text == masked[1].text


@pytest.mark.slow
def test_rank_0_times_the_steps_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """At the start, by requests that all ranks run; the times are kept, and serve the next start."""
    monkeypatch.undo()
    costs = tmp_path / "costs.json"
    for _ in range(2):
        with LLM(**SMALL, tp_size=2, speculative_adaptive="auto", speculative_costs=costs) as llm:
            written = costs.read_bytes()
            (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
            assert len(output.token_ids) == 60
            sizing = llm.engine.stats().sizing
            assert sizing is not None
            assert sizing.num_steps > 0
    assert b'"ranks": "2"' in written
