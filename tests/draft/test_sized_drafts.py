"""Drafts whose size is decided in each step: greedy and seeded texts are the plain ones, whatever is decided.

Decisions are drawn at random: depth, chains or chosen trees, requests that are drafted for, nodes of every tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from specmamba import LLM, SamplingParams
from specmamba.config import DEMO_MODEL
from specmamba.core import Batch, RequestOutput, Verdict
from specmamba.draft.heads import MTPDrafter, missed_steps
from specmamba.draft.sizing import sizer as sizer_module
from specmamba.draft.sizing.rounds import NOTHING, DraftSize, SizedBatch
from specmamba.draft.sizing.sizer import CHAINS_TO_LEARN
from specmamba.sampling_params import SamplingBatch, SpeculationParams
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
    sizes: list[DraftSize],
    captured: bool,
    monkeypatch: pytest.MonkeyPatch,
    num_steps: int,
    waits: Sequence[int] = (),
) -> tuple[list[str], torch.Tensor, int]:
    """Draft as told in each step; the first request has no part in those whose numbers are in ``waits``.

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
        left, numbers, ready = iter(sizes), count(1), llm.engine.constraints.ready

        def planned(batch: SizedBatch) -> tuple[DraftSize, int]:
            sizer._predict(batch)
            return next(left), 1

        def some(requests: Any, is_idle: bool) -> Any:
            is_waiting = next(numbers) in waits
            return [r for r in ready(requests, is_idle=is_idle) if not is_waiting or r.request_id != "0"]

        monkeypatch.setattr(sizer, "_planned", planned)
        monkeypatch.setattr(llm.engine.constraints, "ready", some)
        for i, prompt in enumerate(PROMPTS[:3]):
            llm.engine.add_request(str(i), llm.engine.tokenizer.encode(prompt), params[i])
        texts, found = dict.fromkeys("012", ""), torch.zeros(0)
        while llm.engine.has_unfinished_requests:
            for delta in llm.engine.step():
                texts[delta.request_id] += delta.text
            num_steps -= 1
            if num_steps == 0:
                request = next(r for r in llm.engine.scheduler.verifying if r.request_id == "0")
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
    monkeypatch.setattr(missed_steps, "MISSED_TOKENS", 15)
    texts, found, _ = entries_after([NOTHING] * 40 + [DraftSize(3)] * 60, True, monkeypatch, 46)
    assert texts == always
    is_nothing = found.flatten(1).abs().sum(1) == 0
    assert is_nothing.sum() == 40 + 1 - 15
    end = int(is_nothing.nonzero()[-1])
    assert not is_nothing[end + 1 :].any()
    number = int(is_nothing.nonzero()[0])
    torch.testing.assert_close(found[:number], entries[:number], rtol=1e-4, atol=1e-5)
    assert (found[end + 1 : end + 15] - entries[end + 1 : end + 15]).abs().max() > 0  # they see what is nothing


@pytest.mark.parametrize("num_kept", [0, 1, 20])
def test_a_row_that_sat_out_comes_back_with_what_it_missed(num_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the others go on meanwhile; the head knows what it would know if these had not been made."""
    monkeypatch.setattr(missed_steps, "MISSED_TOKENS", 8)
    waits, drafts = range(8, 30 - num_kept), [DraftSize(3)] * 60
    num_missed = 30 - len(waits)
    texts, found, num_accepted = entries_after([NOTHING] * 30 + drafts, True, monkeypatch, 50, waits)
    always, entries, _ = entries_after([NOTHING] * num_missed + drafts, True, monkeypatch, num_missed + 20)
    assert texts == always
    assert num_accepted > 20
    number = min(len(found), len(entries))
    assert number > num_missed
    torch.testing.assert_close(found[:number], entries[:number], rtol=1e-4, atol=1e-5)
    num_lost = max(num_missed - 8, 0)
    assert (found.flatten(1).abs().sum(1) == 0).sum() == num_lost + (num_lost > 0)  # the pending one is lost with them


class Missing:
    """Skipped steps, and the positions of roots that a head would know."""

    def __init__(self, max_nodes: int = 2) -> None:
        self.steps = missed_steps.MissedSteps((4, max_nodes, 1), torch.float32, torch.device("cpu"), lambda x: 10 * x)
        self.roots = [0] * 4

    def begin(self, row: int, root: int) -> None:
        self.steps.forget(row)
        self.roots[row] = root

    def skip(self, starts: dict[int, int], decided: list[list[int]]) -> None:
        """Skip a step of rows whose roots are at these positions; tokens are named by row and position."""
        width = max(map(len, decided))
        rows, positions = torch.tensor([*starts]), torch.tensor([*starts.values()])
        tokens = torch.tensor([[*given, *[-5] * (width + 1 - len(given))] for given in decided])
        accepted = torch.tensor([len(given) - 1 for given in decided])
        path = torch.arange(width).flip(0).expand(len(decided), -1)  # node 0 is the last one of a path
        verdict = Verdict(path, accepted, tokens, tokens[:, 0], accepted >= 0)
        features = (100.0 * rows[:, None] + positions[:, None] + torch.arange(width)).flip(1)[..., None]
        sampling = SamplingBatch.of([SamplingParams()] * len(rows), [0] * len(rows), torch.device("cpu"))
        batch = Batch(tuple(starts), rows, rows, positions, int(positions.max()), sampling)
        self.steps.observe(batch, verdict, features)
        self.steps.advance([*starts], decided)

    def take(self, *rows: int) -> dict[int, missed_steps.MissedTokens]:
        found = {row: self.steps.take(row, self.roots[row], n) for row, n in self.steps.among(rows, self.roots)}
        for row, missed in found.items():
            self.roots[row] += missed.num_lost + len(missed.tokens)
        return found


def test_missed_tokens_of_rows_that_take_part_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missed_steps, "MISSED_TOKENS", 4)
    missing = Missing()
    missing.begin(1, 10)
    missing.begin(2, 300)
    assert not missing.take(1, 2)
    for i in range(3):
        missing.skip({1: 10 + i, 2: 300 + i}, [[11 + i], [301 + i]])
    for i in range(3, 200):
        missing.skip({2: 300 + i}, [[301 + i]])
    found = missing.take(1, 2, 3)
    assert (found[1].num_lost, found[1].tokens, found[1].states.flatten().tolist()) == (
        0,
        [11, 12, 13],
        [1100, 1110, 1120],
    )
    assert (found[2].num_lost, found[2].tokens) == (196, [497, 498, 499, 500])
    assert found[2].states.flatten().tolist() == [6960, 6970, 6980, 6990]
    assert not missing.take(1, 2, 3)
    missing.skip({1: 13}, [[14]])
    assert missing.take(2) == {}
    assert missing.take(1)[1].tokens == [14]


def test_missed_steps_of_several_tokens_between_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step writes behind its last token is written over, and pushes out nothing that is kept."""
    monkeypatch.setattr(missed_steps, "MISSED_TOKENS", 6)
    missing = Missing(max_nodes=2)
    assert missing.steps._tokens.shape[1] == 128
    monkeypatch.setattr(missed_steps, "missed_room", lambda max_nodes: 8)
    missing = Missing(max_nodes=2)
    missing.begin(1, 0)
    for start, tokens in ((0, [1]), (1, [2]), (2, [3, 4]), (4, [5]), (5, [6])):
        missing.skip({1: start}, [tokens])
    missing.skip({1: 6, 2: 40}, [[7], [41, 42]])
    missing.begin(2, 50)
    missing.skip({1: 7, 2: 50}, [[8], [51, 52]])
    missing.skip({1: 8, 2: 52}, [[9, 10], [53]])
    found = missing.take(1, 2)
    assert (found[1].num_lost, found[1].tokens) == (4, [5, 6, 7, 8, 9, 10])
    assert found[1].states.flatten().tolist() == [1040 + 10 * i for i in range(6)]
    assert (found[2].num_lost, found[2].tokens) == (0, [51, 52, 53])
    assert found[2].states.flatten().tolist() == [2500, 2510, 2520]


def test_a_request_misses_nothing_of_the_one_before_it_in_its_row() -> None:
    missing = Missing()
    missing.begin(1, 100)
    missing.skip({1: 100, 2: 5}, [[101], [6]])
    missing.begin(1, 20)
    missing.skip({2: 6}, [[7]])  # it does not take part yet
    assert 1 in missing.steps._complete  # so the host need not wait for the device
    assert not missing.take(1)


def learned(**flags: Any) -> tuple[list[str], Any]:
    """Texts of trees that are chosen by fixed costs, and what the sizer knows after them."""
    with LLM(dtype="float32", speculative_adaptive="auto", **flags) as llm:
        sizer = llm.engine.runner.sizer
        assert sizer is not None

        def planned(batch: SizedBatch) -> tuple[DraftSize, int]:
            sizer._predict(batch)
            sizer.times.trees = 1 + np.cumsum(np.full_like(sizer.times.trees, 0.1), axis=1)  # no clock has a say
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
        np.testing.assert_allclose(
            getattr(captured.expected.state, name), getattr(direct.expected.state, name), rtol=1e-3, atol=1e-4
        )


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
        before = sizer.expected.state.bins[:, 0].sum()
        output = llm.generate(PROMPTS[0], sampling(0))[0]
        bins = sizer.expected.state.bins - before
    spec = output.spec
    observed = sum(count * min(accepted + 1, 2) for accepted, count in enumerate(spec.accepted_histogram))
    assert bins[:, 2].sum() == pytest.approx(spec.num_accepted_tokens, rel=0.1)  # older ones fade
    assert bins[:, 0].sum() == pytest.approx(observed, rel=0.1)
    assert sizer.figures.num_nodes == 3 * sizer.figures.num_steps


def test_most_chains_are_counted_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of eight judges probabilities; the text is the same, and every round tells what chains bring."""
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
        judged = sizer.expected.state.bins[:, 0].sum()
        kept = sizer.expected.state.next_of_row.sum()
    assert [size.learns for size in sizes] == [i % CHAINS_TO_LEARN == 0 for i in range(len(sizes))]
    assert len(sizes) > 4
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
