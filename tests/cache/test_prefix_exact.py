"""Greedy text with the prefix cache is the text without it, in float32, token for token.

Every way a prefix can come and go: cold, repeated, branching, several turns, evicted and computed again, preempted and
resumed; with both strategies, every kind of draft, pages of 1 and 16 tokens, chunks of 16, 64 and 1,000. What is cached
is stated too, so that no case passes by computing everything. ``SPECMAMBA_TEST_FULL=1`` runs all combinations, CI a
quarter of them, in which every pair of settings meets.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from specmamba import LLM, SamplingParams
from specmamba.core import RequestOutput
from specmamba.engine.runner import Runner
from tests.drafts import DRAFTS
from tests.exactness import assert_same_greedy_texts

IS_FULL = os.environ.get("SPECMAMBA_TEST_FULL") == "1"
NUM_TOKENS = 64 if IS_FULL else 16
TRACK_INTERVAL = 5

STRATEGIES, PAGES, CHUNKS = ("no_buffer", "extra_buffer"), (1, 16), (16, 64, 1000)
ALL = list(itertools.product(STRATEGIES, DRAFTS, PAGES, CHUNKS))
# every pair of settings is in one of these
SOME = [
    (STRATEGIES[(i + j) % 2], drafts, PAGES[(i // 2 + j) % 2], chunk_size)
    for (i, drafts), (j, chunk_size) in itertools.product(enumerate(DRAFTS), enumerate(CHUNKS))
]
CASES = ALL if IS_FULL else SOME

each_case = pytest.mark.parametrize(("strategy", "drafts", "page_size", "chunk_size"), CASES)

Tokens = tuple[int, ...]


class Expected:
    """Texts without cache and drafts, each computed once."""

    def __init__(self) -> None:
        self._llm = LLM(
            dtype="float32", device="cpu", context_length=512, speculative_algorithm="none", disable_radix_cache=True
        )
        self._known: dict[tuple[Tokens, int], Tokens] = {}

    def after(self, prompt: Tokens, num_tokens: int) -> Tokens:
        if (prompt, num_tokens) not in self._known:
            self._known[prompt, num_tokens] = self._llm.generate(prompt, greedy(num_tokens))[0].token_ids
        return self._known[prompt, num_tokens]

    def check(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.finish_reason == "length"
            prompt, text = output.prompt_token_ids, output.token_ids
            assert_same_greedy_texts([text], [self.after(prompt, len(text))], [prompt], lambda: nullcontext(self._llm))


@pytest.fixture(scope="module")
def expected() -> Expected:
    return Expected()


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Record every run of known tokens: request, start, length."""
    runs: list[tuple[str, int, int]] = []
    real = Runner.extend

    def extend(self: Runner, batch: Any) -> torch.Tensor:
        runs.extend((run.request.request_id, run.start, run.length) for run in batch)
        return real(self, batch)

    monkeypatch.setattr(Runner, "extend", extend)
    return runs


def new_llm(strategy: str, drafts: str, page_size: int, chunk_size: int, **flags: Any) -> LLM:
    settings = {
        "dtype": "float32",
        "device": "cpu",
        "context_length": 512,
        "max_running_requests": 4,
        "max_mamba_cache_size": 256,
        "mamba_radix_cache_strategy": strategy,
        "page_size": page_size,
        "chunked_prefill_size": chunk_size,
    }
    tracking = {"mamba_track_interval": TRACK_INTERVAL} if strategy == "extra_buffer" else {}
    return LLM(**{**settings, **tracking, **DRAFTS[drafts], **flags})


def greedy(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def check_pools(llm: LLM) -> None:
    """Check that only the cache holds memory, and that its invariants hold."""
    engine = llm.engine
    stats, table = engine.stats(), engine.pools.table
    assert (stats.num_running, stats.num_waiting, stats.kv_used_tokens, stats.state_used_slots) == (0, 0, 0, 0)
    assert table.num_free_rows == table.num_rows
    assert stats.prefix_cache.num_locked_tokens == 0
    engine.cache_manager.cache.check(table.held_pages())


@pytest.mark.fast_cases("extra_buffer-tree-1-64", "no_buffer-plain-1-1000")
@each_case
def test_repeat_branch_and_turns(
    strategy: str, drafts: str, page_size: int, chunk_size: int, prompts: list[Tokens], expected: Expected
) -> None:
    with new_llm(strategy, drafts, page_size, chunk_size) as llm:
        first = next(prompt for prompt in prompts if len(prompt) > 100)
        cold = llm.generate(first, greedy())[0]
        repeated = llm.generate(first, greedy())[0]
        assert (cold.num_cached_tokens, repeated.num_cached_tokens) == (0, len(first) - 1)

        parting = 77
        others = [first[:parting] + prompt[:30] for prompt in prompts[3:6]]
        branches = [llm.generate(prompt, greedy())[0] for prompt in others]
        at_chunk_end = parting // chunk_size * chunk_size
        assert [o.num_cached_tokens for o in branches] == [at_chunk_end, parting, parting]

        history, turns = first + cold.token_ids, []
        for question in prompts[7:9]:
            turns.append(llm.generate(history + question[:20], greedy())[0])
            assert turns[-1].num_cached_tokens == len(history) - 1
            history = turns[-1].prompt_token_ids + turns[-1].token_ids

        # a text that diverges from an earlier output at a position where a state was stored
        position = len(first) + 2 * TRACK_INTERVAL + 1
        late = llm.generate(history[:position] + others[0][-20:], greedy())[0]
        at_track = position - 1 if strategy == "extra_buffer" else len(first) - 1
        assert late.num_cached_tokens == at_track

        expected.check([cold, repeated, *branches, *turns, late])
        check_pools(llm)


@pytest.mark.fast_cases("ngram-1-64")
@each_case
def test_evicted_and_computed_again(
    strategy: str, drafts: str, page_size: int, chunk_size: int, prompts: list[Tokens], expected: Expected
) -> None:
    slots = 6 + NUM_TOKENS // TRACK_INTERVAL  # the states of one answer do not push all others out
    flags = {"context_length": 240, "max_total_tokens": 320, "max_mamba_cache_size": slots, "max_running_requests": 2}
    with new_llm(strategy, drafts, page_size, chunk_size, **flags) as llm:
        chosen = [prompt[:90] for prompt in prompts if len(prompt) >= 90][:4]
        for _ in range(2):
            for prompt in chosen:
                expected.check(llm.generate(prompt, greedy()))
                check_pools(llm)
        assert llm.engine.stats().prefix_cache.evicted_tokens > 0
        again = llm.generate(chosen[-1], greedy())[0]
        assert again.num_cached_tokens > 0  # what was computed again was cached again
        expected.check([again])


@pytest.mark.fast_cases(2)
@each_case
def test_preempted_and_resumed(
    strategy: str,
    drafts: str,
    page_size: int,
    chunk_size: int,
    prompts: list[Tokens],
    expected: Expected,
    extended: list[tuple[str, int, int]],
) -> None:
    with new_llm(strategy, drafts, page_size, chunk_size) as llm:
        engine, chosen = llm.engine, [prompt[:40] for prompt in prompts if len(prompt) >= 40][:4]
        outputs: dict[str, Tokens] = {}
        for number, prompt in enumerate(chosen):
            engine.add_request(str(number), prompt, greedy())
            outputs[str(number)] = ()
        for step in itertools.count():
            if not engine.has_unfinished_requests:
                break
            for delta in engine.step():
                outputs[delta.request_id] += delta.token_ids
            if step % 3 == 2 and engine.scheduler.verifying:
                engine.preempt(engine.scheduler.verifying[step % len(engine.scheduler.verifying)])
        assert engine.stats().num_preemptions >= 2
        check_pools(llm)
    assert sum(length for _, _, length in extended) == sum(len(prompt) - 1 for prompt in chosen)  # nothing twice
    for prompt, tokens in zip(chosen, outputs.values(), strict=True):
        assert tokens == expected.after(prompt, NUM_TOKENS)


@pytest.mark.fast_cases("ngram-1-64")
@each_case
def test_preempted_for_lack_of_memory(
    strategy: str,
    drafts: str,
    page_size: int,
    chunk_size: int,
    prompts: list[Tokens],
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specmamba.engine.scheduler.HEADROOM", 0)  # as many preemptions as can be had
    flags = {"context_length": 200, "max_total_tokens": 480, "max_mamba_cache_size": 16, "max_running_requests": 8}
    with new_llm(strategy, drafts, page_size, chunk_size, **flags) as llm:
        chosen = [prompt[:50] for prompt in prompts if len(prompt) >= 50][:8]
        outputs = llm.generate(chosen, greedy(48 if IS_FULL else 32))
        assert llm.engine.stats().num_preemptions > 0
        check_pools(llm)
    expected.check(outputs)


@pytest.mark.fast_cases(2)
@each_case
def test_requests_that_come_together_share(
    strategy: str,
    drafts: str,
    page_size: int,
    chunk_size: int,
    prompts: list[Tokens],
    expected: Expected,
    extended: list[tuple[str, int, int]],
) -> None:
    shared = next(prompt for prompt in prompts if len(prompt) > 120)[:111]
    together = [shared + prompt[:25] for prompt in prompts[10:16]]
    with new_llm(strategy, drafts, page_size, chunk_size, max_running_requests=8) as llm:
        outputs = llm.generate(together, greedy())
        check_pools(llm)
    num_extended = sum(length for _, _, length in extended)
    expected.check(outputs)
    assert num_extended <= len(shared) + sum(len(prompt) - len(shared) for prompt in together)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_with_snapshots(strategy: str, drafts: str, prompts: list[Tokens], expected: Expected) -> None:
    """States are materialized from whole states per node too."""
    with new_llm(strategy, drafts, 16, 64, speculative_state="snapshots") as llm:
        first = llm.generate(prompts[0], greedy(24))[0]
        history = first.prompt_token_ids + first.token_ids
        second = llm.generate(history + prompts[1][:9], greedy())[0]
        assert second.num_cached_tokens == len(history) - 1
        position = len(prompts[0]) + TRACK_INTERVAL * 3 + 2
        third = llm.generate(history[:position] + prompts[1][-9:], greedy())[0]
        at_track = position - 2 if strategy == "extra_buffer" else len(prompts[0]) - 1
        assert third.num_cached_tokens == at_track
        expected.check([first, second, third])
        check_pools(llm)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_kept_as_zeros(value: float) -> None:
    """A draft head may compute such numbers where the target does not; the requests that share the prefix draft on."""
    with new_llm("no_buffer", "chain", 16, 64) as llm:
        cache, pools = llm.engine.scheduler._cache, llm.engine.pools
        features = torch.ones_like(pools.states.features[0, 1])
        cache._save_features(1, features)
        assert torch.equal(pools.states.features[0, 1], features)
        cache._save_features(1, features.index_fill(0, torch.tensor([2]), value))
        assert not pools.states.features[0, 1].any()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_drafts_after_a_hit_equal_those_without_a_cache(drafts: str, prompts: list[Tokens]) -> None:
    """A draft head that lost its context does not change the text, so the drafts themselves are compared."""
    with (
        new_llm("extra_buffer", drafts, 1, 64) as llm,
        new_llm("no_buffer", drafts, 1, 64, disable_radix_cache=True) as cold,
    ):
        for prompt in prompts[: 6 if IS_FULL else 3]:
            answer = llm.generate(prompt, greedy())[0]
            history = answer.prompt_token_ids + answer.token_ids
            again = [
                prompt,  # from the end of a prompt
                history[: len(prompt) + 2 * TRACK_INTERVAL + 1] + prompts[8][:7],  # from a tracked state
                history + prompts[9][:7],  # from the end of a request
            ]
            for text in again:
                hit = llm.generate(text, greedy())[0]
                assert hit.num_cached_tokens >= len(prompt) - 1
                assert hit.spec == cold.generate(text, greedy())[0].spec
                assert hit.spec.num_accepted_tokens > 0


def test_drafts_of_a_resumed_request(prompts: list[Tokens]) -> None:
    with new_llm("no_buffer", "chain", 1, 64) as llm, new_llm("no_buffer", "chain", 1, 64) as other:
        engine = llm.engine
        engine.add_request("a", prompts[0], greedy())
        deltas = []
        for step in itertools.count():
            deltas += engine.step()
            if not engine.has_unfinished_requests:
                break
            if step % 2 and engine.scheduler.verifying:
                engine.preempt(engine.scheduler.verifying[0])
        assert engine.stats().num_preemptions >= 2
        assert deltas[-1].spec == other.generate(prompts[0], greedy())[0].spec


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_tracked_states_do_not_depend_on_drafts(drafts: str, prompts: list[Tokens]) -> None:
    """Every due position, the last step's too."""
    with new_llm("extra_buffer", drafts, 1, 1000) as llm:
        for length in (9, 10, 11, 12, 24):
            llm.flush_cache()
            llm.generate(prompts[0], greedy(length))
            size, nodes = len(prompts[0]), [llm.engine.cache_manager.cache.root(None)]
            for node in nodes:
                nodes += node.children.values()
            ends = sorted(node.end - size for node in nodes if node.state_slot is not None)
            due = range(TRACK_INTERVAL, length, TRACK_INTERVAL)
            assert ends == sorted({-1, *due, length - 1})


class TestAsManySlotsAsRequests:
    """The matched state may be in the only slot: the request takes it over instead of waiting forever."""

    @pytest.mark.parametrize("num_slots", [1, 2])
    def test_repeats_and_turns(self, num_slots: int, prompts: list[Tokens], expected: Expected) -> None:
        flags = {"max_running_requests": num_slots, "max_mamba_cache_size": num_slots}
        with new_llm("no_buffer", "chain", 1, 64, **flags) as llm:
            history, cached = prompts[0], []
            for question in prompts[4:7]:
                answer = llm.generate(history, greedy())[0]
                cached.append(answer.num_cached_tokens - len(history))
                history = history + answer.token_ids + question[:5]
                expected.check([answer])
                check_pools(llm)
            assert cached[1:] == [-6, -6]  # the newest five tokens, and the last of the answer

    def test_two_at_a_time(self, prompts: list[Tokens], expected: Expected) -> None:
        flags = {"max_running_requests": 2, "max_mamba_cache_size": 2}
        with new_llm("no_buffer", "chain", 1, 64, **flags) as llm:
            engine = llm.engine
            for name in "ab":
                engine.add_request(name, prompts[0], greedy())
            most = 0
            while engine.has_unfinished_requests:
                engine.step()
                most = max(most, len(engine.scheduler.verifying))
            assert most == 2
            expected.check(llm.generate([prompts[0], prompts[0]], greedy()))
            check_pools(llm)


def test_drafts_that_are_accepted_beyond_the_end_of_the_context(expected: Expected) -> None:
    """The text is cut at the end of the context, the accepted path is not: it may end at the last position."""
    with new_llm("no_buffer", "chain", 1, 64, context_length=128) as llm:
        for num_tokens in (1, 2, 3):
            output = llm.generate((5,) * (128 - num_tokens), greedy(num_tokens))
            expected.check(output)
            check_pools(llm)
