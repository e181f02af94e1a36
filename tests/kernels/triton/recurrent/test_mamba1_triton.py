"""A Mamba1 layer around its inner projections as Triton launches, against the float64 formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specmamba.kernels.mamba1 import Steps
from specmamba.kernels.state_records import ExtendOperands, RowSet
from specmamba.layers.mamba1 import Mamba1Weights, mix
from tests.kernels.recurrent.layer_case import TOLERANCE, copied, moved, operands_of
from tests.kernels.test_mamba1 import Case

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("launchable", "poisoned")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SIZES = 7, 37  # state size and channels


class Given(Mamba1Weights):
    """Time steps, B and C are given, not projected."""

    given: Steps

    def steps(self, x: Tensor) -> Steps:
        assert x.dtype is self.given.dt.dtype
        return self.given


def weights_of(case: Case, device: str) -> Given:
    def unused(_: Tensor) -> Tensor:
        raise AssertionError("steps are given")

    w = moved(case.weights, device)
    weights = Given(w.conv, w.conv_bias, w.dt_bias, w.rates, w.skip, project=unused, norms=None, expand=unused)
    object.__setattr__(weights, "given", Steps(*(x.to(device) for x in case.steps)))
    return weights


@each_dtype
def test_trees(dtype: torch.dtype, gpu_device: str) -> None:
    case = Case(SIZES, 5, dtype)
    case.trees = replace(case.trees, slots=case.trees.slots + 1)  # slot 0 is padding
    case.buffers = replace(case.buffers, states=torch.cat([case.buffers.states[:1], case.buffers.states]))
    before, after, trees = copied(case.buffers), moved(case.buffers, gpu_device), moved(case.trees, gpu_device)
    inputs = case.mixed.to(gpu_device), case.gate.to(gpu_device)
    out = mix(*inputs, weights_of(case, gpu_device), operands_of(after, trees)).cpu()
    x, dt, want = case.wanted(before)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), want, **TOLERANCE[dtype])
    nodes, after = slice(trees.node_offset, trees.node_offset + 5), moved(after, "cpu")
    for kept, value in ((after.u, dt * x), (after.decay, dt)):
        torch.testing.assert_close(kept[case.trees.rows, nodes, 0].double(), value, **TOLERANCE[torch.float32])


@each_dtype
def test_prompts(dtype: torch.dtype, gpu_device: str) -> None:
    """Token by token they are chains that begin at an empty window and the state in their slot."""
    case = Case(SIZES, 9, dtype, shapes=("chain",))
    rows, lengths = len(case.gate), torch.tensor([9, 4, 1, 7, 9])
    states, windows = torch.randn(rows + 1, 1, *SIZES), torch.zeros(rows + 1, 3, SIZES[1], dtype=dtype)
    slots = RowSet.of(list(range(1, rows + 1)), torch.device(gpu_device))
    pools = states.to(gpu_device, copy=True), windows.to(gpu_device)
    state = ExtendOperands(*pools, slots, lengths.to(gpu_device))
    inputs = case.mixed.to(gpu_device), case.gate.to(gpu_device)
    out = mix(*inputs, weights_of(case, gpu_device), state).cpu()
    empty = torch.zeros(rows, dtype=torch.int64)
    index = torch.arange(9)[:, None] + torch.arange(4)
    case.trees = replace(
        case.trees,
        rows=torch.arange(rows),
        slots=torch.arange(1, rows + 1),
        conv_index=index.expand(rows, -1, -1),
        num_pending=empty,
        node_offset=0,
    )
    inputs_of = torch.zeros(rows, 12, SIZES[1], dtype=dtype)
    records = {name: torch.zeros(rows, 9, 1, size) for name, size in zip(("k", "u", "decay"), (7, 37, 37), strict=True)}
    case.buffers = replace(case.buffers, states=states, conv_inputs=inputs_of, **records)
    _, _, want = case.wanted(case.buffers)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(out[row, :length].double(), want[row, :length], **TOLERANCE[dtype])
        assert torch.equal(pools[1][row + 1, -1].cpu(), case.mixed[row, length - 1])
