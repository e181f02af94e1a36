"""The causal convolution in Triton: against the reference, and what it leaves in pools, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specmamba.kernels import causal_conv1d, gpu
from specmamba.kernels.causal_conv1d import reference
from specmamba.kernels.dispatch import operator_of
from specmamba.kernels.state_records import Buffers, ExtendOperands, RowSet, Trees
from specmamba.kernels.tree import reference as tree
from tests.kernels.recurrent.layer_case import moved
from tests.kernels.rounding import tolerance
from tests.kernels.trees import SHAPES, batch_of_parents, mask_of
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCE = tolerance()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
NUM_SLOTS = 9


@pytest.fixture
def triton_ops(gpu_device: str) -> Any:
    from specmamba.kernels.causal_conv1d import triton_ops

    return triton_ops


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def embedded(x: Tensor) -> Tensor:
    """The same as a part of a wider projection, with NaN on both sides."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 7), torch.nan)
    wide[..., 3:-4] = x
    return wide[..., 3:-4]


def is_same(got: Any, right: Tensor) -> bool:
    """Bit for bit, where NaN equals NaN."""
    return torch.equal(got.cpu().nan_to_num(99.0), right.nan_to_num(99.0))


def make_trees(pending: list[int], nodes: int, width: int, offset: int, folds: list[bool] | None) -> Trees:
    """A tree per entry of ``pending``; the second row is padding, and its slot 0."""
    batch, gen = len(pending), torch.Generator().manual_seed(nodes)
    parents = batch_of_parents(tuple(SHAPES[b % len(SHAPES)] for b in range(batch)), nodes, seed=nodes)
    counts = torch.tensor(pending)
    relative = tree.conv_index(parents, width)
    index = relative + width - 1 + torch.where(relative >= 0, offset, counts[:, None, None])
    rows, slots = (
        torch.randperm(batch + 2, generator=gen)[:batch],
        1 + torch.randperm(NUM_SLOTS - 1, generator=gen)[:batch],
    )
    slots[1:2] = 0
    given = None if set(pending) == {offset} else counts
    return Trees(rows, slots, index, given, offset, mask_of(parents), None if folds is None else torch.tensor(folds))


def make_buffers(trees: Trees, pending: list[int], width: int, channels: int, dtype: torch.dtype) -> Buffers:
    """Memory that must not be read holds NaN, and rows are strided, as in one layer of a pool."""
    nodes = trees.conv_index.shape[1]
    capacity = trees.node_offset + nodes + 1
    conv_inputs = embedded(torch.full((len(pending) + 2, width - 1 + capacity, channels), torch.nan, dtype=dtype))
    for row, count in zip(trees.rows.tolist(), pending, strict=True):
        conv_inputs[row, : width - 1 + count] = normal(width - 1 + count, channels, seed=row, dtype=dtype)
    none = torch.empty(0)
    windows = torch.full((NUM_SLOTS, 2, width - 1, channels), torch.nan, dtype=dtype)[:, 0]
    return Buffers(none, conv_inputs, none, none, none, windows)


def expected(
    inputs: Tensor, buffers: Buffers, trees: Trees, pending: list[int], weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and conv_inputs and windows afterwards, row by row."""
    assert buffers.windows is not None
    stored, windows = buffers.conv_inputs.clone(), buffers.windows.clone()
    first, window, y = weight.shape[1] - 1 + trees.node_offset, weight.shape[1] - 1, torch.zeros(inputs.shape)
    for b, (row, slot) in enumerate(zip(trees.rows.tolist(), trees.slots.tolist(), strict=True)):
        if slot == 0:
            continue
        stored[row, first : first + inputs.shape[1]] = inputs[b]
        of_row = stored[row : row + 1].double(), trees.conv_index[b : b + 1]
        y[b] = reference.tree_verify(*of_row, weight.double(), None if bias is None else bias.double())[0].float()
        if trees.folds is not None and trees.folds[b]:
            moved_up = stored[row, pending[b] : pending[b] + window].clone()
            stored[row, :window] = windows[slot] = moved_up
    return y, stored, windows


def check_verify(
    triton_ops: Any,
    device: str,
    pending: list[int],
    nodes: int,
    offset: int,
    *,
    width: int = 4,
    channels: int = 5,
    dtype: torch.dtype = torch.float32,
    folds: list[bool] | None = None,
    has_bias: bool = True,
) -> None:
    trees = make_trees(pending, nodes, width, offset, folds)
    buffers = make_buffers(trees, pending, width, channels, dtype)
    inputs = embedded(normal(len(pending), nodes, channels, seed=3, dtype=dtype))
    weight = normal(width, channels, seed=4).t()  # as checkpoints' weights are kept: by tap
    bias = normal(channels, seed=5) if has_bias else None
    want, stored, windows = expected(inputs, buffers, trees, pending, weight, bias)
    there = moved(buffers, device)
    on = [None if x is None else x.to(device) for x in (inputs, weight, bias)]
    y = triton_ops.tree_verify_in_place(on[0], there, moved(trees, device), *on[1:])
    assert (y.dtype, y.shape) == (torch.float32, inputs.shape)
    torch.testing.assert_close(y.cpu(), want, **TOLERANCE)
    for got, right in ((there.conv_inputs, stored), (there.windows, windows)):
        assert is_same(got, right)
    assert torch.equal(y[trees.slots == 0].cpu(), torch.zeros_like(want[trees.slots == 0]))


@pytest.mark.fast_cases(1)
@pairwise(
    DTYPES,
    pytest.mark.parametrize("width", [2, 3, 4]),
    pytest.mark.parametrize("nodes", [1, 5, 17]),
)
def test_tree_verify(triton_ops: Any, gpu_device: str, nodes: int, width: int, dtype: torch.dtype) -> None:
    check_verify(triton_ops, gpu_device, [3, 0, 1, 4], nodes, 4, width=width, dtype=dtype, has_bias=width == 3)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("nodes", range(1, 17))
def test_every_tree_size_and_fill(triton_ops: Any, gpu_device: str, nodes: int) -> None:
    pending = list(range(nodes % 3, 8))
    folds = [(b + nodes) % 3 > 0 for b in range(len(pending))]
    check_verify(triton_ops, gpu_device, pending, nodes, 7, folds=folds, channels=3)


def test_a_large_tree(triton_ops: Any, gpu_device: str) -> None:
    check_verify(triton_ops, gpu_device, [6, 2, 0], 64, 6, channels=70, dtype=torch.bfloat16, folds=[True] * 3)


@pytest.mark.fast_cases(1)
@pairwise(
    DTYPES,
    pytest.mark.parametrize("width", [2, 3, 4]),
    pytest.mark.parametrize("same", [False, True], ids=["ragged", "same"]),
)
def test_folds(triton_ops: Any, gpu_device: str, same: bool, width: int, dtype: torch.dtype) -> None:
    """Windows that overlap with what they move to, that keep their place, and rows that do not fold."""
    pending = [2] * 5 if same else [1, 2, 0, 5, 3]
    folds = [True, True, True, True, False]
    check_verify(triton_ops, gpu_device, pending, 4, max(pending), width=width, dtype=dtype, folds=folds)


@pytest.mark.parametrize("channels", [1, 64, 130])
def test_channels_beside_the_blocks(triton_ops: Any, gpu_device: str, channels: int) -> None:
    for nodes in (1, 9):
        check_verify(triton_ops, gpu_device, [2, 0], nodes, 2, channels=channels, folds=[True, False])


def test_nodes_are_convolved_as_stored(triton_ops: Any, gpu_device: str) -> None:
    """Rounded to the records' dtype, to one of its two neighbours: the interpreter rounds towards zero."""
    pending, width = [1, 1], 4
    trees = make_trees(pending, 6, width, 3, None)
    buffers = make_buffers(trees, pending, width, 5, torch.bfloat16)
    inputs, weight = normal(2, 6, 5, seed=1), normal(5, width, seed=2)
    there = moved(buffers, gpu_device)
    y = triton_ops.tree_verify_in_place(inputs.to(gpu_device), there, moved(trees, gpu_device), weight.to(gpu_device))
    stored = there.conv_inputs[trees.rows[0]].cpu()
    torch.testing.assert_close(stored[6:12].float(), inputs[0], rtol=2**-7, atol=0)
    want = reference.tree_verify(stored[None].double(), trees.conv_index[:1], weight.double())
    torch.testing.assert_close(y[:1].cpu(), want.float(), **TOLERANCE)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter: infinity times 0
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_affects_a_node_and_its_descendants_only(triton_ops: Any, gpu_device: str, value: float) -> None:
    pending, nodes, channels = [2, 0, 3], 9, 4
    trees = make_trees(pending, nodes, 4, 3, None)
    buffers = make_buffers(trees, pending, 4, channels, torch.float32)
    inputs, weight = normal(3, nodes, channels, seed=1), normal(channels, 4, seed=2)
    inputs[0, 4, 2] = value
    want, _, _ = expected(inputs, buffers, trees, pending, weight, None)
    there, on = moved(buffers, gpu_device), moved(trees, gpu_device)
    y = triton_ops.tree_verify_in_place(inputs.to(gpu_device), there, on, weight.to(gpu_device)).cpu()
    affected = torch.zeros_like(y, dtype=torch.bool)
    affected[0, :, 2] = (trees.conv_index[0] == 3 + 3 + 4).any(1)
    assert affected.any()
    assert y[~affected].isfinite().all()
    torch.testing.assert_close(y, want, equal_nan=True, **TOLERANCE)


@pairwise(
    DTYPES,
    pytest.mark.parametrize("width", [2, 4]),
    pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (3, 6), (2, 19)]),
)
def test_snapshots(triton_ops: Any, gpu_device: str, batch: int, nodes: int, width: int, dtype: torch.dtype) -> None:
    channels = 11
    parents = batch_of_parents(SHAPES[-batch:], nodes, seed=nodes)
    index = tree.conv_index(parents, width) + width - 1
    x = embedded(normal(batch, nodes, channels, seed=1, dtype=dtype))
    window = normal(batch + 2, 2, width - 1, channels, seed=2, dtype=dtype)[1:-1, 1]  # of slots of one layer
    weight, bias = normal(channels, width, seed=3), normal(channels, seed=4) if width == 4 else None
    on = [None if t is None else t.to(gpu_device) for t in (x, window, index, weight, bias)]
    y, windows = triton_ops.tree_verify_snapshots(*on)
    want, right = reference.tree_verify_snapshots(x, window, index, weight, bias)
    torch.testing.assert_close(y.cpu(), want, **TOLERANCE)
    assert torch.equal(windows.cpu(), right)
    assert (y.dtype, windows.dtype) == (torch.float32, dtype)


@pytest.mark.parametrize("can_launch", [True, False])
def test_the_operator_takes_triton_where_it_can(can_launch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "can_launch", lambda *_: can_launch)
    pool, slots = torch.zeros(2, 3, 5), RowSet.of([1], torch.device("cpu"))
    state = ExtendOperands(torch.zeros(2, 1, 1, 1), pool, slots, torch.tensor([2]))
    chosen = operator_of(causal_conv1d.advance).choose(torch.zeros(1, 2, 5), torch.zeros(5, 4), None, state)
    assert chosen == ("triton" if can_launch else "torch")


def extend_case(
    lengths: list[int], slots: list[int], width: int, channels: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = embedded(normal(len(lengths), max(lengths) + 1, channels, seed=1, dtype=dtype))
    counts = torch.tensor(lengths)
    x[torch.arange(x.shape[1]) >= counts[:, None]] = torch.nan  # padding: must reach neither y nor a window
    windows = torch.full((NUM_SLOTS, 2, width - 1, channels), torch.nan, dtype=dtype)[:, 1]
    for slot in slots:
        windows[slot] = torch.nan if slot == 0 else normal(width - 1, channels, seed=slot, dtype=dtype)
    return x, windows, torch.tensor(slots), counts


@pytest.mark.fast_cases(1)
@pairwise(
    DTYPES,
    pytest.mark.parametrize("width", [2, 3, 4]),
    pytest.mark.parametrize("lengths", [[1], [0, 2, 1], [1, 2, 3, 4], [35, 17, 16]]),
)
def test_extend(triton_ops: Any, gpu_device: str, lengths: list[int], width: int, dtype: torch.dtype) -> None:
    slots, channels = [5, 3, 8, 1][: len(lengths)], 7
    x, windows, index, counts = extend_case(lengths, slots, width, channels, dtype)
    weight, bias = normal(width, channels, seed=3).t(), normal(channels, seed=4) if width == 3 else None
    doubles = (x.double(), windows[index].double(), weight.double(), counts, None if bias is None else bias.double())
    want, after = reference.extend(*doubles)
    want[torch.arange(x.shape[1]) >= counts[:, None]] = 0
    right = windows.index_copy(0, index, after.to(dtype))
    on = [None if t is None else t.to(gpu_device) for t in (x, windows, index, weight, counts, bias)]
    y = triton_ops.extend_in_place(*on)
    torch.testing.assert_close(y.cpu(), want.float(), **TOLERANCE)
    assert is_same(on[1], right)


def test_padding_rows_of_an_extend(triton_ops: Any, gpu_device: str) -> None:
    """Rows of slot 0, some of them with tokens, leave slot 0 as it is."""
    x, windows, index, counts = extend_case([2, 3, 0, 4], [0, 6, 2, 0], 4, 6, torch.float32)
    weight = normal(6, 4, seed=3)
    want, after = reference.extend(x, windows[index], weight, counts)
    right = windows.index_copy(0, index[1:2], after[1:2])
    on = [t.to(gpu_device) for t in (x, windows, index, weight, counts)]
    y = triton_ops.extend_in_place(*on).cpu()
    torch.testing.assert_close(y[1, :3], want[1, :3], **TOLERANCE)
    assert is_same(on[1], right)
    assert torch.equal(y[[0, 2, 3]], torch.zeros(3, *y.shape[1:]))


def test_runs_in_two_parts_equal_one(triton_ops: Any, gpu_device: str) -> None:
    x, weight, slots = normal(1, 13, 7, seed=7), normal(7, 4, seed=9), torch.tensor([2])
    x, weight, slots = (t.to(gpu_device) for t in (x, weight, slots))
    for split in (1, 2, 5, 12):
        windows = normal(4, 3, 7, seed=8).to(gpu_device)
        own = windows.clone()
        whole = triton_ops.extend_in_place(x, windows, slots, weight, slots.new_tensor([13]))
        parts = (x[:, :split], slots.new_tensor([split])), (x[:, split:], slots.new_tensor([13 - split]))
        got = [triton_ops.extend_in_place(part, own, slots, weight, count) for part, count in parts]
        torch.testing.assert_close(torch.cat(got, 1), whole, **TOLERANCE)
        assert torch.equal(own, windows)


def test_nothing_to_do(triton_ops: Any, gpu_device: str) -> None:
    trees = make_trees([1, 1], 2, 4, 1, None)
    buffers, weight = make_buffers(trees, [1, 1], 4, 5, torch.float32), normal(5, 4, seed=1)
    none = replace(trees, rows=trees.rows[:0], slots=trees.slots[:0], conv_index=trees.conv_index[:0])
    assert triton_ops.tree_verify_in_place(torch.empty(0, 2, 5), buffers, none, weight).shape == (0, 2, 5)
    y = triton_ops.extend_in_place(torch.empty(2, 0, 5), buffers.windows, trees.slots, weight, torch.zeros(2))
    assert y.shape == (2, 0, 5)
