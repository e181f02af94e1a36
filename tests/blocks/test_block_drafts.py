"""Texts with block drafts are those of plain decoding, in float32: chains and trees, alone and in a batch, cold, behind
a cached prefix and preempted, on records and snapshots, in fixed sizes and in sizes that are decided at random."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba import LLM, SamplingParams
from specmamba.config import DEMO_MODEL
from specmamba.draft.blocks import BlockDrafter
from specmamba.engine.engine import Engine
from specmamba.layers.context import ForwardContext
from specmamba.models.base import BlockHead
from tests.blocks import write_block_head
from tests.decisions import decide_at_random, without_measurement
from tests.exactness import assert_same_greedy_texts, assert_same_sampled_texts
from tests.families import FAMILIES
from tests.models.test_model_exact import random_prompts
from tests.taught import TaughtBlocks, bigrams
from tests.tiny import write_tiny_checkpoint
from tests.verify.test_captured_steps import Watched, answer_all, in_pytorch, memory_that_stays

__all__ = ["in_pytorch"]  # a fixture

PATTERN = [7, 21, 90, 33, 64, 21, 5]
PROMPTS = [PATTERN * 4, [11, 42, 3], PATTERN * 2 + [100] + PATTERN]
NUM_TOKENS = 24
CHAIN: dict[str, Any] = {"speculative_num_steps": 4, "speculative_adaptive": "off"}
TREE: dict[str, Any] = CHAIN | {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 9}
WAYS: dict[str, dict[str, Any]] = {
    "chain-records": CHAIN,
    "tree-records": TREE | {"disable_cuda_graph": True},
    "chain-snapshots": CHAIN | {"speculative_state": "snapshots", "disable_cuda_graph": True},
    "tree-snapshots": TREE | {"speculative_state": "snapshots"},
    "adaptive-captured": {"speculative_adaptive": "auto"},
    "adaptive-directly": {"speculative_adaptive": "auto", "disable_cuda_graph": True},
}
Texts = list[tuple[int, ...]]


class GivenBlocks(TaughtBlocks):
    """Has given logits [D, V] at every depth, whatever the context."""

    def forward(self, roots: Tensor, contexts: Sequence[ForwardContext]) -> Tensor:
        states = torch.zeros_like(self._head.forward(roots, contexts))
        states[..., 0] = torch.arange(states.shape[1])
        return states


class TaughtLinks:
    """Links that know what followed the token above; the block itself knows nothing."""

    state_size, latent_size = 0, 1

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def latent(self, tokens: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return tokens[..., None].to(hidden.dtype), state

    def logits(self, marginal: Tensor, latent: Tensor) -> Tensor:
        return 0 * marginal + self._table[latent[..., 0].long()]


class LinkedBlocks(TaughtBlocks):
    """Drafts by links alone."""

    def __init__(self, head: BlockHead, table: Tensor) -> None:
        super().__init__(head, torch.zeros_like(table))
        self.links = TaughtLinks(table)


def params(i: int) -> SamplingParams:
    """Greedy, or sampled with a seed."""
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8 if i % 2 else 0.0, seed=i, ignore_eos=True)


def open_llm(folder: Path, **flags: Any) -> LLM:
    memory = {"context_length": 96, "max_total_tokens": 2048, "max_running_requests": 4, "dtype": "float32"}
    head = {} if "speculative_algorithm" in flags else {"speculative_draft_model_path": str(folder / "head")}
    return LLM(model=str(folder / "target"), **{**memory, **head, **flags})


def new_plain(folder: Path) -> LLM:
    return open_llm(folder, speculative_algorithm="none", disable_radix_cache=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("blocks"), "dflash")


def write_folder(folder: Path, variant: str) -> Path:
    write_tiny_checkpoint(folder / "target", seed=3)
    write_block_head(folder / "head", folder / "target", seed=5, variant=variant)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Texts:
    with new_plain(folder) as llm:
        texts = [llm.generate([prompt], params(i))[0].token_ids for i, prompt in enumerate(PROMPTS)]
    assert all(len(set(text)) > 4 for text in texts)
    return texts


def teach(llm: LLM, texts: Texts) -> None:
    drafter = llm.engine.runner.drafter
    assert isinstance(drafter, BlockDrafter)
    whole = [prompt + list(text) for prompt, text in zip(PROMPTS, texts, strict=True)]
    kind = TaughtBlocks if drafter.head.links is None else LinkedBlocks
    drafter.head = kind(drafter.head, bigrams(whole, llm.engine.vocab_size))


def check(got: Texts, plain: Texts, folder: Path, places: list[int]) -> None:
    """Fail unless the texts of the prompts at these places are those of plain decoding."""
    greedy, sampled = [i for i in places if i % 2 == 0], [i for i in places if i % 2]
    of = dict(zip(places, got, strict=True))
    assert_same_greedy_texts(
        [of[i] for i in greedy], [plain[i] for i in greedy], [PROMPTS[i] for i in greedy], lambda: new_plain(folder)
    )

    def again() -> Texts:
        with new_plain(folder) as llm:
            return [llm.generate([PROMPTS[i]], params(i))[0].token_ids for i in sampled]

    assert_same_sampled_texts([of[i] for i in sampled], [plain[i] for i in sampled], again)


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_of_plain_decoding(
    way: str, folder: Path, plain: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_texts(way, folder, plain, monkeypatch)


LINKED_WAYS = ("chain-records", "tree-records", "tree-snapshots", "adaptive-captured", "adaptive-directly")


@pytest.mark.fast_cases("dspark-tree-records", "dflash2-chain-records", "dspark-adaptive-captured")
@pytest.mark.parametrize(("variant", "way"), list(itertools.product(("dflash2", "dspark"), LINKED_WAYS)), ids="-".join)
def test_texts_of_linked_blocks(
    variant: str, way: str, tmp_path: Path, plain: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each token is drafted from the one above it."""
    check_texts(way, write_folder(tmp_path, variant), plain, monkeypatch)


def check_texts(way: str, folder: Path, plain: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    without_measurement(monkeypatch)
    with open_llm(folder, **WAYS[way]) as llm:
        teach(llm, plain)
        if llm.engine.runner.sizer is not None:
            decide_at_random(llm, seed=4)
        everything = [params(i) for i in range(3)]
        for is_hit in (False, True):
            alone = llm.generate([PROMPTS[0]], params(0))[0]
            assert (alone.num_cached_tokens > 0) == is_hit
            check([alone.token_ids], plain, folder, [0])
            outputs = llm.generate(PROMPTS, everything)
            check([output.token_ids for output in outputs], plain, folder, [0, 1, 2])
        llm.flush_cache()
        outputs = llm.generate(PROMPTS, everything)
        check([output.token_ids for output in outputs], plain, folder, [0, 1, 2])
        accepted = [sum(o.spec.accepted_histogram[depth] for o in outputs) for depth in range(3)]
        assert accepted[0]
        assert sum(accepted[1:])
        check(preempted(llm.engine, everything), plain, folder, [0, 1, 2])
        assert llm.engine.stats().num_preemptions >= 3
        stats = llm.engine.stats()
        assert (stats.kv_used_tokens, stats.state_used_slots) == (0, 0)


def preempted(engine: Engine, ways: Sequence[SamplingParams]) -> Texts:
    """Answer all prompts in these ways, with a preemption after two steps of three."""
    texts: dict[str, list[int]] = {f"p{i}": [] for i in range(3)}
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"p{i}", tuple(prompt), ways[i])
    for step in range(1000):
        if not engine.has_unfinished_requests:
            break
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
        if (running := engine.scheduler.verifying) and step % 3 < 2:
            with torch.inference_mode():
                engine.preempt(running[step % len(running)])
    return [tuple(text) for text in texts.values()]


@pytest.mark.fast_cases("tree-dflash2", "tree-dspark")
@pytest.mark.usefixtures("in_pytorch")
@pytest.mark.parametrize("variant", ["dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_every_step_of_a_kind_is_the_same_program(shape: dict[str, Any], variant: str, tmp_path: Path) -> None:
    """So that graphs can capture it: the same operators on the same memory, and no number to or from the device."""
    head = write_block_head(tmp_path, DEMO_MODEL, seed=1, variant=variant)
    memory: dict[str, Any] = {"context_length": 160, "max_total_tokens": 2048, "max_running_requests": 2}
    flags = shape | memory | {"speculative_draft_model_path": str(head.folder), "cuda_graph_max_bs": 2}
    with LLM(dtype="float32", **flags) as llm:
        assert llm.engine.runner.graph_runner is not None
        watched = Watched(memory_that_stays(llm))
        llm.engine.runner.graph_runner.replay = watched
        for settings in ("greedy", "both rules"):
            answer_all(llm, settings, 2)
        assert sum(map(len, watched.traces.values())) > 10
        for traces in watched.traces.values():
            assert all(trace.operators == traces[0].operators for trace in traces)
            assert not any(trace.host_reads or trace.host_writes for trace in traces)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_heads_with_every_family(family: str, tmp_path: Path) -> None:
    target, prompts = tmp_path / "target", random_prompts((7, 1, 20), seed=2)
    FAMILIES[family].build(target)
    greedy = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)

    def open_family(**flags: Any) -> LLM:
        return LLM(model=str(target), dtype="float32", context_length=96, max_total_tokens=2048, **flags)

    with open_family(speculative_algorithm="none") as llm:
        expected = [output.token_ids for output in llm.generate(prompts, greedy)]
        num_layers = llm.engine.model.num_layers
    head = write_block_head(tmp_path / "head", target, seed=4, reads=(num_layers - 2, 0))
    with open_family(speculative_draft_model_path=str(head.folder), **TREE) as llm:
        for _ in range(2):
            got = [output.token_ids for output in llm.generate(prompts, greedy)]
            assert_same_greedy_texts(got, expected, prompts, lambda: open_family(speculative_algorithm="none"))
        assert llm.engine.stats().spec.num_draft_tokens > 0


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_by_rejection_texts_have_the_targets_distribution(shape: dict[str, Any], folder: Path) -> None:
    """Two tokens of a few likely ones, drafted from about their marginals: often right, and not always."""
    num_draws, temperature, top_k = 1500, 1.5, 3
    room = {"max_running_requests": 250, "max_queued_requests": num_draws, "max_total_tokens": 20000}
    flags = shape | room | {"speculative_accept": "rejection", "disable_radix_cache": True}
    ways = [
        SamplingParams(max_tokens=2, temperature=temperature, top_k=top_k, seed=seed, ignore_eos=True)
        for seed in range(num_draws)
    ]
    with new_plain(folder) as llm:
        expected = expected_pairs(llm, PROMPTS[1], temperature, top_k)
    marginals = 0.05 * torch.rand(4, 131, generator=torch.Generator().manual_seed(1))
    for pair, p in expected.items():
        for depth, token in enumerate(pair):
            marginals[depth, token] += p
    with open_llm(folder, **flags) as llm:
        drafter = llm.engine.runner.drafter
        assert isinstance(drafter, BlockDrafter)
        drafter.head = GivenBlocks(drafter.head, temperature * marginals.log())
        drawn = [output.token_ids for output in llm.generate([PROMPTS[1]] * num_draws, ways)]
        accepted = llm.engine.stats().spec.num_accepted_tokens
    assert num_draws // 3 < accepted < 3 * num_draws // 2
    assert chance_of(drawn, expected, num_draws) > 1e-3


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_by_rejection_linked_blocks_have_the_targets_distribution(shape: dict[str, Any], tmp_path: Path) -> None:
    """The second token is drafted from about its distribution behind the first one, which differs much among these."""
    folder, num_draws, temperature, top_k = write_folder(tmp_path, "dspark"), 1500, 1.5, 3
    room = {"max_running_requests": 250, "max_queued_requests": num_draws, "max_total_tokens": 20000}
    flags = shape | room | {"speculative_accept": "rejection", "disable_radix_cache": True}
    ways = [
        SamplingParams(max_tokens=2, temperature=temperature, top_k=top_k, seed=seed, ignore_eos=True)
        for seed in range(num_draws)
    ]
    with new_plain(folder) as llm:
        expected = expected_pairs(llm, PROMPTS[1], temperature, top_k)
    behind = 0.02 * torch.rand(131, 131, generator=torch.Generator().manual_seed(1))
    for (first, second), p in expected.items():
        behind[PROMPTS[1][-1], first] += p
        behind[first, second] += p
    with open_llm(folder, **flags) as llm:
        drafter = llm.engine.runner.drafter
        assert isinstance(drafter, BlockDrafter)
        drafter.head = LinkedBlocks(drafter.head, temperature * behind.log())
        drawn = [output.token_ids for output in llm.generate([PROMPTS[1]] * num_draws, ways)]
        accepted = llm.engine.stats().spec.num_accepted_tokens
    assert num_draws // 2 < accepted
    assert chance_of(drawn, expected, num_draws) > 1e-3


def chance_of(drawn: Texts, expected: dict[tuple[int, int], float], num_draws: int) -> float:
    """The chance of as large a difference from the expected frequencies (Pearson's test)."""
    assert set(drawn) <= set(expected)
    statistic = sum((drawn.count(pair) - p * num_draws) ** 2 / (p * num_draws) for pair, p in expected.items())
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def expected_pairs(llm: LLM, prompt: list[int], temperature: float, top_k: int) -> dict[tuple[int, int], float]:
    """The probabilities of the next two tokens."""

    def next_of(text: list[int]) -> dict[int, float]:
        said: list[Tensor] = []
        llm.workbench.logits_along(text, [1], said.append)
        likeliest = said[0].double().flatten().topk(top_k)
        return dict(zip(likeliest.indices.tolist(), (likeliest.values / temperature).softmax(-1).tolist(), strict=True))

    first = next_of(prompt)
    return {(a, b): p * q for a, p in first.items() for b, q in next_of([*prompt, a]).items()}
