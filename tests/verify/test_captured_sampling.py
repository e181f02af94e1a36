"""Captured steps on a CPU with every kind of sampling and both rules of acceptance: nothing of PyTorch in them, and the
texts of direct steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from specmamba import LLM, SamplingParams
from specmamba.cuda_graphs import NativeReplay
from specmamba.engine.captured.step_kind import Sampling, StepKind
from specmamba.sampling_params import SpeculationParams
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


def kinds_decided(tapes: Iterable[Any]) -> set[Sampling]:
    """What the decisions among these tapes sample."""
    return {key[1][0].sampling for key in tapes if isinstance(key[1], tuple) and isinstance(key[1][0], StepKind)}


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
        sampled = [kind for kind in kinds_decided(tapes) if kind.is_drawn]
        assert len(sampled) == 3  # filtered, penalized, both
        is_rejecting = drafts.startswith("drawn")
        assert {(kind.has_rejection, kind.has_target) for kind in sampled} == {(is_rejecting, not is_rejecting)}
        assert [name for tape in tapes.values() for name in tape.python_calls] == []


RULES: dict[str, dict[str, Any]] = {  # of four requests that run together
    "target": {"seed": 3, "top_k": 20},
    "rejection": {"seed": 4, "top_p": 0.95, "speculative": SpeculationParams(accept="rejection")},
    "greedy": {"temperature": 0.0},
    "asks for target": {"seed": 5, "frequency_penalty": 0.3, "speculative": SpeculationParams(accept="target")},
}
MIXED = [SamplingParams(**({"max_tokens": 24, "temperature": 0.9, "ignore_eos": True} | way)) for way in RULES.values()]
MIXED_PROMPTS = [*PROMPTS, "x = [1, 2", "for i in range(10):\n    print("]


def mixed_texts(llm: LLM) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tokens, and how many drafts were accepted, of requests of both rules that run together."""
    outputs = llm.generate(MIXED_PROMPTS, MIXED)
    return [(output.token_ids, output.spec.accepted_histogram) for output in outputs]


@pytest.mark.fast_cases("tree-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_requests_of_both_rules_run_in_one_captured_step_and_say_what_direct_steps_say(drafts: str, dtype: str) -> None:
    flags = {"dtype": dtype, **MEMORY, "max_running_requests": len(MIXED), **DRAFTS[drafts]}
    with LLM(**flags) as captured, LLM(disable_cuda_graph=True, **flags) as direct:
        got, expected = mixed_texts(captured), mixed_texts(direct)
        assert_same_sampled_texts(got, expected, lambda: mixed_texts(direct))
        graphs = captured.engine.runner.graph_runner
        assert graphs is not None
        assert isinstance(graphs.replay, NativeReplay)
        assert any(kind.has_rejection and kind.has_target for kind in kinds_decided(graphs.replay.tapes))
        assert [name for tape in graphs.replay.tapes.values() for name in tape.python_calls] == []
        accepted = [histogram for _, histogram in got]
        assert all(sum(histogram[1:]) > 0 for histogram in accepted), accepted  # there was something to get wrong


@pytest.mark.fast_cases("tree-captured")
@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "direct"])
@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_beside_requests_of_the_other_rule_a_seeded_text_is_the_one_it_is_alone(drafts: str, is_captured: bool) -> None:
    """Alone without drafts, and alone with them."""
    flags: dict[str, Any] = {"dtype": "float32", **MEMORY, "max_running_requests": len(MIXED)}
    seeded = [place for place, (name, _) in enumerate(RULES.items()) if name != "rejection"]

    def alone(llm: LLM) -> list[tuple[int, ...]]:
        return [llm.generate(MIXED_PROMPTS[place], MIXED[place])[0].token_ids for place in seeded]

    with (
        LLM(disable_cuda_graph=not is_captured, **flags, **DRAFTS[drafts]) as llm,
        LLM(disable_cuda_graph=True, speculative_algorithm="none", **flags) as plain,
    ):
        together = mixed_texts(llm)
        in_company = [together[place][0] for place in seeded]
        assert_same_sampled_texts(in_company, alone(plain), lambda: alone(plain))
        assert_same_sampled_texts(in_company, alone(llm), lambda: alone(llm))
        under_rejection = together[[*RULES].index("rejection")][0]
        params = MIXED[[*RULES].index("rejection")]
        under_target = params.model_copy(update={"speculative": SpeculationParams(accept="target")})
        other = llm.generate(MIXED_PROMPTS[1], under_target)[0].token_ids
        assert under_rejection != other  # the rule of that request was its own
