"""Greedy tokens against transformers' ``generate``, in float32: the same token for token, however they are computed.

transformers answers all prompts once, in one batch padded on the left; for some of them it is asked alone too. What
chunks do to a prompt is over once the prompt has been run, and it is the same for any number of draft steps; so
requests in chunks go on for a few tokens only; prompts alone, and chunks, are tried without drafts and with three: half
of the prompts alone with the one, half with the other; half of them in chunks, and each size of chunks in a batch with
the one, alone with the other. One page size per algorithm meets preemption, and not every algorithm does.
``SPECMAMBA_TEST_FULL=1`` takes none of these short cuts, and texts of 128 tokens instead of 48, in 12 minutes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM

from specmamba import LLM, SamplingParams
from specmamba.config import DEMO_MODEL
from specmamba.core import RequestOutput
from specmamba.engine.request import Request
from specmamba.models.text.tokenizer import Tokenizer
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("no_headroom")

IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
NUM_TOKENS = 128 if IS_FULL else 48
NUM_TOKENS_OF_SHORT = 64 if IS_FULL else 32
NUM_TOKENS_OF_RANDOM = 128 if IS_FULL else 80
NUM_TOKENS_BEHIND_CHUNKS = NUM_TOKENS if IS_FULL else 16
NEAR_TIE = 1e-4

ALGORITHMS: dict[str, dict[str, Any]] = {"plain": {"speculative_algorithm": "none"}} | {
    f"mtp-{steps}": {"speculative_algorithm": "mtp", "speculative_num_steps": steps} for steps in (1, 2, 3, 5)
}
SHORT_LENGTHS = (1, 2, 3, 4, 6)  # 1, 2, and num_steps + 1 for each of the above

SOME_ALGORITHMS = tuple(ALGORITHMS) if IS_FULL else ("plain", "mtp-3")
IN_CHUNKS = [(algorithm, size) for algorithm in SOME_ALGORITHMS for size in (7, 64)]
ALONE_IN_CHUNKS = IN_CHUNKS if IS_FULL else [("plain", 64), ("mtp-3", 7)]
BATCHES_OF_8 = [(algorithm, 512) for algorithm in ALGORITHMS]
BATCHES_OF_8 += IN_CHUNKS if IS_FULL else [("plain", 7), ("mtp-3", 64)]
SHORT = [
    (algorithm, flags)
    for algorithm in ALGORITHMS
    for flags in ({}, {"page_size": 16}, {"chunked_prefill_size": 1})
    if not flags or algorithm in SOME_ALGORITHMS
]
PREEMPTED = [
    (algorithm, page_size)
    for i, algorithm in enumerate(ALGORITHMS if IS_FULL else ("plain", "mtp-3", "mtp-5"))
    for page_size in ((1, 16) if IS_FULL else (16,) if i % 2 else (1,))
]

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)

Tokens = tuple[int, ...]


class Oracle:
    """transformers' model and the tokens it generates."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Tokens]:
        """Greedy tokens behind each prompt, all prompts in one batch."""
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        tokens = self.model.generate(
            torch.tensor([[0] * count + list(prompt) for count, prompt in zip(padding, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * count + [1] * (longest - count) for count in padding]),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [tuple(row) for row in tokens[:, longest:].tolist()]

    @torch.no_grad()
    def margin(self, prefix: Sequence[int], token: int) -> float:
        """How much likelier the likeliest token is than this one, in logits."""
        logits = self.model(torch.tensor([prefix]), use_cache=False).logits[0, -1]
        return float(logits.max() - logits[token])

    def check(self, outputs: Sequence[RequestOutput], expected: Sequence[Tokens]) -> None:
        """Fail unless all tokens are the same; one text may part where rounding decides between two tokens."""
        num_near_ties = 0
        for i, (output, tokens) in enumerate(zip(outputs, expected, strict=True)):
            if output.token_ids == tokens[: len(output.token_ids)]:
                continue
            at = next(t for t, (a, b) in enumerate(zip(output.token_ids, tokens, strict=False)) if a != b)
            prefix = [*output.prompt_token_ids, *tokens[:at]]
            margin = max(self.margin(prefix, token) for token in (output.token_ids[at], tokens[at]))
            num_near_ties += margin < NEAR_TIE
            if margin >= NEAR_TIE or num_near_ties > 1:
                pytest.fail(
                    f"prompt {i} ({len(output.prompt_token_ids)} tokens): token {at} is {output.token_ids[at]}, "
                    f"transformers has {tokens[at]} by a margin of {margin:.2e}"
                )


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(DEMO_MODEL)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Every bundled prompt."""
    tokenizer = Tokenizer(DEMO_MODEL)
    lines = (DEMO_MODEL / "prompts.jsonl").read_text("utf8").splitlines()
    return [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]


@pytest.fixture(scope="module")
def expected(oracle: Oracle, prompts: list[list[int]]) -> list[Tokens]:
    if IS_FULL:
        return [oracle.generate([prompt], NUM_TOKENS)[0] for prompt in prompts]
    return oracle.generate(prompts, NUM_TOKENS)


@pytest.fixture(scope="module")
def short_prompts(prompts: list[list[int]]) -> list[list[int]]:
    return [prompt[:length] for prompt in (prompts[0], prompts[7], prompts[20]) for length in SHORT_LENGTHS]


@pytest.fixture(scope="module")
def expected_of_short(oracle: Oracle, short_prompts: list[list[int]]) -> list[Tokens]:
    return oracle.generate(short_prompts, NUM_TOKENS_OF_SHORT)


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of output tokens that requests had when they were preempted."""
    from specmamba.engine.scheduler import Scheduler

    counts: list[int] = []
    real = Scheduler.preempt

    def preempt(scheduler: Scheduler, request: Request) -> None:
        counts.append(len(request.output))
        real(scheduler, request)

    monkeypatch.setattr(Scheduler, "preempt", preempt)
    return counts


def new_llm(algorithm: str, **flags: Any) -> LLM:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "context_length": 512}
    return LLM(**settings | ALGORITHMS[algorithm] | flags)


def greedy(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def check_lengths(outputs: Sequence[RequestOutput], num_tokens: int = NUM_TOKENS) -> None:
    assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [(num_tokens, "length")] * len(
        outputs
    )


@pytest.mark.slow
def test_the_oracle_does_not_mind_padding(oracle: Oracle, prompts: list[list[int]], expected: list[Tokens]) -> None:
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for i in (order[0], order[len(order) // 2], order[-1])[: 3 if IS_FULL else 2]:  # the last one has none
        assert oracle.generate([prompts[i]], NUM_TOKENS)[0] == expected[i]


class TestEveryPrompt:
    @pytest.mark.fast_cases("mtp-3")
    @pytest.mark.parametrize("algorithm", SOME_ALGORITHMS)
    def test_alone(self, algorithm: str, oracle: Oracle, prompts: list[list[int]], expected: list[Tokens]) -> None:
        chosen = range(len(prompts)) if IS_FULL else range(SOME_ALGORITHMS.index(algorithm), len(prompts), 2)
        with new_llm(algorithm, max_running_requests=1) as llm:
            outputs = llm.generate([prompts[i] for i in chosen], greedy())
        check_lengths(outputs)
        oracle.check(outputs, [expected[i] for i in chosen])

    @pytest.mark.fast_cases("plain")
    @pytest.mark.parametrize(("algorithm", "chunk_size"), ALONE_IN_CHUNKS)
    def test_alone_in_chunks(
        self, algorithm: str, chunk_size: int, oracle: Oracle, prompts: list[list[int]], expected: list[Tokens]
    ) -> None:
        # a prompt that one chunk can hold (all but its last token) is run as it is without a limit
        chosen = [i for i, prompt in enumerate(prompts) if len(prompt) - 1 > chunk_size]
        assert len(chosen) >= 10
        chosen = chosen if IS_FULL else chosen[::2]
        with new_llm(algorithm, max_running_requests=1, chunked_prefill_size=chunk_size) as llm:
            outputs = llm.generate([prompts[i] for i in chosen], greedy(NUM_TOKENS_BEHIND_CHUNKS))
        check_lengths(outputs, NUM_TOKENS_BEHIND_CHUNKS)
        oracle.check(outputs, [expected[i] for i in chosen])

    @pytest.mark.fast_cases("mtp-3-64")
    @pytest.mark.parametrize(("algorithm", "chunk_size"), BATCHES_OF_8)
    def test_in_a_batch_of_8(
        self, algorithm: str, chunk_size: int, oracle: Oracle, prompts: list[list[int]], expected: list[Tokens]
    ) -> None:
        num_tokens = NUM_TOKENS if chunk_size == 512 else NUM_TOKENS_BEHIND_CHUNKS
        chosen = slice(None, None, 1 if IS_FULL or chunk_size == 512 else 2)
        with new_llm(algorithm, max_running_requests=8, chunked_prefill_size=chunk_size) as llm:
            outputs = llm.generate(prompts[chosen], greedy(num_tokens))
            stats = llm.engine.stats()
        check_lengths(outputs, num_tokens)
        oracle.check(outputs, expected[chosen])
        assert (stats.num_running, stats.kv_used_tokens, stats.state_used_slots) == (0, 0, 0)
        assert stats.num_preemptions == 0

    @pytest.mark.slow
    @pytest.mark.parametrize(("algorithm", "page_size"), PREEMPTED)
    def test_preempted(
        self,
        algorithm: str,
        page_size: int,
        oracle: Oracle,
        prompts: list[list[int]],
        expected: list[Tokens],
        preempted: list[int],
    ) -> None:
        with new_llm(
            algorithm, max_running_requests=8, max_total_tokens=640, page_size=page_size, chunked_prefill_size=64
        ) as llm:
            outputs = llm.generate(prompts, greedy())
            stats = llm.engine.stats()
        assert stats.num_preemptions == len(preempted) > 0
        assert any(0 < count < NUM_TOKENS for count in preempted), "no request was preempted in its middle"
        check_lengths(outputs)
        oracle.check(outputs, expected)
        assert (stats.kv_used_tokens, stats.state_used_slots) == (0, 0)


class TestShortPrompts:
    @pytest.mark.fast_cases("mtp-3-{}", "plain-{'page_size': 16}")
    @pytest.mark.parametrize(("algorithm", "flags"), SHORT, ids=str)
    def test_in_a_batch(
        self,
        algorithm: str,
        flags: dict[str, int],
        oracle: Oracle,
        short_prompts: list[list[int]],
        expected_of_short: list[Tokens],
    ) -> None:
        with new_llm(algorithm, max_running_requests=8, **flags) as llm:
            outputs = llm.generate(short_prompts, greedy(NUM_TOKENS_OF_SHORT))
        check_lengths(outputs, NUM_TOKENS_OF_SHORT)
        oracle.check(outputs, expected_of_short)

    @pytest.mark.fast_cases("mtp-3")
    @each_algorithm
    def test_alone(
        self, algorithm: str, oracle: Oracle, short_prompts: list[list[int]], expected_of_short: list[Tokens]
    ) -> None:
        with new_llm(algorithm, max_running_requests=1) as llm:
            outputs = llm.generate(short_prompts[: len(SHORT_LENGTHS)], greedy(NUM_TOKENS_OF_SHORT))
        check_lengths(outputs, NUM_TOKENS_OF_SHORT)
        oracle.check(outputs, expected_of_short[: len(SHORT_LENGTHS)])


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("random") / "model", seed=3)


@pytest.fixture(scope="module")
def random_oracle(random_folder: Path) -> Oracle:
    return Oracle(random_folder)


@pytest.fixture(scope="module")
def random_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(1, 131, (length,), generator=generator).tolist() for length in (1, 2, 4, 30, 75)]


@pytest.fixture(scope="module")
def random_expected(random_oracle: Oracle, random_prompts: list[list[int]]) -> list[Tokens]:
    return [random_oracle.generate([prompt], NUM_TOKENS_OF_RANDOM)[0] for prompt in random_prompts]


class TestRandomModel:
    """Its drafts are almost never right, so that nearly every step throws all of them away."""

    @pytest.mark.fast_cases("mtp-3")
    @pytest.mark.parametrize(
        "flags",
        [
            {"max_running_requests": 1},
            {"max_running_requests": 8, "chunked_prefill_size": 7},
            {"max_running_requests": 3, "max_total_tokens": 256, "page_size": 16, "context_length": 208},
        ],
        ids=["alone", "batch", "tight"],
    )
    @each_algorithm
    def test_same_tokens(
        self,
        algorithm: str,
        flags: dict[str, int],
        random_folder: Path,
        random_oracle: Oracle,
        random_prompts: list[list[int]],
        random_expected: list[Tokens],
    ) -> None:
        with new_llm(algorithm, model=str(random_folder), **flags) as llm:
            outputs = llm.generate(random_prompts, greedy(NUM_TOKENS_OF_RANDOM))
            stats = llm.engine.stats()
        check_lengths(outputs, NUM_TOKENS_OF_RANDOM)
        random_oracle.check(outputs, random_expected)
        assert (stats.num_preemptions > 0) == ("max_total_tokens" in flags)
        assert stats.spec.accept_length < 1.2
