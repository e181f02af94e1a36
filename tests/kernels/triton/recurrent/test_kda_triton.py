"""The gated delta rule with a log decay for each key channel in Triton, against the float64 recurrence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specmamba.kernels import gated_delta_rule, state_records
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.gated_delta_rule import reference
from specmamba.kernels.state_records import ExtendOperands, RowSet
from specmamba.kernels.state_records import reference as records_reference
from tests.kernels.recurrent.records import make_records, make_state
from tests.kernels.recurrent.strong_decay import DECAYS, mixed
from tests.kernels.recurrent.test_gated_delta_rule import Tokens
from tests.kernels.recurrent.test_kda_rule import make_tokens
from tests.kernels.rounding import tolerance
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of

pytest.importorskip("triton")
from specmamba.kernels.gated_delta_rule import triton_ops
from specmamba.kernels.state_records import triton_ops as records_ops
from tests.kernels.triton.recurrent.test_gated_delta_rule_triton import (
    KINDS,
    TYPES,
    InPlace,
    Run,
    bits,
    check_verify,
    may_be_invalid,
    verify,
)

pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCE = tolerance(terms=160)
# (nodes, heads): one node and more, two blocks of values, odd widths, grouped heads
SIZES = [(1, (1, 2, 20, 40)), (2, (1, 3, 7, 5)), (7, (2, 4, 16, 24)), (5, (1, 1, 130, 12)), (17, (1, 1, 40, 24))]
HEADS = (1, 2, 16, 8)


def records_of(pending: torch.Tensor, nodes: int, offset: int, heads: Any, seed: int, strong: bool) -> Any:
    """Pending records; those that a verify writes hold NaN until then."""
    made = make_records(len(pending), offset + nodes + 2, heads, pending, seed, has_channels=True)
    if strong:
        is_pending = (torch.arange(made.decay.shape[1]) < pending[:, None])[..., None, None]
        made = made._replace(decay=torch.where(is_pending, mixed(DECAYS, made.decay.shape, seed), made.decay))
    for x in made:
        x[:, offset : offset + nodes] = torch.nan
    return made


@pytest.mark.fast_cases("7-heads2-True")
@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize(("nodes", "heads"), SIZES)
def test_tree_verify_matches_reference(
    nodes: int, heads: tuple[int, int, int, int], strong: bool, gpu_device: str
) -> None:
    """Trees of all shapes behind 0 to 6 records; log decays of -3000 to 0, mixed, too."""
    pending, offset = torch.tensor([0, 6, 1, 3, 5]), 6
    tokens, state = make_tokens(len(SHAPES), nodes, heads, nodes, strong=strong), make_state(len(SHAPES), heads, 2)
    records = records_of(pending, nodes, offset, heads, nodes + 1, strong)
    check_verify(gpu_device, tokens, state, records, pending, offset, mask_of(batch_of_parents(SHAPES, nodes, seed=3)))


@pytest.mark.parametrize(("nodes", "shape"), [(3, "bushy"), (34, "chain")])
def test_no_counts_of_pending_records_mean_all(nodes: int, shape: str, gpu_device: str) -> None:
    tokens, state = make_tokens(1, nodes, HEADS, 4), make_state(1, HEADS, 5)
    records = records_of(torch.tensor([4]), nodes, 4, HEADS, 6, strong=False)
    mask = mask_of(batch_of_parents((shape,), nodes, seed=0))
    check_verify(gpu_device, tokens, state, records, None, 4, mask)


def test_a_path_has_the_same_bits_in_any_tree(gpu_device: str) -> None:
    """A node that continues the one before it, and one that goes back to the state before the root."""
    tokens, state = make_tokens(1, 5, HEADS, 7), make_state(1, HEADS, 8)
    tokens = Tokens(*(torch.cat([x, x]) for x in tokens))
    for x in tokens:
        x[0, 2:4] = x[1, 3:]
    pending = torch.tensor([3, 3])
    records = make_records(1, 8, HEADS, pending[:1], 9, has_channels=True)
    records = type(records)(*(torch.cat([x, x]) for x in records))
    mask = mask_of(torch.tensor([[-1, 0, 1, 2, 3], [-1, 0, 0, 1, 3]]))
    out, after = verify(gpu_device, tokens, torch.cat([state, state]), records, pending, 3, mask)
    assert torch.equal(out[1, [0, 1, 3, 4]], out[0, :4])
    assert torch.equal(after.u[1, [3, 4, 6, 7]], after.u[0, 3:7])


@pytest.mark.fast_cases("bf16-5")
@pytest.mark.parametrize(("nodes", "is_chain"), KINDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_in_place_with_folds(dtype: str, nodes: int, is_chain: bool, gpu_device: str) -> None:
    """A row that folds goes on from the checkpoint that it leaves; other slots and rows keep every bit."""
    InPlace(nodes, TYPES[dtype], is_chain, has_channels=True).check(gpu_device)


def test_a_fold_changes_no_output(gpu_device: str) -> None:
    case = InPlace(5, has_channels=True)
    folded, _ = case.run(gpu_device, case.trees)
    out, after = case.run(gpu_device, replace(case.trees, folds=None))
    assert torch.equal(folded, out)
    assert torch.equal(bits(after.states), bits(case.buffers.states))


def test_float16_ends_at_its_largest_number(gpu_device: str) -> None:
    case = InPlace(4, torch.float16, has_channels=True)
    case.buffers.u[case.trees.rows[0], 0] *= 1e7
    out, after = case.run(gpu_device, case.trees)
    assert after.states[case.trees.slots[0]].abs().max() == 65504
    assert out.isfinite().all()


@pytest.mark.fast_cases("binary")
@may_be_invalid
@pytest.mark.parametrize("shape", ["binary", "chain"])
def test_nan_affects_a_node_and_its_descendants_only(shape: str, gpu_device: str) -> None:
    """One row for each number of a node that may be spoilt, in every way; of g one channel's."""
    nodes, hit, batch = 4, 1, 15
    tokens, state = make_tokens(batch, nodes, HEADS, seed=15), make_state(batch, HEADS, seed=14)
    pending = torch.arange(batch) % 3
    records = make_records(batch, 2 + nodes, HEADS, pending, seed=16, has_channels=True)
    mask = mask_of(batch_of_parents((shape,) * batch, nodes, seed=0))
    want, clean = verify(gpu_device, tokens, state, records, pending, 2, mask)
    affected = torch.zeros(batch, nodes, 2, dtype=torch.bool)
    for row in range(batch):
        field, value = Tokens._fields[row % 5], (torch.nan, torch.inf, -torch.inf)[row // 5]
        x = getattr(tokens, field)
        x[(row, hit, *[0] * (x.dim() - 2))] = value
        below = mask[row, :, hit] if field != "q" else torch.arange(nodes) == hit
        affected[row, below] = torch.tensor([True, field in "qk"])
    out, left = verify(gpu_device, tokens, state, records, pending, 2, mask)
    assert torch.equal(~out.isfinite().all(-1), affected)
    assert torch.equal(out[~affected], want[~affected])
    others = ~mask[:, :, hit]
    for mine, right in zip(left, clean, strict=True):
        assert mine.isfinite().all()
        assert torch.equal(mine[:, 2:][others], right[:, 2:][others])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("heads", "dtype"), [((1, 2, 16, 24), "fp32"), ((1, 1, 40, 8), "bf16"), ((1, 1, 7, 5), "fp16")]
)
def test_extend_in_place(heads: tuple[int, int, int, int], dtype: str, gpu_device: str) -> None:
    case = Run(heads, TYPES[dtype], has_channels=True)
    out, states = case.run(gpu_device)
    case.check(out, states)
    padding = torch.arange(71) >= case.lengths.masked_fill(case.slots == 0, 0)[:, None]
    assert torch.equal(out[padding], torch.zeros_like(out[padding]))


def test_extend_with_strong_decays(gpu_device: str) -> None:
    tokens, states = make_tokens(1, 20, HEADS, 3, strong=True), make_state(2, HEADS, 4)
    want, end = reference.extend(*tokens.double(), states[1:].double(), torch.tensor([20]))
    there, places = states.to(gpu_device), (torch.tensor([1]).to(gpu_device), torch.tensor([20]).to(gpu_device))
    out = triton_ops.extend_in_place(*(x.to(gpu_device) for x in tokens), there, *places)
    torch.testing.assert_close(out.cpu().double(), want, **TOLERANCE)
    torch.testing.assert_close(there[1:].cpu().double(), end, **TOLERANCE)


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("has_parents", [False, True])
def test_snapshots(has_parents: bool, gpu_device: str) -> None:
    nodes, shapes = 6, ("bushy", "padded") if has_parents else ("chain", "chain")
    tokens, state = make_tokens(2, nodes, (1, 2, 20, 40), seed=5), make_state(2, (1, 2, 20, 40), seed=6)
    parents = batch_of_parents(shapes, nodes, seed=7)
    snapshots = torch.full((2, nodes, *state.shape[1:]), torch.nan, device=gpu_device)
    wanted = torch.empty(snapshots.shape, dtype=torch.float64)
    want = reference.tree_verify_snapshots(*tokens.double(), state.double(), wanted, parents)
    arguments = (x.to(gpu_device) for x in (*tokens, state))
    out = triton_ops.tree_verify_snapshots(*arguments, snapshots, parents.to(gpu_device) if has_parents else None)
    torch.testing.assert_close(out.cpu().double(), want, **TOLERANCE)
    torch.testing.assert_close(snapshots.cpu().double(), wanted, **TOLERANCE)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("heads", [(1, 3, 7, 5), (2, 4, 70, 40)])
def test_folds(heads: tuple[int, int, int, int], strong: bool, gpu_device: str) -> None:
    """Into new memory, and in place; records as one row's of several layers, which are strided."""
    num_pending, state = torch.tensor([0, 1, 9]), make_state(3, heads, 13)
    records = [torch.stack([x, x], 1)[:, 1] for x in records_of(num_pending, 1, 9, heads, 11, strong)]
    want = records_reference.fold(state.double(), *(x.double() for x in records), num_pending)
    there = [x.to(gpu_device) for x in (state, *records, num_pending)]
    folded = records_ops.fold(*there)
    torch.testing.assert_close(folded.cpu().double(), want, **TOLERANCE)
    assert torch.equal(folded[0].cpu(), state[0])
    assert records_ops.fold(*there, there[0]) is there[0]
    assert torch.equal(there[0], folded)


@pytest.mark.usefixtures("launchable")
def test_the_operators_take_triton(gpu_device: str) -> None:
    if gpu_device == "cuda":
        pytest.skip("tensors on the CPU")
    tokens, state = make_tokens(1, 1, HEADS, seed=26), make_state(1, HEADS, seed=27)
    operands = ExtendOperands(state, state, RowSet.of([0], state.device), torch.tensor([1]))
    assert operator_of(gated_delta_rule.advance).choose(*tokens, operands) == "triton"
    records = make_records(1, 2, HEADS, torch.tensor([2]), 1, has_channels=True)
    assert operator_of(state_records.fold).choose(state, *records, torch.tensor([2])) == "triton"
