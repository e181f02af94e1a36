"""Sampling: every form against the reference; the generator bit for bit, the filters by hand-made rows."""

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import sampling
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.sampling import native_ops, reference, torch_ops
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

INT64 = torch.iinfo(torch.int64)
# temperature, top_k, top_p, min_p, one row each: plain, every filter alone, filters together, greedy
SETTINGS = (
    torch.tensor([1.0, 0.7, 1.0, 1.0, 0.9, 0.0, 1.5, 0.05]),
    torch.tensor([0, 5, -1, 0, 20, 3, 1000, 1]),
    torch.tensor([1.0, 1.0, 0.8, 1.0, 0.9, 0.5, 0.95, 1.0]),
    torch.tensor([0.0, 0.0, 0.0, 0.1, 0.02, 0.3, 0.05, 0.0]),
)
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

NO_FILTERS = None, None, None
needs_native = pytest.mark.usefixtures("needs_native")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SIZES = pytest.mark.parametrize(("nodes", "vocabulary"), [(1, 1), (1, 3), (7, 50), (4, 257), (2, 512), (3, 1300)])


@pytest.fixture(params=["torch_ops", "native_ops"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "torch_ops":
        return torch_ops
    request.getfixturevalue("needs_native")
    return native_ops


def one_row(ops: ModuleType, logits: list[float], **changes: float) -> Tensor:
    """``probabilities`` of a single row of logits under named settings -> [V]."""
    settings = (torch.tensor([value]) for value in (NEUTRAL | changes).values())
    probs: Tensor = ops.probabilities(torch.tensor(logits)[None, None], *settings)[0, 0]
    return probs


def make_logits(nodes: int, vocabulary: int, seed: int) -> Tensor:
    """[8, N, V]; spread so that no filter boundary is decided by rounding, some tokens impossible."""
    logits = 2.5 * torch.randn(8, nodes, vocabulary, generator=torch.Generator().manual_seed(seed))
    logits[:, :, vocabulary // 2 :: 11] = float("-inf")
    return logits


def test_uniform_agrees_bit_for_bit() -> None:
    gen = torch.Generator().manual_seed(0)
    seeds = torch.cat([torch.tensor([0, 1, -1, INT64.max, INT64.min]), torch.randint(INT64.max, (20,), generator=gen)])
    positions = torch.randint(2**40, (25, 9), generator=gen)
    positions[:, :4] = torch.tensor([0, 1, 2**31, INT64.max - 1])
    uniforms = torch_ops.uniform(seeds, positions)
    assert uniforms.dtype == torch.float32
    assert uniforms.shape == (25, 9)
    assert torch.equal(uniforms, reference.uniform(seeds, positions))
    assert uniforms.min() >= 0
    assert uniforms.max() < 1


def test_uniform_of_a_stream_agrees_bit_for_bit() -> None:
    seeds = torch.tensor([0, 1, -1, INT64.max, INT64.min])
    positions = torch.randint(2**40, (5, 7), generator=torch.Generator().manual_seed(1))
    for stream in (0, 1, 2, 3, 1000):
        want = reference.uniform(seeds, positions, stream=stream)
        assert torch.equal(torch_ops.uniform(seeds, positions, stream), want)
        assert torch.equal(sampling.uniform(seeds, positions, stream), want)
    deep = torch_ops.uniform(seeds, positions.view(5, 7, 1).expand(-1, -1, 2), 3)
    assert torch.equal(deep[..., 1], torch_ops.uniform(seeds, positions, 3))
    assert torch.equal(deep, sampling.uniform(seeds, positions.view(5, 7, 1).expand(-1, -1, 2), 3))


def test_uniform_keeps_its_numbers() -> None:
    """Seeded text must not change from version to version."""
    seeds, positions = torch.tensor([0, 1, -1, INT64.max]), torch.tensor([0, 1, 2**40]).expand(4, -1)
    want = [
        [10946269, 11764387, 2398879],
        [6177195, 15830380, 350269],
        [6144522, 12428646, 9126874],
        [6932953, 8356977, 84023],
    ]
    assert (torch_ops.uniform(seeds, positions) * 2**24).tolist() == want
    assert (torch_ops.uniform(seeds, positions, 2) * 2**24)[0].tolist() == [4078447, 13760599, 1144352]


def test_streams_are_independent() -> None:
    """Chi-square over a grid of the same counters in two streams, and of neighbouring seeds in one."""
    counters = torch.arange(40_000)[None]
    seed = torch.tensor([123])
    numbers = [torch_ops.uniform(seed, counters, stream)[0] for stream in range(4)]
    for first, second in itertools.combinations(numbers, 2):
        cells = (first * 10).long() * 10 + (second * 10).long()
        counts = torch.bincount(cells, minlength=100)
        assert float(((counts - 400) ** 2 / 400).sum()) < 161  # 99 degrees of freedom: beyond 161 once in 10,000


def test_uniform_is_a_pure_function_of_seed_and_position() -> None:
    positions = torch.arange(12).expand(3, 12)
    whole = torch_ops.uniform(torch.tensor([7, 8, 7]), positions)
    assert torch.equal(whole[0], whole[2])
    assert not torch.equal(whole[0], whole[1])
    assert torch.equal(torch_ops.uniform(torch.tensor([8]), positions[:1, 3:5])[0], whole[1, 3:5])


def test_uniform_is_uniform_within_and_across_seeds() -> None:
    along = torch_ops.uniform(torch.tensor([123]), torch.arange(40_000)[None])
    across = torch_ops.uniform(torch.arange(40_000), torch.zeros(40_000, 1, dtype=torch.int64))
    for sample in (along.flatten(), across.flatten()):
        counts = torch.histc(sample, bins=20, min=0, max=1)
        chi_square = float(((counts - 2000) ** 2 / 2000).sum())
        assert chi_square < 50  # 19 degrees of freedom: beyond 50 once in 7,000 generators, and this one is fixed


@pytest.mark.parametrize(("nodes", "vocabulary"), [(1, 1), (1, 3), (3, 50), (5, 257)])
def test_probabilities_match_reference(ops: ModuleType, nodes: int, vocabulary: int) -> None:
    logits = make_logits(nodes, vocabulary, seed=vocabulary) if vocabulary > 1 else torch.zeros(8, nodes, 1)
    before = logits.clone()
    probs = ops.probabilities(logits, *SETTINGS)
    want = reference.probabilities(logits.double(), *SETTINGS)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.double(), want, rtol=1e-5, atol=1e-6)
    assert torch.equal(probs > 0, want > 0)
    torch.testing.assert_close(probs.sum(-1), torch.ones(8, nodes))
    assert torch.equal(logits, before)


def test_top_k_keeps_ties_with_the_last(ops: ModuleType) -> None:
    assert (one_row(ops, [3.0, 1.0, 2.0, 2.0, 0.0], top_k=2) > 0).tolist() == [True, False, True, True, False]
    assert (one_row(ops, [3.0, 1.0, 2.0], top_k=1) > 0).tolist() == [True, False, False]


def test_top_p_ranks_equal_probabilities_by_token_id(ops: ModuleType) -> None:
    assert one_row(ops, [1.0] * 4, top_p=0.5).tolist() == [0.5, 0.5, 0.0, 0.0]
    assert one_row(ops, [1.0] * 256, top_p=0.5).nonzero().flatten().tolist() == list(range(128))
    assert one_row(ops, [1.0] * 4, top_p=0.51).count_nonzero() == 3
    assert one_row(ops, [0.0, 2.0, 0.0], top_p=0.0).tolist() == [0.0, 1.0, 0.0]


def test_top_p_of_one_keeps_even_what_rounding_hides(ops: ModuleType) -> None:
    """The two likeliest tokens already sum to exactly 1 in floating point."""
    assert bool((one_row(ops, [0.0, 0.0, -25.0]) > 0).all())


def test_top_p_measures_what_top_k_left(ops: ModuleType) -> None:
    """Two of four equal tokens hold half of the mass, but all of what is left after top-k."""
    probs = one_row(ops, [5.0, 5.0, 4.0, 4.0], top_k=2, top_p=0.9)
    assert probs.tolist() == [0.5, 0.5, 0.0, 0.0]
    assert one_row(ops, [5.0, 5.0, 4.0, 4.0], top_k=2, top_p=0.5).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_min_p_is_relative_to_the_most_likely_token(ops: ModuleType) -> None:
    probs = one_row(ops, [0.0, -1.0, -3.0], min_p=0.3)  # e^-1 = 0.37 stays, e^-3 = 0.05 goes
    assert (probs > 0).tolist() == [True, True, False]
    assert one_row(ops, [1.0, 1.0, 0.0], min_p=1.0).tolist() == [0.5, 0.5, 0.0]


def test_temperature_zero_is_one_hot_on_the_lowest_argmax(ops: ModuleType) -> None:
    assert one_row(ops, [1.0, 4.0, 4.0], temperature=0.0).tolist() == [0.0, 1.0, 0.0]
    assert one_row(ops, [2.0, 3.0, 3.0 + 1e-6], temperature=0.0).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("absent", [1, 2, 3])
def test_a_filter_that_is_none_keeps_everything(ops: ModuleType, absent: int) -> None:
    """Each filter left out alone, on the reference and on torch_ops, against its neutral value."""
    logits = make_logits(3, 50, seed=absent)
    neutral = torch.full_like(SETTINGS[absent], list(NEUTRAL.values())[absent])
    temperature, *filters = SETTINGS
    replaced = [neutral if i == absent else x for i, x in enumerate(filters, start=1)]
    left_out = [None if i == absent else x for i, x in enumerate(filters, start=1)]
    want = reference.probabilities(logits, temperature, *replaced)
    torch.testing.assert_close(reference.probabilities(logits, temperature, *left_out), want)
    torch.testing.assert_close(ops.probabilities(logits, temperature, *left_out), want, rtol=1e-5, atol=1e-6)
    assert ops.probabilities(logits, SETTINGS[0], None, None, None).shape == logits.shape


@pytest.mark.parametrize(("nodes", "vocabulary"), [(1, 3), (7, 50), (4, 257), (2, 512), (3, 1300)])
def test_sample_matches_reference(ops: ModuleType, nodes: int, vocabulary: int) -> None:
    logits = make_logits(nodes, vocabulary, seed=vocabulary + 1)
    uniforms = torch.rand(8, nodes, generator=torch.Generator().manual_seed(nodes))
    tokens = ops.sample(logits, *SETTINGS, uniforms)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (8, nodes)
    assert torch.equal(tokens, reference.sample(logits, *SETTINGS, uniforms))


@pytest.mark.parametrize("vocabulary", [257, 1300])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_sample_never_returns_an_impossible_token(ops: ModuleType, uniform: float, vocabulary: int) -> None:
    """The ends of the interval: the first and the last possible token, also where rounding loses some mass."""
    logits = make_logits(6, vocabulary, seed=5)
    logits[:, :, 520:1030] = float("-inf")  # of 1,300 tokens, all of one block but its ends
    logits[:, :, 0] = logits[:, :, -1] = float("-inf")
    tokens = ops.sample(logits, *SETTINGS, torch.full((8, 6), uniform))
    assert bool((ops.probabilities(logits, *SETTINGS).gather(2, tokens[..., None]) > 0).all())


def test_sample_of_a_large_vocabulary_follows_the_cumulative_distribution(ops: ModuleType) -> None:
    """Every token of 1,300 is met where its own share of the interval begins and ends."""
    logits = 3 * torch.randn(1, 1, 1300, generator=torch.Generator().manual_seed(6))
    settings = [torch.tensor([value]) for value in NEUTRAL.values()]
    cumulative = ops.probabilities(logits, *settings).double().cumsum(-1)[0, 0]
    edges = torch.cat([torch.zeros(1, dtype=torch.float64), cumulative / cumulative[-1]])
    is_wide = edges.diff() > 1e-5  # the others are narrower than rounding may move an edge
    for inside in (edges[:-1] + 1e-6, edges[1:] - 1e-6):
        tokens = ops.sample(logits.expand(1, 1300, -1), *settings, inside[None].float())
        assert torch.equal(tokens[0, is_wide], torch.arange(1300)[is_wide])
    assert is_wide.sum() > 600


@needs_native
@DTYPES
@SIZES
def test_native_sample_matches_reference(nodes: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits = make_logits(nodes, vocabulary, seed=vocabulary + 2).to(dtype) if vocabulary > 1 else torch.zeros(8, 1, 1)
    uniforms = torch.rand(8, nodes, generator=torch.Generator().manual_seed(nodes))
    tokens = native_ops.sample(logits, SETTINGS[0], *NO_FILTERS, uniforms)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, reference.sample(logits.double(), SETTINGS[0], *NO_FILTERS, uniforms))


@needs_native
@DTYPES
@pytest.mark.parametrize("vocabulary", [40, 1300, 5000])
def test_native_filters_match_reference(vocabulary: int, dtype: torch.dtype) -> None:
    """Every setting in every kind of row: spread, with many ties, all equal, and with one token that has all."""
    gen = torch.Generator().manual_seed(vocabulary)
    rows = [3 * torch.randn(vocabulary, generator=gen), torch.randint(-4, 4, (vocabulary,), generator=gen) / 2]
    rows += [torch.full((vocabulary,), -7.0), torch.full((vocabulary,), -torch.inf).index_fill(0, torch.tensor(7), 1.0)]
    logits = torch.stack(rows).to(dtype).expand(8, -1, -1)
    probs, want = native_ops.probabilities(logits, *SETTINGS), reference.probabilities(logits.double(), *SETTINGS)
    torch.testing.assert_close(probs.double(), want, rtol=1e-5, atol=1e-7)
    assert torch.equal(probs > 1e-30, want > 1e-30)
    uniforms = torch.rand(8, 4, generator=gen)
    tokens = native_ops.sample(logits, *SETTINGS, uniforms)
    assert torch.equal(tokens, reference.sample(logits.double(), *SETTINGS, uniforms))


@needs_native
def test_native_filters_of_extreme_rows() -> None:
    """Temperatures next to 0 and beyond all, large logits close together, and tokens of no mass among those kept."""
    row = torch.cat([torch.tensor([1000.0, 1000.0 - 2**-13]), torch.linspace(-900, 999, 700)])
    temperature = torch.tensor([1e-38, 1e-5, 1e30, 1.0])
    for top_k, top_p, min_p in ((2, 1.0, 0.0), (0, 0.45, 0.0), (0, 1.0, 0.6), (3, 0.7, 0.0)):
        filters = torch.full((4,), top_k), torch.full((4,), top_p), torch.full((4,), min_p)
        probs = native_ops.probabilities(row.expand(4, 1, -1), temperature, *filters)
        want = reference.probabilities(row.double().expand(4, 1, -1), temperature, *filters)
        torch.testing.assert_close(probs.double(), want, rtol=1e-4, atol=1e-6)
        tokens = native_ops.sample(row.expand(4, 1, -1), temperature, *filters, torch.zeros(4, 1))
        assert bool((want.gather(-1, tokens[..., None]) > 0).all())


@needs_native
@DTYPES
def test_native_filters_of_logits_that_are_no_numbers(dtype: torch.dtype) -> None:
    """NaN and +inf have no mass; a row without any number gives some token and no probabilities."""
    logits = make_logits(4, 600, seed=9).to(dtype)
    sound = logits.clone()
    logits[:, 0, ::5], sound[:, 0, ::5] = torch.nan, -torch.inf
    logits[:, 1, 3::7], sound[:, 1, 3::7] = torch.inf, -torch.inf
    logits[:, 2], logits[:, 3] = torch.nan, -torch.inf
    is_drawn = SETTINGS[0] > 0
    settings = [x[is_drawn] for x in SETTINGS]
    probs = native_ops.probabilities(logits[is_drawn], *settings)
    assert torch.equal(probs[:, :2], native_ops.probabilities(sound[is_drawn][:, :2].contiguous(), *settings))
    assert not bool(probs[:, 2:].any())
    tokens = native_ops.sample(logits[is_drawn], *settings, torch.full((7, 4), 0.999))
    assert bool(((tokens >= 0) & (tokens < 600)).all())
    assert bool((probs.gather(-1, tokens[..., None])[:, :2] > 0).all())


@needs_native
def test_native_penalties_are_pytorchs() -> None:
    """Bit for bit, of any width, also of logits that are no numbers."""
    for vocabulary in (3, 16, 70):
        for dtype in (torch.float32, torch.bfloat16):
            logits, counts, prompt, *rest = penalized(6, dtype)
            widen = [x.repeat(*[1] * (x.ndim - 1), 4)[..., :vocabulary].contiguous() for x in (logits, counts, prompt)]
            widen[0][0, :, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan]).to(dtype)
            tokens = rest[0].clamp(max=vocabulary - 1)
            arguments = *widen, tokens, rest[1], tuple(rest[2:])
            got, want = native_ops.penalize(*arguments), torch_ops.penalize(*arguments)
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@DTYPES
@SIZES
def test_argmax_matches_reference(ops: ModuleType, nodes: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Few different values, so that most rows have several largest ones; views are read as well."""
    gen = torch.Generator().manual_seed(vocabulary)
    logits = torch.randint(-3, 3, (2, nodes, 2 * vocabulary), generator=gen).to(dtype)[..., ::2]
    logits[0, 0] = float("-inf")
    assert torch.equal(ops.argmax(logits), reference.argmax(logits))


def logits_of_any_maximum(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits [3, 5, V] whose maxima are finite, infinite and NaN, and which maxima are finite."""
    logits = torch.full((3, 5, vocabulary), -torch.inf, dtype=dtype)
    logits[1:] = torch.randn(2, 5, vocabulary)
    logits[0, 0, vocabulary // 2] = -1e30
    for node, value in enumerate((torch.nan, torch.inf, -torch.inf, 3e38)):
        logits[1, node, vocabulary - 1] = value
    want = reference.has_finite_max(logits)
    assert want[:2].tolist() == [[True, *[False] * 4], [False, False, vocabulary > 1, True, True]]
    return logits, want


@DTYPES
@pytest.mark.parametrize("vocabulary", [1, 16, 37])
def test_has_finite_max_matches_reference(ops: ModuleType, vocabulary: int, dtype: torch.dtype) -> None:
    logits, want = logits_of_any_maximum(vocabulary, dtype)
    assert torch.equal(ops.has_finite_max(logits), want)
    assert torch.equal(ops.checked_argmax(logits)[0], ops.argmax(logits))
    assert torch.equal(ops.checked_argmax(logits)[1], want)


@needs_native
@DTYPES
def test_threads_change_nothing(dtype: torch.dtype, set_threads: Callable[[int], None]) -> None:
    """More logits than one thread takes alone."""
    gen = torch.Generator().manual_seed(8)
    logits = torch.randn(3, 5, 3000, generator=gen).to(dtype)
    logits[2, 1, 7] = torch.nan
    uniforms = torch.rand(3, 5, generator=gen)
    results = []
    for count in (1, 2):
        set_threads(count)
        sampled = native_ops.sample(logits, torch.tensor([0.7, 0.0, 1.3]), *NO_FILTERS, uniforms)
        filters = torch.tensor([9, 0, 0]), torch.tensor([1.0, 0.5, 0.9]), torch.tensor([0.0, 0.1, 0.0])
        settings = torch.tensor([0.7, 0.9, 1.3]), *filters
        filtered = native_ops.sample(logits, *settings, uniforms), native_ops.probabilities(logits, *settings)
        results.append((native_ops.argmax(logits), native_ops.has_finite_max(logits), sampled, *filtered))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    alone = torch.cat([native_ops.argmax(row) for row in logits.flatten(0, 1).split(1)])
    assert torch.equal(results[1][0].flatten(), alone)
    rows = [native_ops.probabilities(logits[b : b + 1], *(x[b : b + 1] for x in settings)) for b in range(3)]
    assert torch.equal(results[1][4], torch.cat(rows))


@needs_native
def test_native_random_numbers_are_the_cpus() -> None:
    seeds, positions = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
    assert native_ops.can_draw(seeds, positions)
    assert not native_ops.can_draw(seeds.to("meta"), positions)
    assert not native_ops.can_draw(seeds, positions.to("meta"))


@needs_native
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_native_choices_stay_in_the_vocabulary(value: float) -> None:
    """What is no number decides nothing, but the choice is used as an index before that is found out."""
    logits = torch.zeros(2, 3, 1300)
    logits[0], logits[1, 1, 700] = value, value
    uniforms = torch.full((2, 3), 0.999)
    for tokens in (
        native_ops.argmax(logits),
        native_ops.sample(logits, torch.tensor([0.7, 1.3]), *NO_FILTERS, uniforms),
    ):
        assert bool(((tokens >= 0) & (tokens < 1300)).all())


@needs_native
def test_native_code_samples_what_it_can_read() -> None:
    logits, ones = torch.zeros(1, 1, 8), torch.ones(1)
    for filters in (NO_FILTERS, (ones.long(), None, None), (None, ones, None), (None, None, ones)):
        for operator, last in ((sampling.sample, [ones[None]]), (sampling.probabilities, [])):
            assert operator_of(operator).choose(logits, ones, *filters, *last) == "native"
            assert operator_of(operator).choose(logits.half(), ones, *filters, *last) == "torch"


@needs_native
def test_native_code_refuses_what_does_not_fit() -> None:
    logits, ones = torch.zeros(2, 3, 8), torch.ones(2)
    for wrong in [
        (native_ops.sample, logits, ones[:1], *NO_FILTERS, torch.zeros(2, 3)),
        (native_ops.sample, logits, ones, *NO_FILTERS, torch.zeros(2, 2)),
        (native_ops.sample, logits, ones.double(), *NO_FILTERS, torch.zeros(2, 3)),
        (native_ops.sample, logits[..., :0], ones, *NO_FILTERS, torch.zeros(2, 3)),
        (native_ops.sample, logits, ones, ones, None, None, torch.zeros(2, 3)),
        (native_ops.probabilities, logits, ones, None, ones[:1], None),
        (native_ops.probabilities, logits[..., :0], ones, *NO_FILTERS),
        (native_ops.penalize, logits, torch.zeros(2, 8, dtype=torch.int32), *[torch.zeros(2, 3)] * 3, (ones,) * 3),
        (native_ops.argmax, logits[..., :0]),
        (native_ops.uniform, ones.long(), torch.zeros(3, 1, dtype=torch.int64)),
        (native_ops.uniform, ones, torch.zeros(2, 1)),
    ]:
        op: Any
        op, *arguments = wrong
        with pytest.raises(ValueError, match=r"fit|seed|choose"):
            op(*arguments)


def test_sample_inverts_the_cdf_in_token_order(ops: ModuleType) -> None:
    logits = torch.tensor([0.5, 0.0, 0.25, 0.25]).log().expand(1, 5, 4)
    temperature, top_k, top_p, min_p = (torch.tensor([value]) for value in NEUTRAL.values())
    uniforms = torch.tensor([[0.0, 0.49, 0.51, 0.74, 0.76]])
    assert ops.sample(logits, temperature, top_k, top_p, min_p, uniforms).tolist() == [[0, 0, 2, 2, 3]]


def penalized(nodes: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Arguments of ``penalize``, the three penalties apart; those of the first row are neutral."""
    batch, vocabulary, gen = len(SHAPES), 23, torch.Generator().manual_seed(nodes)
    logits = torch.randn(batch, nodes, vocabulary, generator=gen).to(dtype)
    counts = torch.randint(-3, 4, (batch, vocabulary), generator=gen).clamp(min=0).to(torch.int32)
    prompt_mask = torch.rand(batch, vocabulary, generator=gen) < 0.3
    tokens = torch.randint(6, (batch, nodes), generator=gen)  # few tokens: paths repeat them
    mask = mask_of(batch_of_parents(SHAPES, nodes, seed=nodes))
    presence, frequency = torch.tensor([0.0, 0.5, -0.3, 0.0, 1.2]), torch.tensor([0.0, 0.0, 0.4, 0.7, -0.2])
    repetition = torch.tensor([1.0, 1.3, 1.0, 0.8, 1.1])
    return logits, counts, prompt_mask, tokens, mask, presence, frequency, repetition


@pytest.mark.parametrize("nodes", [1, 6, 12])
def test_penalize_matches_reference(ops: ModuleType, nodes: int) -> None:
    arguments = penalized(nodes, torch.float32)
    before = [x.clone() for x in arguments]
    got = ops.penalize(*arguments[:5], arguments[5:])
    torch.testing.assert_close(got, reference.penalize(*arguments[:5], arguments[5:]), rtol=1e-5, atol=1e-6)
    assert torch.equal(got[0], arguments[0][0])  # neutral settings change nothing at all
    assert all(torch.equal(a, b) for a, b in zip(before, arguments, strict=True))


def test_penalties_follow_each_nodes_own_path(ops: ModuleType) -> None:
    """Siblings with different tokens: each is penalised for its own, the root's token only through the counts."""
    logits = torch.tensor([4.0, -4.0, 4.0, 4.0]).expand(1, 4, 4)
    tokens, parents = torch.tensor([[3, 0, 1, 0]]), torch.tensor([[-1, 0, 0, 1]])
    counts, prompt = torch.zeros(1, 4, dtype=torch.int32), torch.tensor([[False, False, True, False]])
    one = torch.ones(1)
    got = ops.penalize(logits, counts, prompt, tokens, mask_of(parents), (one * 0.5, one, one * 2))
    want = [[4.0, -4.0, 2.0, 4.0], [0.5, -4.0, 2.0, 4.0], [4.0, -9.5, 2.0, 4.0], [-0.5, -4.0, 2.0, 4.0]]
    assert got[0].tolist() == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "k"), [(1, 1), (7, 7), (512, 3), (700, 1), (5000, 16)])
def test_likeliest_tokens(form: str, size: int, k: int, dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(size)) * 5
    logits = logits.to(dtype)
    tokens, logprobs = (native_ops if form == "native" else torch_ops).likeliest(logits, k)
    want_tokens, want = reference.likeliest(logits, k)
    assert (tokens.shape, tokens.dtype, logprobs.dtype) == ((2, 3, k), torch.int64, torch.float32)
    torch.testing.assert_close(logprobs, want)
    assert torch.equal(logits.gather(-1, tokens), logits.gather(-1, want_tokens))
    if form == "native":
        assert torch.equal(tokens, want_tokens)  # ties too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "num_top"), [(1, 0), (7, 7), (700, 1), (5000, 20)])
def test_log_probabilities_of_tokens(form: str, size: int, num_top: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(2, 3, size, generator=generator) * 5).to(dtype)
    tokens = torch.randint(size, (2, 3), generator=generator)
    own, top, top_tokens = (native_ops if form == "native" else torch_ops).token_logprobs(logits, tokens, num_top)
    want = logits.double().log_softmax(-1)
    torch.testing.assert_close(own.double(), want.gather(-1, tokens[..., None])[..., 0], rtol=1e-6, atol=2e-6)
    assert (top.shape, top_tokens.shape, top_tokens.dtype) == ((2, 3, num_top), (2, 3, num_top), torch.int64)
    torch.testing.assert_close(top.double(), want.gather(-1, top_tokens), rtol=1e-6, atol=2e-6)
    order = logits.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(logits.float().gather(-1, top_tokens), order.values[..., :num_top])
    if form == "native":
        assert torch.equal(top_tokens, order.indices[..., :num_top])  # of equal ones the lower id first
        alone = native_ops.token_logprobs(logits[1:, 2:], tokens[1:, 2:], num_top)
        assert all(torch.equal(x, y[1:, 2:]) for x, y in zip(alone, (own, top, top_tokens), strict=True))


@pytest.mark.usefixtures("needs_native")
def test_native_code_refuses_log_probabilities_that_do_not_fit() -> None:
    for tokens, num_top in ((torch.zeros(2, dtype=torch.int64), 1), (torch.zeros(1, dtype=torch.int64), 4)):
        with pytest.raises(ValueError, match="do not fit"):
            native_ops.token_logprobs(torch.zeros(1, 3), tokens, num_top)


def test_likeliest_tokens_of_logits_that_are_not_finite(form: str) -> None:
    logits = torch.zeros(4, 600)
    logits[0, 5], logits[0, 599] = torch.inf, 3
    logits[1, 7], logits[1, 9] = torch.nan, -torch.inf
    logits[2], logits[2, 530] = -torch.inf, 1
    logits[3] = torch.nan
    tokens, logprobs = (native_ops if form == "native" else torch_ops).likeliest(logits, 2)
    want_tokens, want = reference.likeliest(logits, 2)
    assert logprobs.isfinite().all()
    torch.testing.assert_close(logprobs, want)
    assert tokens[:, 0].tolist()[::2] == want_tokens[:, 0].tolist()[::2] == [5, 530]


@pytest.mark.usefixtures("needs_native")
def test_native_code_refuses_to_choose_more_tokens_than_there_are() -> None:
    for k in (0, 4):
        with pytest.raises(ValueError, match="so many tokens"):
            native_ops.likeliest(torch.zeros(1, 3), k)


@DTYPES
def test_drafts_get_numbers_and_their_logarithms(ops: ModuleType, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.5, -2e5, torch.inf], [-torch.inf, torch.nan, 0.0]], dtype=dtype)
    want = torch.tensor([[1.5, -2e5, 1e4], [-1e4, -1e4, 0.0]])
    torch.testing.assert_close(ops.finite(logits.t()), want.t(), rtol=2**-8 * (dtype == torch.bfloat16), atol=0)
    assert ops.finite(logits).dtype == torch.float32
    x = torch.rand(3, 1, 5)
    x[0, 0, 0] = 0
    torch.testing.assert_close(ops.log(x.transpose(0, 2)), x.double().log().float().transpose(0, 2))
