"""Texts of the demo and the acceptance of its drafts are those that were recorded (``demo_texts.json``).

They were recorded on a CPU in float32, eight prompts with seeds 0 to 7. A change that is meant to keep behaviour keeps
them; one that is meant to change drafts records new figures. Elsewhere texts may part at near ties.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specmamba import LLM, RequestOutput, SamplingParams
from tests.drafts import DRAFTS
from tests.exactness import assert_same_greedy_texts, assert_same_sampled_texts
from tests.pairwise import pairwise

RECORDED = json.loads(Path(__file__).with_name("demo_texts.json").read_text("utf8"))
PROMPTS = [
    "import os\n\ndef read_file(path):\n    ",
    "class Stack:\n    def __init__(self):\n        ",
    "def main():",
    "import json\n",
    "for i in range(10):\n    ",
    "class A(B):\n",
    "def test_",
    "try:\n    import",
]


def new_llm(drafts: str, state: str = "records") -> LLM:
    return LLM(dtype="float32", max_total_tokens=8192, **DRAFTS[drafts] | {"speculative_state": state})


def answer(llm: LLM, temperature: float) -> list[RequestOutput]:
    params = [SamplingParams(max_tokens=64, temperature=temperature, seed=seed) for seed in range(len(PROMPTS))]
    return llm.generate(PROMPTS, params)


def figures(output: RequestOutput) -> list[Any]:
    spec = output.spec
    return [spec.num_verify_steps, spec.num_draft_tokens, list(spec.accepted_histogram)]


@pairwise(
    pytest.mark.parametrize("drafts", DRAFTS),
    pytest.mark.parametrize("state", ["records", "snapshots"]),
    pytest.mark.parametrize("temperature", [0.0, 0.8]),
)
def test_texts_and_acceptance_are_the_recorded_ones(drafts: str, state: str, temperature: float) -> None:
    recorded = RECORDED[str(temperature)]
    expected = [tuple(tokens) for tokens in recorded["token_ids"]]
    with new_llm(drafts, state) as llm:
        outputs = answer(llm, temperature)
        got = [output.token_ids for output in outputs]
        if temperature:
            assert_same_sampled_texts(expected, got, lambda: [output.token_ids for output in answer(llm, temperature)])
    if not temperature:
        assert_same_greedy_texts(got, expected, PROMPTS, lambda: new_llm("plain"))
    for output, text, of_text in zip(outputs, expected, recorded["figures"][drafts], strict=True):
        if output.token_ids == text:
            assert figures(output) == of_text
