"""One property per operator: on operands of any size, every form that runs here computes what the reference does.

The case tables of the other files hold the sizes that are known to matter; here Hypothesis looks for others. The fast
tier tries a few, the slow tier many.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis", reason="needs hypothesis, which images for GPUs have not")
from hypothesis import given, settings
from hypothesis import strategies as st

from specmamba.kernels.causal_conv1d import reference as conv_reference
from specmamba.kernels.causal_conv1d import torch_ops as conv_ops
from specmamba.kernels.gated_delta_rule import reference as delta_reference
from specmamba.kernels.gated_delta_rule import torch_ops as delta_ops
from specmamba.kernels.linear import torch_ops as linear_ops
from specmamba.kernels.moe import reference as moe_reference
from specmamba.kernels.moe import torch_ops as moe_ops
from specmamba.kernels.paged_attention import reference as attention_reference
from specmamba.kernels.rowwise import native_ops as native_rowwise
from specmamba.kernels.rowwise import reference as rowwise_reference
from specmamba.kernels.rowwise import torch_ops as rowwise_ops
from specmamba.kernels.sampling import native_ops as native_sampling
from specmamba.kernels.sampling import reference as sampling_reference
from specmamba.kernels.sampling import torch_ops as sampling_ops
from specmamba.kernels.selective_scan import native_ops as native_scan
from specmamba.kernels.selective_scan import reference as scan_reference
from specmamba.kernels.selective_scan import torch_ops as scan_ops
from specmamba.kernels.ssd import reference as ssd_reference
from specmamba.kernels.ssd import torch_ops as ssd_ops
from specmamba.kernels.state_records import TreePlacement
from specmamba.kernels.state_records import native_ops as native_records
from specmamba.kernels.state_records import reference as records_reference
from specmamba.kernels.state_records import torch_ops as records_ops
from specmamba.kernels.tree import reference as tree_reference
from specmamba.kernels.tree import torch_ops as tree_ops
from tests.exactness import why_not_native
from tests.kernels import (
    test_attention_runs,
    test_moe,
    test_paged_attention,
    test_rejection,
    test_rowwise,
    test_tree,
)
from tests.kernels.linear import test_linear
from tests.kernels.recurrent import (
    test_delta_net,
    test_gated_delta_rule,
    test_mamba2,
    test_selective_scan,
    test_short_conv,
    test_ssd,
    test_state_copy,
)
from tests.kernels.recurrent.records import make_state
from tests.kernels.recurrent.run_case import RunCase
from tests.kernels.recurrent.strong_decay import mixed, pending_records
from tests.kernels.rounding import tolerance
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

Heads = tuple[int, int, int, int]
each_tier = pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.slow)], ids=["few", "many"])
FORMS = ["torch"] + ["native"] * (why_not_native() is None)

seeds = st.integers(0, 1000)
sizes = st.integers(1, 9)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
heads = st.builds(lambda hk, group, k, v: (hk, hk * group, k, v), *[st.integers(1, 3)] * 2, *[st.integers(1, 33)] * 2)
pendings = st.lists(st.integers(0, 7), min_size=1, max_size=5)
# a few values, one of which each place has: next to 0, moderate, or so strong that nothing is left
log_decays = st.lists(
    st.one_of(st.floats(-3000.0, 0.0), st.floats(-2.0, 0.0), st.floats(-1e-3, 0.0)), min_size=1, max_size=6
).map(torch.tensor)
shapes = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4).map(tuple)


def hold(count: int, check: Callable[..., None], **operands: st.SearchStrategy[Any]) -> None:
    """Check this many examples."""
    settings(max_examples=count)(given(**operands)(check))()


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@each_tier
def test_causal_conv1d(count: int) -> None:
    def check(lengths: list[int], channels: int, width: int, dtype: torch.dtype, seed: int) -> None:
        x, weight = normal(len(lengths), 12, channels, seed=seed, dtype=dtype), normal(channels, width, seed=seed + 1)
        window = normal(len(lengths), width - 1, channels, seed=seed + 2, dtype=dtype)
        arguments = x, window, weight.to(dtype), torch.tensor(lengths), normal(channels, seed=seed + 3)
        (y, after), (want, want_after) = conv_ops.extend(*arguments), conv_reference.extend(*arguments)
        for row, length in enumerate(lengths):
            torch.testing.assert_close(y[row, :length], want[row, :length], **tolerance(dtype, magnitude=0.1))
        assert torch.equal(after, want_after)

    lengths = st.lists(st.integers(0, 12), min_size=1, max_size=4)
    hold(count, check, lengths=lengths, channels=sizes, width=st.integers(2, 5), dtype=dtypes, seed=seeds)


@each_tier
@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "ssd"])
def test_recurrences(name: str, count: int) -> None:
    """Known tokens, then a tree behind pending records, at any decays."""
    reference, ops = (ssd_reference, ssd_ops) if name == "ssd" else (delta_reference, delta_ops)

    def make_tokens(batch: int, length: int, of: Heads, seed: int, decays: torch.Tensor) -> Any:
        if name == "ssd":
            tokens: Any = test_ssd.make_tokens(batch, length, of, seed)
        else:
            tokens = test_gated_delta_rule.make_tokens(batch, length, of, seed)[0]
        by_channel = (of[2],) * (name == "kda")
        return tokens._replace(g=mixed(decays, torch.Size((*tokens.g.shape, *by_channel)), seed))

    def check(of: Heads, pending: list[int], nodes: int, length: int, decays: torch.Tensor, seed: int) -> None:
        batch, offset, counts = len(pending), max(pending), torch.tensor(pending)
        state = make_state(batch, of, seed)
        tokens, lengths = make_tokens(batch, length, of, seed, decays), torch.full((batch,), length)
        _assert_close(
            ops.extend(*tokens, state, lengths), reference.extend(*tokens.double(), state.double(), lengths), terms=160
        )
        tokens = make_tokens(batch, nodes, of, seed, decays)
        records = pending_records(offset + nodes, of, counts, seed, decays, has_channels=name == "kda")
        wanted, mask = records.clone(torch.float64), mask_of(batch_of_parents(("bushy",) * batch, nodes, seed))
        out = ops.tree_verify(*tokens, state, records, TreePlacement(counts, offset, mask))
        want = reference.tree_verify(*tokens.double(), state.double(), wanted, TreePlacement(counts, offset, mask))
        _assert_close((out, *(x[:, offset:] for x in records)), (want, *(x[:, offset:] for x in wanted)), terms=160)

    operands = {"of": heads, "pending": pendings, "nodes": sizes, "decays": log_decays, "seed": seeds}
    hold(count, check, length=st.integers(1, 70), **operands)


@each_tier
@pytest.mark.parametrize("form", FORMS)
def test_selective_scans(form: str, count: int) -> None:
    """The recurrence of Mamba1: known tokens, a tree behind pending records, and a fold, at any decays."""
    scan, reference = test_selective_scan, scan_reference

    def check(of: tuple[int, int], pending: list[int], nodes: int, decays: torch.Tensor, seed: int) -> None:
        batch, offset, counts = len(pending), max(pending), torch.tensor(pending)

        def make_tokens(length: int, seed: int) -> test_selective_scan.Tokens:
            tokens = scan.make_tokens(batch, length, of, seed)
            rates = -(torch.rand(of, generator=torch.Generator().manual_seed(seed)))  # so -dt is a channel's strongest
            return tokens._replace(dt=mixed(-decays, tokens.dt.shape, seed), rates=rates)

        tokens, state = make_tokens(offset + nodes, seed), scan.make_state(batch, of)
        got = scan.extended(form, tokens, state, counts + nodes)
        want = reference.extend(*tokens.double(), state.double(), counts + nodes)
        is_token = torch.arange(offset + nodes) < counts[:, None] + nodes
        _assert_close((got[0][is_token], got[1]), (want[0][is_token], want[1]), terms=160)
        tree, records = tokens.part(slice(None), slice(offset, None)), tuple(x.clone() for x in tokens[1:4])
        placement = TreePlacement(counts, offset, mask_of(batch_of_parents(("bushy",) * batch, nodes, seed)))
        out = scan.verified(form, tree, state, records, placement)
        wanted = tuple(x.double() for x in records)
        _assert_close([out], [reference.tree_verify(*tree.double(), state.double(), wanted, placement)], terms=160)
        ops = scan_ops if form == "torch" else native_scan
        folded = ops.fold(state, *records, tokens.rates, counts)
        _assert_close([folded], [reference.fold(state.double(), *wanted, tokens.rates.double(), counts)], terms=160)

    of = st.tuples(st.integers(1, 20), st.integers(1, 140))
    hold(count, check, of=of, pending=pendings, nodes=sizes, decays=log_decays, seed=seeds)


def _assert_close(got: Any, want: Any, terms: int) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, **tolerance(terms=terms))


@each_tier
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("module", [test_delta_net, test_mamba2], ids=["delta_net", "mamba2"])
def test_layers(module: ModuleType, form: str, count: int) -> None:
    def check(of: Heads, nodes: int, pending: list[int], width: int, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        module.Case(of, nodes, pending, width=width, dtype=dtype).check(form)

    hold(count, check, of=heads, nodes=sizes, pending=pendings, width=st.integers(1, 6), dtype=dtypes, seed=seeds)


@each_tier
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("module", [test_delta_net, test_mamba2], ids=["delta_net", "mamba2"])
def test_layers_over_runs(module: ModuleType, form: str, count: int) -> None:
    def check(of: Heads, lengths: list[int], width: int, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        layer = module.Case(of, max(lengths) + 1, [0] * len(lengths), width=width, shapes=("chain",), dtype=dtype)
        RunCase(layer, lengths).check(form)

    lengths = st.lists(st.integers(0, 70), min_size=1, max_size=3)
    hold(count, check, of=heads, lengths=lengths, width=st.integers(1, 6), dtype=dtypes, seed=seeds)


@each_tier
@pytest.mark.parametrize("form", FORMS)
def test_short_convolutions(form: str, count: int) -> None:
    """Trees, and runs of known tokens."""

    def check(
        channels: int, nodes: int, rows: list[tuple[int, int]], width: int, dtype: torch.dtype, seed: int
    ) -> None:
        torch.manual_seed(seed)
        pending, lengths = (list(x) for x in zip(*rows, strict=True))
        layer = {"width": width, "has_bias": seed % 2 == 0, "dtype": dtype}
        test_short_conv.Case(channels, nodes, pending, **layer).check(form)
        test_short_conv.make_run(channels, lengths, **layer).check(form)

    rows = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 70)), min_size=1, max_size=3)
    hold(
        count,
        check,
        channels=st.integers(1, 300),
        nodes=sizes,
        rows=rows,
        width=st.integers(1, 6),
        dtype=dtypes,
        seed=seeds,
    )


@each_tier
@pytest.mark.parametrize("form", FORMS)
def test_attention_of_runs(form: str, count: int) -> None:
    def check(lengths: list[int], context: int, of: Heads, first: int, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        key_heads, query_heads, width, _ = of
        layer = test_attention_runs.make_run(
            lengths, context + max(lengths), (query_heads, key_heads, width + 1), dtype, first
        )
        test_attention_runs.check(form, layer, lengths, dtype)

    lengths = st.lists(st.integers(65, 90), min_size=1, max_size=2)
    context = st.integers(0, 80)
    hold(count, check, lengths=lengths, context=context, of=heads, first=st.integers(0, 2), dtype=dtypes, seed=seeds)


@each_tier
def test_folds(count: int) -> None:
    def check(of: Heads, pending: list[int], decays: torch.Tensor, has_channels: bool, seed: int) -> None:
        counts, state = torch.tensor(pending), make_state(len(pending), of, seed)
        records = pending_records(8, of, counts, seed, decays, has_channels)
        want = records_reference.fold(state.double(), *records.clone(torch.float64), counts)
        for ops in [records_ops] + [native_records] * (len(FORMS) - 1):
            _assert_close([ops.fold(state, *records, counts)], [want], terms=160)

    hold(count, check, of=heads, pending=pendings, decays=log_decays, has_channels=st.booleans(), seed=seeds)


@each_tier
def test_compaction(form: str, count: int) -> None:
    def check(batch: int, moves: int, capacity: int, layers: int, seed: int) -> None:
        capacity, rows = max(moves, capacity), torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:batch]
        moved = test_state_copy.random_moves(batch, moves, capacity, seed)
        test_state_copy.check(form, test_state_copy.make_buffer(layers, 12, capacity, 3), rows.tolist(), *moved)

    hold(count, check, batch=sizes, moves=sizes, capacity=sizes, layers=sizes, seed=seeds)


@each_tier
@pytest.mark.parametrize("form", FORMS)
def test_attention_layers(form: str, count: int) -> None:
    def check(batch: int, nodes: int, context: int, group: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
        of = kv_heads * group, kv_heads, width
        arguments = test_paged_attention.make_layer(batch, nodes, context + nodes, of, width // 2 * 2, dtype)
        got = test_paged_attention.run_layer(form, arguments)
        want = test_paged_attention.run_layer(attention_reference, arguments)
        test_paged_attention.assert_alike(got, want, dtype)

    few = st.integers(1, 3)
    context, width = st.integers(0, 70), st.integers(2, 40)
    hold(count, check, batch=few, nodes=sizes, context=context, group=few, kv_heads=few, width=width, dtype=dtypes)


@each_tier
@pytest.mark.parametrize(("name", "make"), test_rowwise.CASES)
def test_rowwise_operators(name: str, make: Callable[..., Any], count: int) -> None:
    def check(lead: tuple[int, int], width: int, dtype: torch.dtype) -> None:
        arguments = make(dtype, lead, width)
        want = test_rowwise.outputs(getattr(rowwise_reference, name)(*arguments))
        for ops in [rowwise_ops] + [native_rowwise] * (len(FORMS) - 1):
            for x, y in zip(test_rowwise.outputs(getattr(ops, name)(*arguments)), want, strict=True):
                assert x.dtype == y.dtype
                torch.testing.assert_close(x, y, **tolerance(dtype, roundings=2, magnitude=0.5))

    hold(count, check, lead=st.tuples(sizes, sizes), width=st.integers(2, 100), dtype=dtypes)


@each_tier
def test_rotary(count: int) -> None:
    def check(positions: list[int], half: int, scaling: float, dtype: torch.dtype) -> None:
        frequencies = (10000.0 ** -(torch.arange(half) / half)).repeat(2)
        arguments = torch.tensor([positions]), frequencies, scaling, dtype
        for x, y in zip(
            rowwise_ops.rotary_angles(*arguments), rowwise_reference.rotary_angles(*arguments), strict=True
        ):
            torch.testing.assert_close(x, y, **tolerance(dtype, terms=8))

    positions = st.lists(st.integers(0, 300_000), min_size=1, max_size=5)
    hold(count, check, positions=positions, half=st.integers(1, 64), scaling=st.floats(0.5, 2), dtype=dtypes)


@each_tier
def test_tree_bookkeeping(count: int) -> None:
    def check(of: tuple[str, ...], nodes: int, width: int, vocabulary: int, seed: int) -> None:
        parents = batch_of_parents(of, nodes, seed)
        mask = tree_ops.ancestors(parents)
        assert torch.equal(mask, mask_of(parents))
        assert torch.equal(tree_ops.depth(mask), tree_reference.depth(mask))
        assert torch.equal(tree_ops.conv_index(parents, width), tree_reference.conv_index(parents, width))
        tokens, chosen = test_tree.guesses(parents, vocabulary, seed)
        want = tree_reference.accepted_path(tokens, parents, mask, chosen)
        for form in FORMS:
            for x, y in zip(test_tree.accept(form, tokens, parents, mask, chosen), want, strict=True):
                assert torch.equal(x, y)

    hold(count, check, of=shapes, nodes=st.integers(1, 64), width=sizes, vocabulary=sizes, seed=seeds)


@each_tier
def test_sampling(count: int) -> None:
    def check(
        rows: int, nodes: int, vocabulary: int, temperature: float, filters: tuple[int, float, float], seed: int
    ) -> None:
        logits = normal(rows, nodes, vocabulary, seed=seed)
        settings = [torch.full((rows,), x) for x in (temperature, *filters)]
        want = sampling_reference.probabilities(logits.double(), *settings)
        uniforms = test_rejection.uniforms(rows, nodes, seed=seed)
        for ops in [sampling_ops] + [native_sampling] * (len(FORMS) - 1):
            probs = ops.probabilities(logits, *settings)
            torch.testing.assert_close(probs.double(), want, **tolerance(terms=80 / temperature, magnitude=0.1))
            assert torch.equal(ops.argmax(logits), sampling_reference.argmax(logits))
            tokens = ops.sample(logits, *settings, uniforms)
            assert torch.equal(tokens, sampling_reference.sample(logits.double(), *settings, uniforms))

    temperature, vocabulary = st.sampled_from([0.125, 0.7, 1.0, 2.5]), st.integers(1, 300)
    filters = st.tuples(st.integers(0, 9), st.sampled_from([1.0, 0.9, 0.37]), st.sampled_from([0.0, 0.03, 0.21]))
    of = {"rows": sizes, "nodes": sizes, "vocabulary": vocabulary, "temperature": temperature}
    hold(count, check, **of, filters=filters, seed=seeds)


@each_tier
def test_residual_choice(count: int) -> None:
    def check(of: tuple[str, ...], nodes: int, vocabulary: int, seed: int) -> None:
        parents, shape = batch_of_parents(of, nodes, seed), (len(of), nodes, vocabulary)
        p, q = (test_rejection.random_probs(*shape, seed=seed + i) for i in (0, 1))
        tokens = test_rejection.sibling_tokens(parents, q, seed)
        arguments = p, tokens, parents, q, nodes, *test_rejection.uniforms(2, len(of), nodes, seed=seed + 2)
        drawn = q[:, :1], test_rejection.uniforms(len(of), 1, 3, seed=seed + 3)
        for ops in [sampling_ops] + [native_sampling] * (len(FORMS) - 1):
            assert torch.equal(ops.residual_choice(*arguments), sampling_reference.residual_choice(*arguments))
            for got, want in zip(ops.draw_children(*drawn), sampling_reference.draw_children(*drawn), strict=True):
                assert torch.equal(got, want)

    hold(count, check, of=shapes, nodes=st.integers(1, 16), vocabulary=st.integers(16, 99), seed=seeds)


@each_tier
def test_linear_products(count: int) -> None:
    def check(rows: int, n: int, k: int, seed: int) -> None:
        weight, x = test_linear.normal(n, k, seed=seed), test_linear.normal(rows, k, seed=seed + 1)
        packs = [linear_ops.pack, linear_ops.PlainWeight] + [test_linear.pack_native] * (len(FORMS) - 1)
        for product in (pack(weight) for pack in packs):
            test_linear.assert_rounded(product(x), x, weight)

    hold(count, check, rows=st.integers(1, 40), n=st.integers(1, 99), k=st.integers(1, 99), seed=seeds)


@each_tier
def test_experts(count: int) -> None:
    def check(tokens: int, k: int, num_experts: int, n: int, dtype: torch.dtype, seed: int) -> None:
        k = min(k, num_experts)
        x, experts = normal(tokens, 13, seed=seed, dtype=dtype), test_moe.random_experts(tokens, k, num_experts, seed)
        rows, groups = moe_ops.dispatch(x, experts, num_experts)
        want, want_groups = moe_reference.dispatch(x, experts, num_experts)
        assert torch.equal(rows, want)
        assert all(torch.equal(a, b) for a, b in zip(groups, want_groups, strict=True))
        weight, scores = normal(num_experts, n, 13, seed=seed + 1, dtype=dtype), normal(tokens, k, seed=seed + 2)
        y = moe_ops.PlainExperts(weight)(rows, groups)
        test_moe.assert_rounded(y, rows, weight, groups)
        combined = moe_ops.combine(y, groups, scores), moe_reference.combine(y, groups, scores)
        torch.testing.assert_close(*combined, **tolerance(dtype))

    hold(count, check, tokens=sizes, k=sizes, num_experts=sizes, n=sizes, dtype=dtypes, seed=seeds)
