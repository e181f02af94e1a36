"""Every family against transformers, in float32: logits of extend and verify, and greedy text.

Generic over ``tests.families``: what is special about a family is in its variants.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specmamba.engine.engine import Engine
from specmamba.engine.workbench import Workbench
from specmamba.sampling_params import SamplingParams
from tests.families import FAMILIES
from tests.models.test_model_exact import (
    accept_at_random,
    assert_close,
    check_extends,
    check_rounds,
    new_engine,
    random_chain,
    random_prompts,
    random_tree,
    run,
    with_probe,
)

CASES = [(family, variant) for family, module in FAMILIES.items() for variant in module.VARIANTS]
NUM_TOKENS = 64 if os.environ.get("SPECMAMBA_TEST_FULL") == "1" else 40
CHUNK = 16
NEAR_TIE = 1e-4  # in logits, where rounding may decide between two tokens


@dataclass(frozen=True)
class Case:
    """A checkpoint, and the same model in transformers."""

    folder: Path
    reference: nn.Module

    def engine(self, **flags: Any) -> Engine:
        return new_engine(self.folder, 0, **{"speculative_algorithm": "none", "speculative_num_steps": None} | flags)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """[T, V] of a whole text at once.

        Never through transformers' cache: there a single new token's time step is not clamped to ``time_step_limit``,
        though in a whole text it is.
        """
        logits: Tensor = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, variant = request.param
    folder = tmp_path_factory.mktemp(family)
    return Case(folder, FAMILIES[family].build(folder, variant))


@pytest.mark.fast_cases("default")
@pytest.mark.parametrize("chunk_size", [CHUNK, 512])
def test_known_tokens(case: Case, chunk_size: int) -> None:
    """All tokens but the last are extended, and the last one is verified alone; with several chunk sizes."""
    lengths = (1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 64, 65, 66, 150)
    engine = case.engine(chunked_prefill_size=chunk_size)
    probe = with_probe(engine, 1, random_chain(torch.Generator().manual_seed(0)))
    texts = run(engine, random_prompts(lengths, seed=1), [1] * len(lengths))
    extended = [sum(len(logits) for _, logits in runs) for runs in probe.record.extended.values()]
    assert sorted(extended) == [length - 1 for length in lengths[1:]]
    assert bool(max(len(runs) for runs in probe.record.extended.values()) > 1) == (chunk_size == CHUNK)
    check_extends(probe.record, texts, case.reference)
    assert len(probe.record.rounds) == len(lengths)
    check_rounds(probe.record, case.reference)


@pytest.mark.fast_cases("default")
def test_trees(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of trees with many branches, accepted to any depth, with every number of pending records and folds."""
    generator = torch.Generator().manual_seed(5)
    accept_at_random(monkeypatch, generator)
    engine = case.engine(chunked_prefill_size=11, speculative_algorithm="ngram", speculative_num_draft_tokens=6)
    probe = with_probe(engine, 6, random_tree(generator))
    run(engine, random_prompts((19, 1, 42), seed=3), [18, 30, 24])
    check_rounds(probe.record, case.reference)
    rounds = [r for of_request in probe.record.rounds.values() for r in of_request]
    assert any(r.path != tuple(range(len(r.path))) for r in rounds), "no accepted path had to be moved"
    assert {r.num_accepted for r in rounds} >= {0, 1, 2, 3}


@pytest.mark.fast_cases("default")
def test_step_by_step(case: Case) -> None:
    """Plain decoding along a given text."""
    prompt, tokens = random_prompts((7, NUM_TOKENS), seed=2)
    seen: list[Tensor] = []
    Workbench(case.engine()).logits_along(prompt, tokens, seen.append)
    assert_close(torch.stack(seen), case.logits(prompt + tokens)[len(prompt) - 1 : -1])


@pytest.mark.fast_cases("default")
def test_greedy_text(case: Case) -> None:
    """In a batch, alone, and in a batch with cached prompts: the greedy text by transformers' logits."""
    prompts = random_prompts((5, 1, 70), seed=4)
    engine = case.engine(chunked_prefill_size=CHUNK)
    together, _ = greedy(engine, prompts)
    engine.flush_cache()
    alone = [greedy(engine, [prompt])[0][0] for prompt in prompts]
    again, num_cached = greedy(engine, prompts)
    assert num_cached == [len(prompt) - 1 for prompt in prompts]
    for texts in [together] + [others for others in (alone, again) if others != together]:
        for prompt, text in zip(prompts, texts, strict=True):
            # a text whose every token is the likeliest one behind the text before it is the greedy text
            logits = case.logits(prompt + text)[len(prompt) - 1 : -1]
            assert (logits.amax(-1) - logits[range(len(text)), text]).max() < NEAR_TIE
            assert len(set(text)) >= 8, "the texts of this checkpoint say little: change its weights"


def greedy(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The answers to prompts, and how many tokens of each prompt were cached."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    texts: list[list[int]] = [[] for _ in prompts]
    num_cached = [0] * len(prompts)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests:
        for delta in engine.step():
            texts[int(delta.request_id)] += delta.token_ids
            num_cached[int(delta.request_id)] = delta.num_cached_tokens
    return texts, num_cached
