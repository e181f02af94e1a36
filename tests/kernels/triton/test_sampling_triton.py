"""Sampling in Triton: numbers and choices as the reference has them, filters by hand-made rows as well."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import sampling
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.sampling import reference, torch_ops
from tests.kernels.test_sampling import (
    DTYPES,
    INT64,
    NEUTRAL,
    NO_FILTERS,
    SETTINGS,
    SIZES,
    logits_of_any_maximum,
    make_logits,
    penalized,
)
from tests.kernels.trees import mask_of

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def triton_ops(gpu_device: str) -> ModuleType:
    from specmamba.kernels.sampling import triton_ops

    return triton_ops


def on(device: str, *tensors: Tensor | None) -> list[Tensor | None]:
    return [x if x is None else x.to(device) for x in tensors]


def one_row(ops: ModuleType, device: str, logits: list[float] | Tensor, **changes: float) -> Tensor:
    """``probabilities`` of a single row of logits under named settings -> [V]."""
    settings = (torch.tensor([value], device=device) for value in (NEUTRAL | changes).values())
    return ops.probabilities(torch.as_tensor(logits, device=device)[None, None], *settings)[0, 0].cpu()


def kept(ops: ModuleType, device: str, logits: list[float] | Tensor, **changes: float) -> list[int]:
    return one_row(ops, device, logits, **changes).nonzero().flatten().tolist()


@pytest.mark.parametrize("stream", [0, 1, 3, 1000])
def test_uniform_agrees_bit_for_bit(triton_ops: ModuleType, gpu_device: str, stream: int) -> None:
    gen = torch.Generator().manual_seed(stream)
    seeds = torch.cat([torch.tensor([0, 1, -1, INT64.max, INT64.min]), torch.randint(INT64.max, (40,), generator=gen)])
    positions = torch.randint(2**40, (45, 9), generator=gen)
    positions[:, :4] = torch.tensor([0, 1, 2**31, INT64.max - 1])
    want = reference.uniform(seeds, positions, stream=stream)
    for counters in (positions, positions.t().contiguous().t()):
        got = triton_ops.uniform(seeds.to(gpu_device), counters.to(gpu_device), stream)
        assert got.dtype == torch.float32
        assert torch.equal(got.cpu(), want)
    repeated = positions[..., None].expand(-1, -1, 2).to(gpu_device)
    assert torch.equal(
        triton_ops.uniform(seeds.to(gpu_device), repeated, stream).cpu(), want[..., None].expand(-1, -1, 2)
    )
    assert triton_ops.uniform(seeds[:0].to(gpu_device), positions[:0].to(gpu_device)).shape == (0, 9)


@pytest.mark.fast_cases(1)
@DTYPES
@SIZES
def test_argmax_matches_reference(
    triton_ops: ModuleType, gpu_device: str, nodes: int, vocabulary: int, dtype: torch.dtype
) -> None:
    """Few different values, so that most rows have several largest ones; views are read as well."""
    gen = torch.Generator().manual_seed(vocabulary)
    logits = torch.randint(-3, 3, (2, nodes, 2 * vocabulary), generator=gen).to(dtype)
    logits[0, 0] = float("-inf")
    for view in (logits[..., ::2], logits.transpose(0, 1)[..., :vocabulary]):
        assert torch.equal(triton_ops.argmax(view.to(gpu_device)).cpu(), reference.argmax(view))
    assert triton_ops.argmax(logits[0, 0].to(gpu_device)).item() == 0  # of a row alone, too


@DTYPES
@pytest.mark.parametrize("vocabulary", [1, 37, 1300])
def test_has_finite_max_matches_reference(
    triton_ops: ModuleType, gpu_device: str, vocabulary: int, dtype: torch.dtype
) -> None:
    logits, want = logits_of_any_maximum(vocabulary, dtype)
    assert torch.equal(triton_ops.has_finite_max(logits.to(gpu_device)).cpu(), want)
    tokens, is_finite = triton_ops.checked_argmax(logits.to(gpu_device))
    assert torch.equal(tokens.cpu(), torch_ops.argmax(logits))
    assert torch.equal(is_finite.cpu(), want)


@pytest.mark.parametrize(
    ("vocabulary", "k", "dtype"), [(1, 1, torch.float32), (7, 7, torch.float32), (1030, 8, torch.bfloat16)]
)
def test_likeliest_matches_reference(
    triton_ops: ModuleType, gpu_device: str, vocabulary: int, k: int, dtype: torch.dtype
) -> None:
    """Few different values, and some that are not finite; a last chunk with fewer tokens than are chosen."""
    logits = torch.randn(3, 2, vocabulary, generator=torch.Generator().manual_seed(k)).mul(4).round().to(dtype)
    logits[0, 0, vocabulary // 2 :] = torch.nan
    logits[1, 0, -1], logits[1, 1], logits[2, 0, -1] = torch.inf, -torch.inf, 30.0
    tokens, logprobs = (x.cpu() for x in triton_ops.likeliest(logits.to(gpu_device), k))
    want_tokens, want = reference.likeliest(logits, k)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, want_tokens)
    torch.testing.assert_close(logprobs, want, rtol=1e-5, atol=2e-3)  # 1e4 has a step of 1e-3 in float32


@pytest.mark.fast_cases(1)
@DTYPES
@pytest.mark.parametrize(("nodes", "vocabulary"), [(1, 1), (2, 3), (1, 257), (2, 1300)])
def test_sample_matches_reference(
    triton_ops: ModuleType, gpu_device: str, nodes: int, vocabulary: int, dtype: torch.dtype
) -> None:
    """Against sums in float64."""
    logits = make_logits(nodes, vocabulary, seed=vocabulary + 2) if vocabulary > 1 else torch.zeros(8, nodes, 1)
    logits = logits.to(dtype)
    uniforms = torch.rand(8, nodes, generator=torch.Generator().manual_seed(nodes))
    tokens = triton_ops.sample(*on(gpu_device, logits, SETTINGS[0], *NO_FILTERS, uniforms))
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens.cpu(), reference.sample(logits.double(), SETTINGS[0], *NO_FILTERS, uniforms))


@pytest.mark.parametrize(("vocabulary", "dtype"), [(1, torch.float32), (257, torch.float32)])
def test_sample_with_filters_matches_reference(
    triton_ops: ModuleType, gpu_device: str, vocabulary: int, dtype: torch.dtype
) -> None:
    logits = make_logits(1, vocabulary, seed=vocabulary) if vocabulary > 1 else torch.zeros(8, 1, 1)
    logits = logits.to(dtype)
    uniforms = torch.rand(8, 1, generator=torch.Generator().manual_seed(vocabulary))
    tokens = triton_ops.sample(*on(gpu_device, logits, *SETTINGS, uniforms))
    assert torch.equal(tokens.cpu(), reference.sample(logits.double(), *SETTINGS, uniforms))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("uniform", "filtered"), [(0.0, False), (1 - 2**-24, False), (1 - 2**-24, True)])
def test_sample_never_returns_an_impossible_token(
    triton_ops: ModuleType, gpu_device: str, uniform: float, filtered: bool
) -> None:
    """The ends of the interval: the first and the last possible token."""
    logits = make_logits(1, 1300, seed=5)
    logits[:, :, 510:1030] = float("-inf")  # all of the second chunk of 512
    logits[:, :, 0] = logits[:, :, -1] = float("-inf")
    settings: tuple[Any, ...] = SETTINGS if filtered else (SETTINGS[0], *NO_FILTERS)
    if filtered:  # top-k alone, top-p alone
        logits, settings = logits[1:3], tuple(x[1:3] for x in SETTINGS)
    uniforms = torch.full((len(logits), 1), uniform)
    tokens = triton_ops.sample(*on(gpu_device, logits, *settings, uniforms)).cpu()
    is_possible = torch_ops.probabilities(logits, *settings) > 0
    assert bool(is_possible.gather(2, tokens[..., None]).all())
    if uniform == 0:
        assert torch.equal(tokens, is_possible.int().argmax(-1))


def test_tokens_are_met_where_their_shares_begin_and_end(triton_ops: ModuleType, gpu_device: str) -> None:
    logits = 3 * torch.randn(1, 1, 1300, generator=torch.Generator().manual_seed(6))
    cumulative = logits.double().softmax(-1).cumsum(-1)[0, 0]
    edges = torch.cat([torch.zeros(1, dtype=torch.float64), cumulative])
    wide = (edges.diff() > 1e-4).nonzero().flatten()  # the others are narrower than rounding may move an edge
    wide = wide[:: len(wide) // 12]
    for inside in (edges[:-1] + 1e-6, edges[1:] - 1e-6):
        uniforms = inside[wide][None].float()
        rows = logits.expand(1, len(wide), -1)
        tokens = triton_ops.sample(*on(gpu_device, rows, torch.ones(1), *NO_FILTERS, uniforms))
        assert torch.equal(tokens[0].cpu(), wide)


def test_frequencies_are_the_probabilities(triton_ops: ModuleType, gpu_device: str) -> None:
    """Evenly spread uniforms: a token of share p is met p times as often, but for one at each of its two ends."""
    logits, steps = torch.tensor([[0.3, -1.0, 2.0, -torch.inf, 1.1, 0.0]]), 20
    uniforms = ((torch.arange(steps) + 0.5) / steps)[None]
    settings = torch.tensor([0.8]), None, None, torch.tensor([0.1])
    tokens = triton_ops.sample(*on(gpu_device, logits.expand(1, steps, -1), *settings, uniforms)).cpu()
    share = reference.probabilities(logits[None].double(), *settings)[0, 0]
    counts = torch.bincount(tokens[0], minlength=6)
    assert bool(((counts - steps * share).abs() <= 1).all())
    assert (share == 0).sum() == 3
    assert counts[share == 0].sum() == 0


@pytest.mark.fast_cases(1)
@DTYPES
@pytest.mark.parametrize("vocabulary", [3, 520])
def test_probabilities_match_reference(
    triton_ops: ModuleType, gpu_device: str, vocabulary: int, dtype: torch.dtype
) -> None:
    logits = make_logits(1, vocabulary, seed=vocabulary).to(dtype)
    for settings in (SETTINGS, (SETTINGS[0], *NO_FILTERS)):
        probs = triton_ops.probabilities(*on(gpu_device, logits, *settings)).cpu()
        want = reference.probabilities(logits.double(), *settings)
        assert probs.dtype == torch.float32
        torch.testing.assert_close(probs.double(), want, rtol=1e-5, atol=1e-6)
        assert torch.equal(probs > 1e-37, want > 1e-37)  # less is 0 in float32, or nearly


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("absent", [(1,), (2,), (1, 2)])
def test_a_filter_that_is_none_keeps_everything(
    triton_ops: ModuleType, gpu_device: str, absent: tuple[int, ...]
) -> None:
    logits = make_logits(1, 20, seed=sum(absent))
    settings = [None if i in absent else x for i, x in enumerate(SETTINGS)]
    want = reference.probabilities(logits.double(), *settings)
    torch.testing.assert_close(
        triton_ops.probabilities(*on(gpu_device, logits, *settings)).cpu().double(), want, rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_top_k_keeps_ties_with_the_last(triton_ops: ModuleType, gpu_device: str) -> None:
    assert kept(triton_ops, gpu_device, [3.0, 1.0, 2.0, 2.0, 0.0], top_k=2) == [0, 2, 3]
    assert kept(triton_ops, gpu_device, [3.0, 1.0, 2.0], top_k=1) == [0]
    assert kept(triton_ops, gpu_device, [-3.0, -1.0, -2.0, -2.0, -4.0], top_k=2) == [1, 2, 3]
    assert kept(triton_ops, gpu_device, [1.0, 0.0, -0.0, -1e-45, 1e-45], top_k=3) == [0, 1, 2, 4]
    assert kept(triton_ops, gpu_device, [0.0, -torch.inf, 1.0], top_k=3) == [0, 2]
    neighbours = torch.tensor([1.0, 1.0 + 2**-23, 1.0 + 2**-22, 1.0], dtype=torch.float32)
    assert kept(triton_ops, gpu_device, neighbours, top_k=2) == [1, 2]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("level", [0.0, -7.5])
def test_top_p_ranks_equal_probabilities_by_token_id(triton_ops: ModuleType, gpu_device: str, level: float) -> None:
    """Across chunks, too."""
    assert one_row(triton_ops, gpu_device, [level] * 4, top_p=0.5).tolist() == [0.5, 0.5, 0.0, 0.0]
    assert kept(triton_ops, gpu_device, [level] * 700, top_p=0.5) == list(range(350))
    assert kept(triton_ops, gpu_device, [level] * 4, top_p=0.51) == [0, 1, 2]
    assert kept(triton_ops, gpu_device, [level, level + 2, level], top_p=0.0) == [1]
    mixed = [level, level + 1, level, level + 1, level]  # e to 1: the two likelier ones have 0.644 of all
    assert kept(triton_ops, gpu_device, mixed, top_p=0.7) == [0, 1, 3]
    bfloat = torch.tensor(mixed, dtype=torch.bfloat16)
    assert kept(triton_ops, gpu_device, bfloat, top_p=0.8) == [0, 1, 2, 3]


@DTYPES
@pytest.mark.fast_cases(1)
def test_filters_of_a_row_that_is_searched_in_part_and_as_a_whole(
    triton_ops: ModuleType, gpu_device: str, dtype: torch.dtype
) -> None:
    """Peaked rows, whose candidates fit into the lists of chunks; flat ones, and a k beyond the parts of all chunks."""
    gen = torch.Generator().manual_seed(8)
    flat, peaked = 1e-2 * torch.randn(1300, generator=gen), 6 * torch.randn(1300, generator=gen)
    flat[700:] -= 30  # all candidates are in two of three chunks
    settings = [(0, 0.9), (0, 0.9), (7, 1.0), (7, 0.8), (40, 1.0), (24, 0.999999)]
    top_k, top_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    logits = torch.stack([flat, peaked, flat, peaked, peaked, flat])[:, None].to(dtype)
    filters = torch.ones(6), top_k, top_p, torch.zeros(6)
    probs = triton_ops.probabilities(*on(gpu_device, logits, *filters)).cpu()
    want = reference.probabilities(logits.double(), *filters)
    if dtype is torch.float32:  # neighbours in bfloat16 are equal, and the sums of many equal weights are rounded
        assert torch.equal(probs > 0, want > 0)
    assert ((probs > 0).sum(-1) - (want > 0).sum(-1)).abs().max() <= 1
    torch.testing.assert_close(probs.double(), want, rtol=1e-3, atol=1e-5)


def test_top_p_of_one_keeps_even_what_rounding_hides(triton_ops: ModuleType, gpu_device: str) -> None:
    assert kept(triton_ops, gpu_device, [0.0, 0.0, -25.0]) == [0, 1, 2]


def test_top_p_measures_what_top_k_left(triton_ops: ModuleType, gpu_device: str) -> None:
    probs = one_row(triton_ops, gpu_device, [5.0, 5.0, 4.0, 4.0], top_k=2, top_p=0.9)
    assert probs.tolist() == [0.5, 0.5, 0.0, 0.0]
    assert kept(triton_ops, gpu_device, [5.0, 5.0, 4.0, 4.0], top_k=2, top_p=0.5) == [0]


def test_min_p_is_relative_to_the_most_likely_token(triton_ops: ModuleType, gpu_device: str) -> None:
    assert kept(triton_ops, gpu_device, [0.0, -1.0, -3.0], min_p=0.3) == [0, 1]
    assert kept(triton_ops, gpu_device, [1.0, 1.0, 0.0], min_p=1.0) == [0, 1]


def test_temperature_zero_is_one_hot_on_the_lowest_argmax(triton_ops: ModuleType, gpu_device: str) -> None:
    one_hot = one_row(triton_ops, gpu_device, [1.0, 4.0, 4.0], temperature=0.0, top_p=0.1, min_p=0.5)
    assert one_hot.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("filtered", [True, False])
def test_choices_stay_in_the_vocabulary(triton_ops: ModuleType, gpu_device: str, value: float, filtered: bool) -> None:
    """What is no number decides nothing, but the choice is used as an index before that is found out."""
    logits = make_logits(2, 530, seed=9)[:4]
    logits[::2, 0], logits[1::2, 0, 520] = value, value
    uniforms = torch.full((4, 2), 0.999)
    settings = [x if x is None else x[:4] for x in (SETTINGS if filtered else (SETTINGS[0], *NO_FILTERS))]
    tokens = triton_ops.sample(*on(gpu_device, logits, *settings, uniforms)).cpu()
    assert bool(((tokens >= 0) & (tokens < 530)).all())
    assert torch.equal(tokens[:, 1], reference.sample(logits.double()[:, 1:], *settings, uniforms[:, 1:])[:, 0])


@DTYPES
@pytest.mark.parametrize("nodes", [1, 6])
def test_penalize_matches_reference(triton_ops: ModuleType, gpu_device: str, nodes: int, dtype: torch.dtype) -> None:
    arguments = penalized(nodes, dtype)
    there = on(gpu_device, *arguments)
    got = triton_ops.penalize(*there[:5], there[5:]).cpu()
    torch.testing.assert_close(got, reference.penalize(*arguments[:5], arguments[5:]), rtol=1e-5, atol=1e-6)
    assert torch.equal(got[0], arguments[0][0].float())  # neutral settings change nothing at all
    assert all(torch.equal(a, b.cpu()) for a, b in zip(arguments, there, strict=True))


def test_a_long_vocabulary_is_penalised_in_blocks(triton_ops: ModuleType, gpu_device: str) -> None:
    """More tokens than one program takes; and rows that lie apart."""
    logits = torch.randn(1, 3, 2500, generator=torch.Generator().manual_seed(1))[..., :2300]
    counts, prompt = torch.zeros(1, 2300, dtype=torch.int32), torch.zeros(1, 2300, dtype=torch.bool)
    counts[0, 1024], prompt[0, 2299], one = 2, True, torch.ones(1)
    tokens, mask = torch.tensor([[5, 1023, 2047]]), mask_of(torch.tensor([[-1, 0, 1]]))
    arguments = logits, counts, prompt, tokens, mask, one * 0.5, one * 0.25, one * 2
    there = on(gpu_device, *arguments)
    got = triton_ops.penalize(*there[:5], there[5:]).cpu()
    torch.testing.assert_close(got, reference.penalize(*arguments[:5], arguments[5:]), rtol=1e-5, atol=1e-6)
    assert (got != logits).sum(-1).tolist() == [[2, 3, 4]]


def test_rejection_waits_for_the_content_of_no_tensor() -> None:
    """What stays in PyTorch runs on tensors that have no content: a CUDA graph can hold it."""
    probs, uniforms = torch.empty(2, 5, 1300, device="meta"), torch.empty(2, 5, 3, device="meta")
    tokens, is_drawn = sampling.draw_children(probs, uniforms)
    assert tokens.shape == is_drawn.shape == (2, 5, 3)
    nodes = tokens[..., 0]
    for draft_probs in (None, probs):
        choice = sampling.residual_choice(probs, nodes, nodes, draft_probs, 3, uniforms[..., 0], uniforms[..., 0])
        assert choice.shape == (2, 5)
    settings = (x.to("meta") for x in SETTINGS)
    assert torch_ops.sample(torch.empty(8, 2, 1300, device="meta"), *settings, uniforms[0, :2, 0]).shape == (8, 2)


@pytest.mark.usefixtures("launchable")
@pytest.mark.parametrize(
    ("name", "num_arguments"),
    [("uniform", 2), ("argmax", 1), ("checked_argmax", 1), ("sample", 6), ("probabilities", 5), ("penalize", 6)],
)
def test_triton_is_chosen_where_it_runs(name: str, num_arguments: int) -> None:
    operator = operator_of(getattr(sampling, name))
    assert operator.choose(*[torch.zeros(1, 1, 4)] * num_arguments) == "triton"


@pytest.mark.gpu
def test_a_graph_holds_the_choice_of_tokens(triton_ops: ModuleType) -> None:
    """Sampling with filters and the rejection rule are captured once, and replayed with other numbers."""
    logits, uniforms = make_logits(2, 1300, seed=3).cuda(), torch.rand(8, 2, device="cuda")
    settings, parents = [x.cuda() for x in SETTINGS], torch.tensor([[-1, 0]] * 8, device="cuda")

    def choose() -> tuple[Tensor, ...]:
        probs = triton_ops.probabilities(logits, *settings)
        children, _ = sampling.draw_children(probs, uniforms[..., None])
        drafts = children[..., 0].roll(1, 1)
        rejected = sampling.residual_choice(probs, drafts, parents, probs, 1, uniforms, uniforms)
        sampled = triton_ops.sample(logits, *settings, uniforms)
        return sampled, rejected, children, triton_ops.argmax(logits), triton_ops.has_finite_max(logits)

    torch.use_deterministic_algorithms(False)  # else fresh memory is filled, which is no part of a step
    choose()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = choose()
    logits.copy_(make_logits(2, 1300, seed=4))
    uniforms.uniform_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, choose(), strict=True))
