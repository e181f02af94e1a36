"""A gated short convolution as Triton launches against its reference: trees, folds, padding, runs, snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specmamba.kernels import short_conv
from specmamba.kernels.short_conv import Inputs, Weights, reference, torch_ops
from specmamba.kernels.state_records import Buffers, ExtendOperands, RowSet, SnapshotOperands
from specmamba.kernels.tree import reference as tree
from tests.kernels.recurrent.layer_case import copied, moved, operands_of, triton_forms, values
from tests.kernels.recurrent.test_short_conv import Case, make_run
from tests.kernels.rounding import tolerance
from tests.kernels.trees import SHAPES, batch_of_parents
from tests.pairwise import pairwise

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned")

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# the interpreter rounds products to bfloat16 towards zero: to one of the two neighbours
TOLERANCE = {dtype: tolerance(dtype, roundings=8, magnitude=4) for dtype in (torch.float32, torch.bfloat16)}


class PoolCase(Case):
    """A case whose slot 0 is padding, with windows in slots; ``pending`` None is a row of padding."""

    def __init__(
        self,
        channels: int,
        nodes: int,
        pending: list[int | None],
        *,
        folds: list[bool] | None = None,
        width: int = 3,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(channels, nodes, [count or 0 for count in pending], width=width, dtype=dtype)
        windows = torch.full((8, width - 1, channels), torch.nan, dtype=dtype)
        is_padding = torch.tensor([count is None for count in pending])
        self.buffers = replace(self.buffers, states=torch.zeros(8, 0, 0, 0), windows=windows)
        flags = None if folds is None else torch.tensor(folds)
        self.trees = replace(self.trees, slots=(self.trees.slots + 1).masked_fill(is_padding, 0), folds=flags)

    def check_launch(self, device: str) -> None:
        inputs, weights, trees = (moved(x, device) for x in (self.inputs, self.weights, self.trees))
        buffers = moved(copied(self.buffers), device)
        with triton_forms():
            out = short_conv.advance(inputs, weights, operands_of(buffers, trees)).cpu()
        want, wanted = self.wanted_by_reference()
        assert out.dtype is self.inputs.gate.dtype
        torch.testing.assert_close(out, want, **TOLERANCE[out.dtype])
        for got, right in zip(values(moved(buffers, "cpu")), values(wanted), strict=True):
            torch.testing.assert_close(got, right, equal_nan=True, rtol=2**-7, atol=0)

    def wanted_by_reference(self) -> tuple[Tensor, Buffers]:
        """Outputs and buffers; rows that fold move their windows after the verify."""
        buffers, t = copied(self.buffers), self.trees
        is_padding = t.slots == 0
        before = buffers.conv_inputs[t.rows[is_padding]]
        want = reference.tree_verify(self.inputs, self.weights, buffers, t)
        want[is_padding], buffers.conv_inputs[t.rows[is_padding]] = 0, before
        if t.folds is not None:
            assert buffers.windows is not None
            assert t.num_pending is not None
            window, folded = buffers.windows.shape[1], t.folds & ~is_padding
            for row, slot, count in zip(t.rows[folded], t.slots[folded], t.num_pending[folded].tolist(), strict=True):
                newest = buffers.conv_inputs[row, count : count + window].clone()
                buffers.conv_inputs[row, :window] = buffers.windows[slot] = newest
        return want, buffers


@pytest.mark.fast_cases(2)
@pairwise(
    each_dtype,
    pytest.mark.parametrize("channels", [1, 7, 130]),
    pytest.mark.parametrize("nodes", [1, 5, 17]),
    pytest.mark.parametrize("width", [2, 3, 4]),
)
def test_trees(width: int, nodes: int, channels: int, dtype: torch.dtype, gpu_device: str) -> None:
    PoolCase(channels, nodes, [3, None, 0, 4], width=width, dtype=dtype).check_launch(gpu_device)


@pytest.mark.fast_cases(1)
@each_dtype
@pytest.mark.parametrize("width", [2, 3, 5])
def test_folds(width: int, dtype: torch.dtype, gpu_device: str) -> None:
    """Windows that overlap with what they move to, that keep their place, and rows that do not fold."""
    folds = [True, True, True, False]
    PoolCase(7, 4, [1, None, 5, 3], folds=folds, width=width, dtype=dtype).check_launch(gpu_device)


@pytest.mark.fast_cases(2)
@pairwise(
    each_dtype,
    pytest.mark.parametrize("width", [2, 3, 5]),
    pytest.mark.parametrize("lengths", [[1], [0, 2, 1], [35, 17, 16]]),
)
def test_runs(lengths: list[int], width: int, dtype: torch.dtype, gpu_device: str) -> None:
    case = make_run(7, lengths, dtype, width=width)
    # slot 0 is padding
    own = torch.cat([case.state.windows[:1] * torch.nan, case.state.windows])
    slots, counts = RowSet.of([slot + 1 for slot in case.state.slots.rows], own.device), case.state.lengths
    state = ExtendOperands(torch.zeros(len(own), 0, 0, 0), own, slots, counts)
    there = replace(state, windows=own.clone().to(gpu_device), lengths=counts.to(gpu_device))
    there = replace(there, slots=RowSet.of(slots.rows, there.windows.device))
    with triton_forms():
        out = short_conv.advance(moved(case.inputs, gpu_device), moved(case.weights, gpu_device), there).cpu()
    want = reference.extend(case.inputs, case.weights, state)
    for b, length in enumerate(lengths):
        torch.testing.assert_close(out[b, :length], want[b, :length], **TOLERANCE[dtype])
        assert (out[b, length:] == 0).all()
    torch.testing.assert_close(there.windows.cpu(), own, equal_nan=True, rtol=2**-7, atol=0)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("nodes", [1, 6, 19])
def test_snapshots(nodes: int, gpu_device: str) -> None:
    batch, channels, width, on = 3, 11, 3, torch.device(gpu_device)
    parents = batch_of_parents(SHAPES[:batch], nodes, seed=nodes)
    inputs = Inputs(*torch.randn(batch, nodes, 3 * channels).chunk(3, -1))
    weights = Weights(torch.randn(width, channels).t(), torch.randn(channels))
    windows, index = torch.randn(5, width - 1, channels), tree.conv_index(parents, width) + width - 1

    def run(device: torch.device) -> tuple[Tensor, Tensor]:
        after = torch.full((4, nodes, width - 1, channels), torch.nan, device=device)
        rows, slots = RowSet.of([3, 0, 2], device), RowSet.of([4, 1, 2], device)
        states = torch.empty(5, 0, 0, 0, device=device), windows.to(device), torch.empty(0, device=device), after
        state = SnapshotOperands(*states, rows, slots, index.to(device), parents.to(device))
        operands = moved(inputs, str(device)), moved(weights, str(device))
        advance = short_conv.advance if device is on else torch_ops.advance
        return advance(*operands, state).cpu(), after.cpu()

    with triton_forms():
        got = run(on)
    for mine, right in zip(got, run(torch.device("cpu")), strict=True):
        torch.testing.assert_close(mine, right, equal_nan=True, **tolerance())
