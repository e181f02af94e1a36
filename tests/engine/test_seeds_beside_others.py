"""Texts of seeds in float32, alone and beside other requests: they part only where a drawn number is at a boundary.

PyTorch's products in float32 add up in an order that depends on the number of rows, so the last bits of logits depend
on what runs beside a request. A token is drawn by comparing a random number with cumulative probabilities. Where the
number is as near to one of them as rounding moves it, the token on the other side is chosen, however unlikely the two
tokens are. Native code computes each row by itself: nothing differs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba import LLM, SamplingParams
from specmamba.core import RequestOutput, TokenLogprob
from specmamba.kernels import sampling
from specmamba.kernels.replay import is_available
from tests.pairwise import IS_FULL

pytestmark = pytest.mark.slow

NUM_SEEDS, BATCH, NUM_TOKENS, TEMPERATURE = 120 if IS_FULL else 80, 8, 48, 0.9
MOST_PARTED = NUM_SEEDS // 20
CLOSE = 4e-5  # measured: 1.6e-5. The last bit of a log probability of -16 is 1.9e-6
PROMPTS = (
    *("import os\n", "class A:\n", "def f(x):\n    return", "x = 1\n", "def main():\n", "for i in range("),
    *("    if x is None:\n        raise ValueError(", "# A note\n"),
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # Without the prefix cache: prompts are computed anew each time, in one batch with those of the others.
    limits: dict[str, Any] = {"max_running_requests": BATCH, "context_length": 256, "num_threads": 1}
    with LLM(dtype="float32", disable_radix_cache=True, **limits) as llm:
        yield llm


def texts(llm: LLM, seeds: list[int]) -> list[RequestOutput]:
    """The texts of some seeds, in one batch."""
    shared: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": TEMPERATURE, "ignore_eos": True, "logprobs": 20}
    params = [SamplingParams(seed=seed, **shared) for seed in seeds]
    return llm.generate([prompt_of(seed) for seed in seeds], params)


def prompt_of(seed: int) -> str:
    return PROMPTS[seed % len(PROMPTS)]


def largest_difference(a: TokenLogprob, b: TokenLogprob) -> float:
    """Between two listings of one place: of the chosen token, and of all that are listed in both."""
    listed = dict(a.top)
    return max(abs(a.logprob - b.logprob), *(abs(listed[token] - value) for token, value in b.top if token in listed))


def check_first_difference(plain: LLM, seed: int, place: int, alone: RequestOutput, beside: RequestOutput) -> None:
    """Check that both tokens at ``place`` are right but for rounding.

    Plain decoding gives the log probabilities there once more. Those of each token are the same in the run that chose
    it; and the random number is, but for rounding, in the intervals of both.
    """
    seen: list[Tensor] = []
    prefix = list(alone.token_ids[: place + 1])
    plain.workbench.logits_along(alone.prompt_token_ids, prefix, seen.append)
    logprobs = seen[place].double().log_softmax(-1)
    for output in (alone, beside):
        assert output.logprobs[place].logprob == pytest.approx(logprobs[output.token_ids[place]].item(), abs=CLOSE)
    bounds = (seen[place].double() / TEMPERATURE).softmax(-1).cumsum(-1)
    position = torch.tensor([[len(alone.prompt_token_ids) + place]])
    drawn = sampling.uniform(torch.tensor([seed]), position, sampling.CHOICE_STREAM).item()
    for token in (alone.token_ids[place], beside.token_ids[place]):
        below = bounds[token - 1].item() if token else 0.0
        assert below - CLOSE <= drawn <= bounds[token].item() + CLOSE


def test_seeds_beside_others(llm: LLM) -> None:
    alone = [texts(llm, [seed])[0] for seed in range(NUM_SEEDS)]
    order = random.Random(1).sample(range(NUM_SEEDS), NUM_SEEDS)
    batches = [order[start : start + BATCH] for start in range(0, NUM_SEEDS, BATCH)]
    beside = dict(zip(order, (output for batch in batches for output in texts(llm, batch)), strict=True))
    parted: dict[int, int] = {}
    differences: list[float] = []
    for seed, own in enumerate(alone):
        other = beside[seed]
        same = [a == b for a, b in zip(own.token_ids, other.token_ids, strict=True)]
        place = same.index(False) if False in same else NUM_TOKENS
        differences += map(largest_difference, own.logprobs[:place], other.logprobs[:place])
        if place < NUM_TOKENS:
            parted[seed] = place
    print(f"{len(parted)} of {NUM_SEEDS} texts part: {parted}; largest difference {max(differences):.1e}")
    assert max(differences) <= CLOSE
    assert (max(differences) == 0) == is_available()
    assert len(parted) <= MOST_PARTED
    again = [*texts(llm, batches[0]), *texts(llm, [0])]  # in the same company the same bits
    expected = [*(beside[seed] for seed in batches[0]), alone[0]]
    assert [(o.token_ids, o.logprobs) for o in again] == [(o.token_ids, o.logprobs) for o in expected]
    llm.workbench.use_drafts(speculative_algorithm="none")
    for seed, place in parted.items():
        check_first_difference(llm, seed, place, alone[seed], beside[seed])
