"""Greedy text in fp32 is the plain text, token for token: every kind of draft, both state backends, both page sizes,
alone and in batches, preempted and not. SPECMAMBA_TEST_FULL asks for longer texts, and for all of it on the demo too.

An engine is started once for its largest draft and then drafts in every way, so weights are loaded once for all of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specmamba import LLM, SamplingParams
from specmamba.config import DEMO_MODEL
from specmamba.core import RequestOutput
from specmamba.models.text.tokenizer import Tokenizer
from tests.exactness import assert_same_greedy_texts, assert_same_sampled_texts
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("no_headroom")

IS_FULL = bool(os.environ.get("SPECMAMBA_TEST_FULL"))
NUM_TOKENS = 120 if IS_FULL else 20
ALONE = slice(None) if IS_FULL else slice(2, None, 4)  # the shortest and the longest prompt
LARGEST: dict[str, Any] = {
    "speculative_algorithm": "mtp",
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 8,
    "speculative_num_draft_tokens": 32,
}
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"speculative_algorithm": "mtp", "speculative_num_steps": 3},
    "tree 4/4/8": {
        "speculative_algorithm": "mtp",
        "speculative_num_steps": 4,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    },
    "tree 5/8/32": LARGEST,
    "ngram": {"speculative_algorithm": "ngram"},
    "suffix": {"speculative_algorithm": "suffix"},
    "file": {"speculative_algorithm": "mtp"},
    "rejection": LARGEST | {"speculative_accept": "rejection", "speculative_num_draft_tokens": 16},
}
# by batch size: a bushy tree with gaps in its ranks, nothing at all, a chain
TREES = {
    "trees": [
        {"max_batch_size": 1, "parents": [-1, 0, 0, 0, 1, 1, 2, 4, 7], "ranks": [0, 0, 1, 3, 0, 2, 0, 0, 0]},
        {"max_batch_size": 2, "parents": [-1], "ranks": [0]},
        {"max_batch_size": 4, "parents": [-1, 0, 1], "ranks": [0, 0, 0]},
        {"parents": [-1, 0, 0, 1, 2, 2], "ranks": [0, 0, 1, 0, 0, 1]},
    ]
}
LENGTHS = (8, 32, 1, 2, 17, 60, 100)  # two of them are numbers of nodes
POOLS: dict[str, dict[str, Any]] = {
    "roomy": {"max_total_tokens": 4096},
    "tight": {"max_total_tokens": 352},  # seven requests do not fit to their ends
}


# The demo is the slower of the two models: CI runs both kinds of state, of pages and of pools with it.
CASES = [
    (model, state, page_size, pool)
    for model in ("demo", "random")
    for state in ("records", "snapshots")
    for page_size in (1, 16)
    for pool in POOLS
    if IS_FULL or model == "random" or (state == "records") == (page_size == 1) == (pool == "tight")
]


@pytest.fixture(scope="module", params=["demo", "random"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "demo":
        return str(DEMO_MODEL)
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", seed=11))


@pytest.fixture(scope="module")
def prompts(model: str) -> list[list[int]]:
    if model != str(DEMO_MODEL):
        generator = torch.Generator().manual_seed(5)
        return [torch.randint(1, 131, (length,), generator=generator).tolist() for length in LENGTHS]
    tokenizer = Tokenizer(DEMO_MODEL)
    texts = [json.loads(line)["prompt"] for line in (DEMO_MODEL / "prompts.jsonl").read_text("utf8").splitlines()]
    tokens = [encoded for encoded in map(tokenizer.encode, texts) if len(encoded) >= max(LENGTHS)]
    return [tokens[i][:length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def plain(model: str, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    with new_plain(model) as llm:
        return [llm.generate([prompt], greedy())[0].token_ids for prompt in prompts]


def new_llm(model: str, **flags: Any) -> LLM:
    settings: dict[str, Any] = {"model": model, "dtype": "float32", "device": "cpu", "context_length": 256}
    return LLM(**settings | flags)


def new_plain(model: str) -> LLM:
    return new_llm(model, speculative_algorithm="none")


def greedy() -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@pytest.mark.fast_cases("random-records-16-tight", "random-snapshots-1-tight")
@pytest.mark.parametrize(("model", "state", "page_size", "pool"), CASES, indirect=["model"])
def test_greedy_text_is_the_plain_text(
    model: str,
    prompts: list[list[int]],
    plain: list[tuple[int, ...]],
    state: str,
    page_size: int,
    pool: str,
    tmp_path: Path,
) -> None:
    tree_file = tmp_path / "trees.json"
    tree_file.write_text(json.dumps(TREES))
    flags = LARGEST | POOLS[pool] | {"speculative_state": state, "page_size": page_size}

    def check(name: str, texts: list[tuple[int, ...]], part: slice) -> None:
        print(name)  # pytest shows it where a text differs
        assert_same_greedy_texts(texts, plain[part], prompts[part], lambda: new_plain(model))

    with new_llm(model, **flags, max_running_requests=7, chunked_prefill_size=64) as llm:
        for name, drafts in DRAFTS.items():
            llm.workbench.use_drafts(**drafts, **({"speculative_tree": tree_file} if name == "file" else {}))
            check(name, tokens_of(llm.generate(prompts, greedy())), slice(None))
            if pool == "roomy":
                alone = [llm.generate([prompt], greedy())[0] for prompt in prompts[ALONE]]
                check(f"{name}, one by one", tokens_of(alone), ALONE)
            stats = llm.engine.stats()
            assert (stats.kv_used_tokens, stats.state_used_slots) == (0, 0), name
        assert (llm.engine.stats().num_preemptions > 0) == (pool == "tight")


@pytest.mark.fast_cases("random")
def test_seeded_text_is_the_plain_text_under_the_target_rule(model: str, prompts: list[list[int]]) -> None:
    params = [
        SamplingParams(max_tokens=24, temperature=0.8, seed=seed, ignore_eos=True) for seed in range(len(prompts))
    ]
    with new_llm(model, **LARGEST) as llm:
        drafted = tokens_of(llm.generate(prompts, params))
        llm.workbench.use_drafts(speculative_algorithm="none")
        expected = tokens_of(llm.generate(prompts, params))
        assert_same_sampled_texts(drafted, expected, lambda: tokens_of(llm.generate(prompts, params)))
