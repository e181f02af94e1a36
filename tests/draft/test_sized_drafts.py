"""Drafts whose size is decided in each step: greedy and seeded texts are the plain ones, whatever is decided.

Decisions are drawn at random: depth, chains or chosen trees, requests that are drafted for, nodes of every tree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specmamba import LLM, SamplingParams
from specmamba.cache.shapes import MISSED_AT_ONCE, MISSED_TOKENS
from specmamba.config import DEMO_MODEL
from specmamba.core import RequestOutput
from specmamba.draft.heads import MTPDrafter, missed_steps
from specmamba.draft.sizing import sizer as sizer_module
from specmamba.draft.sizing.rounds import SizedBatch
from specmamba.draft.sizing.schedule import NOTHING, DraftSize
from specmamba.sampling_params import SpeculationParams
from tests.decisions import decide_at_random, without_measurement

PROMPTS = [
    "def main():\n    ",
    "import os\n",
    "class A:\n  def __init__(self):",
    "The quick brown",
    " x = [1, 2",
    "for i",
]
NUM_TOKENS = 40
WAYS: dict[str, dict[str, Any]] = {
    "captured": {},
    "direct": {"disable_cuda_graph": True},
    "snapshots": {"speculative_state": "snapshots", "disable_cuda_graph": True},
    "captured snapshots": {"speculative_state": "snapshots"},
    "n-grams": {"speculative_algorithm": "ngram"},
    "suffix": {"speculative_algorithm": "suffix"},
    "draft model": {"speculative_draft_model_path": str(DEMO_MODEL), "speculative_algorithm": "draft-model"},
    "draft model, trees": {
        "speculative_draft_model_path": str(DEMO_MODEL),
        "speculative_algorithm": "draft-model",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 8,
    },
    "wide tree": {"speculative_num_steps": 4, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 15},
    "pages of 16, extra buffer": {
        "page_size": 16,
        "mamba_radix_cache_strategy": "extra_buffer",
        "mamba_track_interval": 8,
    },
    "preempted": {"max_total_tokens": 130, "page_size": 1},
}


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    without_measurement(monkeypatch)


def sampling(i: int, **changes: Any) -> SamplingParams:
    temperature = 0.0 if i % 2 else 0.8
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=i, ignore_eos=True, **changes)


def run(**flags: Any) -> list[RequestOutput]:
    with LLM(dtype="float32", max_running_requests=6, **{"speculative_adaptive": "auto"} | flags) as llm:
        if llm.engine.runner.sizer is not None:
            decide_at_random(llm, seed=3)
        return llm.generate(PROMPTS, [sampling(i) for i in range(len(PROMPTS))])


@pytest.fixture(scope="module")
def plain() -> list[str]:
    with LLM(dtype="float32", speculative_algorithm="none") as llm:
        return [out.text for out in llm.generate(PROMPTS, [sampling(i) for i in range(len(PROMPTS))])]


@pytest.mark.fast_cases("captured", "direct", "suffix")
@pytest.mark.parametrize("way", WAYS)
def test_texts_are_the_plain_ones_whatever_is_decided(plain: list[str], way: str) -> None:
    outputs = run(**WAYS[way])
    assert [out.text for out in outputs] == plain
    assert sum(out.spec.num_accepted_tokens for out in outputs) > NUM_TOKENS // 4  # there was something to get wrong


def entries_after(
    sizes: list[DraftSize], captured: bool, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> tuple[list[str], torch.Tensor, int]:
    """Draft as told in each step.

    Returns:
        The texts, keys and values of the head for the first request after ``num_steps`` steps [positions, ...], and the
        number of accepted tokens.
    """
    params = [SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True) for _ in PROMPTS[:3]]
    with LLM(dtype="float32", speculative_adaptive="auto", disable_cuda_graph=not captured) as llm:
        sizer, drafter = llm.engine.runner.sizer, llm.engine.runner.drafter
        assert sizer is not None
        assert isinstance(drafter, MTPDrafter)
        assert drafter._own_kv is not None
        left = iter(sizes)

        def planned(batch: SizedBatch) -> tuple[DraftSize, int]:
            sizer._predict(batch)
            return next(left), 1

        monkeypatch.setattr(sizer, "_planned", planned)
        for i, prompt in enumerate(PROMPTS[:3]):
            llm.engine.add_request(str(i), llm.engine.tokenizer.encode(prompt), params[i])
        texts, found = dict.fromkeys("012", ""), torch.zeros(0)
        while llm.engine.has_unfinished_requests:
            for delta in llm.engine.step():
                texts[delta.request_id] += delta.text
            num_steps -= 1
            if num_steps == 0:
                request = llm.engine.scheduler.verifying[0]
                positions = torch.arange(1, request.root_position - 8)[None]
                slots = llm.engine.pools.table.slots_at(torch.tensor([request.held_row]), positions)[0]
                found = torch.stack([layer[slots].float() for layer in (*drafter._own_kv.k, *drafter._own_kv.v)], 1)
        return [texts[name] for name in "012"], found, llm.engine.stats().spec.num_accepted_tokens


@pytest.mark.parametrize("captured", [True, False])
def test_the_drafter_skips_steps_and_runs_their_tokens_when_it_comes_back(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    always, entries, _ = entries_after([DraftSize(1)] * 100, captured, monkeypatch, 44)
    some = np.array([True, False, False])
    probes = [NOTHING] * 20 + [DraftSize(1, drafted=some, is_probe=True)] + [NOTHING] * 20
    texts, found, num_accepted = entries_after(probes + [DraftSize(3)] * 60, captured, monkeypatch, 46)
    assert texts == always
    assert num_accepted > 20
    number = min(len(found), len(entries))
    torch.testing.assert_close(found[:number], entries[:number], rtol=1e-4, atol=1e-5)


def test_what_was_missed_too_long_ago_is_nothing_and_the_rest_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    always, entries, _ = entries_after([DraftSize(1)] * 100, True, monkeypatch, 44)
    monkeypatch.setattr(missed_steps, "MISSED_TOKENS", 16)
    monkeypatch.setattr(missed_steps, "MISSED_AT_ONCE", 5)
    texts, found, _ = entries_after([NOTHING] * 40 + [DraftSize(3)] * 60, True, monkeypatch, 46)
    assert texts == always
    is_nothing = found.flatten(1).abs().sum(1) == 0
    assert is_nothing.sum() == 40 + 1 - 15  # three runs of 5
    end = int(is_nothing.nonzero()[-1])
    assert not is_nothing[end + 1 :].any()
    number = int(is_nothing.nonzero()[0])
    torch.testing.assert_close(found[:number], entries[:number], rtol=1e-4, atol=1e-5)
    assert (found[end + 1 : end + 15] - entries[end + 1 : end + 15]).abs().max() > 0  # they see what is nothing


@pytest.mark.parametrize("num_kept", [0, 1, 2])
def test_a_row_that_sat_out_comes_back_without_what_it_missed(num_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the others push out its tokens."""
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    with LLM(dtype="float32", speculative_algorithm="none") as llm:
        plain = [out.text for out in llm.generate(PROMPTS[:2], params)]
    monkeypatch.setattr(missed_steps, "MISSED_TOKENS", 8)
    monkeypatch.setattr(missed_steps, "MISSED_AT_ONCE", 2)
    with LLM(dtype="float32", speculative_adaptive="auto") as llm:
        sizer, ready = llm.engine.runner.sizer, llm.engine.constraints.ready
        assert sizer is not None
        sizes, num_steps = iter([NOTHING] * 30 + [DraftSize(3)] * 60), 0

        def planned(batch: SizedBatch) -> tuple[DraftSize, int]:
            sizer._predict(batch)
            return next(sizes), 1

        def some(requests: Any, is_idle: bool) -> Any:
            nonlocal num_steps
            num_steps += 1
            found = ready(requests, is_idle=is_idle)
            return [r for r in found if r.request_id == "1" or not 8 <= num_steps < 30 - num_kept]

        monkeypatch.setattr(sizer, "_planned", planned)
        monkeypatch.setattr(llm.engine.constraints, "ready", some)
        for i, prompt in enumerate(PROMPTS[:2]):
            llm.engine.add_request(str(i), llm.engine.tokenizer.encode(prompt), params)
        texts = dict.fromkeys("01", "")
        while llm.engine.has_unfinished_requests:
            for delta in llm.engine.step():
                assert delta.error is None
                texts[delta.request_id] += delta.text
    assert [texts[name] for name in "01"] == plain


def test_missed_tokens_of_rows_that_take_part_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missed_steps, "MISSED_TOKENS", 4)
    monkeypatch.setattr(missed_steps, "MISSED_AT_ONCE", 1)
    missed = missed_steps.MissedSteps()
    for number in range(3):
        missed.add((1, 2), [[10 + number], [20 + number]], torch.full((2, 1, 3), float(number)))
    for number in range(3, 6):
        missed.add((2,), [[20 + number]], torch.full((1, 1, 3), float(number)))
    one, two = missed.take(1), missed.take(2)
    assert (one.num_lost, one.newest_lost, one.tokens) == (2, 11, [12])
    assert (two.num_lost, two.tokens, two.states[:, 0].tolist()) == (2, [22, 23, 24, 25], [2, 3, 4, 5])
    assert not missed
    missed.add((1,), [[7]], torch.zeros(1, 1, 3))
    for number in range(4):
        missed.add((2,), [[number]], torch.zeros(1, 1, 3))
    one = missed.take(1)
    assert (one.num_lost, one.newest_lost, one.tokens) == (1, 7, [])


def test_missed_steps_of_several_tokens_between_those_of_one() -> None:
    missed = missed_steps.MissedSteps()
    states = torch.arange(20.0).reshape(2, 10, 1)
    for first, decided in ((0, [[1], [51]]), (1, [[2], [52]]), (2, [[3, 4], [53]]), (4, [[5], [54]]), (5, [[6], [55]])):
        missed.add((1, 2), decided, states[:, first : first + max(map(len, decided))])
    missed.forget(2)
    missed.add((1, 2), [[7], [61]], states[:, 6:7])
    one, two = missed.take(1), missed.take(2)
    assert (one.tokens, one.states.flatten().tolist()) == ([1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6])
    assert (two.tokens, two.states.flatten().tolist()) == ([61], [16])


def test_missed_steps_whose_states_lie_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of captured steps, in between steps of other rows."""
    monkeypatch.setattr(missed_steps, "MISSED_AT_ONCE", 4)
    missed, states, others = missed_steps.MissedSteps(), torch.zeros(2, 1, 3), torch.zeros(1, 1, 3)
    again = []

    def add(rows: tuple[int, ...], found: torch.Tensor, number: int) -> None:
        found.fill_(number)
        decided = [[100 * row + number] for row in rows]
        again.append(missed.add_again(rows, decided, found))
        if not again[-1]:
            missed.add(rows, decided, found)

    for number in range(6):
        add((1, 2), states, number)
    for number in range(6, 8):
        add((2,), others, number)
    add((1, 2), states, 8)
    missed.forget(1)
    for number in range(9, 11):
        add((1, 2), states, number)
    assert again == [False, False, True, True, False, True, False, False, False, False, True]
    one, two = missed.take(1), missed.take(2)
    assert (one.tokens, one.states[:, 0].tolist()) == ([109, 110], [9, 10])
    assert (two.tokens, two.states[:, 2].tolist()) == ([200 + i for i in range(11)], list(range(11)))


@pytest.mark.parametrize("steps_alike", [1, 3, 100])
def test_missed_steps_of_changing_rows_take_the_planned_memory(steps_alike: int) -> None:
    missed, states = missed_steps.MissedSteps(), torch.zeros(2, 1, 8)
    for number in range(1000):
        rows = (0, 1 + number // steps_alike % 2)
        if not missed.add_again(rows, [[1], [2]], states):
            missed.add(rows, [[1], [2]], states)
    held = sum(run.states.nbytes for run in missed._runs)
    assert held <= (MISSED_TOKENS + 2 * MISSED_AT_ONCE) * states.nbytes
    assert len(missed.take(0).tokens) >= MISSED_TOKENS - MISSED_AT_ONCE


def learned(**flags: Any) -> tuple[list[str], Any]:
    """Texts of trees that are chosen by fixed costs, and what the sizer knows after them."""
    with LLM(dtype="float32", speculative_adaptive="auto", **flags) as llm:
        sizer = llm.engine.runner.sizer
        assert sizer is not None

        def planned(batch: SizedBatch) -> tuple[DraftSize, int]:
            sizer._predict(batch)
            sizer._seconds = 1 + np.cumsum(np.full_like(sizer._seconds, 0.1), axis=1)  # no clock has a say
            return DraftSize(sizer.bounds.num_steps), 3

        sizer._planned = planned  # type: ignore[method-assign]
        texts = [llm.generate(prompt, sampling(i))[0].text for i, prompt in enumerate(PROMPTS[:4])]
        return texts, sizer


def test_captured_steps_learn_what_direct_ones_do() -> None:
    (texts, captured), (also, direct) = learned(), learned(disable_cuda_graph=True)
    assert texts == also
    assert captured.figures.num_nodes == direct.figures.num_nodes
    assert captured.figures.num_nodes > captured.figures.num_requests  # some nodes were chosen
    for name in ("weights", "offsets", "counts", "bins", "odds", "values_of_row", "next_of_row"):
        np.testing.assert_allclose(getattr(captured.state, name), getattr(direct.state, name), rtol=1e-3, atol=1e-4)


def test_chains_of_captured_steps_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain's first children are observed as those of trees are: calibration and kept values move."""
    with LLM(dtype="float32", speculative_adaptive="auto") as llm:
        sizer = llm.engine.runner.sizer
        assert sizer is not None

        def planned(batch: SizedBatch) -> tuple[DraftSize, int]:
            sizer._predict(batch)
            return DraftSize(2, is_chain=True), 5

        monkeypatch.setattr(sizer, "_planned", planned)
        monkeypatch.setattr(sizer_module, "CHAINS_TO_LEARN", 1)
        before = sizer.state.bins[:, 0].sum()
        output = llm.generate(PROMPTS[0], sampling(0))[0]
        bins = sizer.state.bins - before
    spec = output.spec
    observed = sum(count * min(accepted + 1, 2) for accepted, count in enumerate(spec.accepted_histogram))
    assert bins[:, 2].sum() == pytest.approx(spec.num_accepted_tokens, rel=0.1)  # older ones fade
    assert bins[:, 0].sum() == pytest.approx(observed, rel=0.1)
    assert sizer.figures.num_nodes == 3 * sizer.figures.num_steps


def test_most_chains_are_counted_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of four judges probabilities; the text is the same, and every round tells what chains bring."""
    with LLM(dtype="float32", speculative_adaptive="auto") as llm:
        sizer = llm.engine.runner.sizer
        assert sizer is not None
        sizes: list[DraftSize] = []

        def planned(batch: SizedBatch) -> tuple[DraftSize, int]:
            sizer._predict(batch)
            return DraftSize(2, is_chain=True), 5

        def plan(*given: Any) -> DraftSize:
            sizes.append(sized(*given))
            return sizes[-1]

        sized = sizer.plan
        monkeypatch.setattr(sizer, "_planned", planned)
        monkeypatch.setattr(sizer, "plan", plan)
        output = llm.generate(PROMPTS[0], sampling(0))[0]
        judged = sizer.state.bins[:, 0].sum()
        kept = sizer.state.next_of_row.sum()
    assert [size.learns for size in sizes[:5]] == [True, False, False, False, True]
    spec = output.spec
    observed = sum(count * min(accepted + 1, 2) for accepted, count in enumerate(spec.accepted_histogram))
    assert 0 < judged < 0.6 * observed
    assert kept >= len(sizes) // 2


@pytest.mark.slow
def test_requests_may_bound_their_drafts_and_ask_for_a_rule(plain: list[str]) -> None:
    asked = [SpeculationParams(max_depth=i % 3, accept="target") for i in range(len(PROMPTS))]
    with LLM(dtype="float32", speculative_adaptive="auto") as llm:
        params = [sampling(i, speculative=each) for i, each in enumerate(asked)]
        outputs = llm.generate(PROMPTS, params)
    assert [out.text for out in outputs] == plain
    for out, each in zip(outputs, asked, strict=True):
        assert not sum(out.spec.accepted_histogram[(each.max_depth or 0) + 1 :])


def test_everything_is_given_back(plain: list[str]) -> None:
    """Requests that end, and one that is aborted in the middle, leave no page, slot or row behind."""
    with LLM(dtype="float32", speculative_adaptive="auto", disable_radix_cache=True) as llm:
        engine = llm.engine
        before = engine.stats()
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), engine.tokenizer.encode(prompt), sampling(i))
        for _ in range(12):
            engine.step()
        engine.abort("2")
        while engine.has_unfinished_requests:
            engine.step()
        after = engine.stats()
    assert (after.kv_used_tokens, after.state_used_slots) == (before.kv_used_tokens, before.state_used_slots)
    assert after.sizing is not None
    assert after.sizing.num_nodes >= after.sizing.num_requests > after.sizing.num_steps > 0
